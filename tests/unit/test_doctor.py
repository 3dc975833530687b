"""`serve-app doctor`: how it tells what the checks found. The checks themselves: test_requirements.py."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app import cli
from serve_app.cli.doctor import Application, Diagnosis, diagnose, plain, show
from serve_app.config import AppConfig
from serve_app.gpu.requirements import CHECKS
from serve_app.live import LiveSettings

from .test_requirements import FACTS

MODEL = {"id": "m", "engine_kwargs": {"tensor_parallel_size": 2}}
APP = AppConfig.model_validate({"models": [MODEL], "slot": {"gpus": 2, "nccl": {"nvls": False}}})


TOGETHER = ["gpus", "versions", "clocks", "ports"]


def diagnosis(**nodes: object) -> Diagnosis:
    return diagnose(Application("default", APP, LiveSettings()), nodes)  # type: ignore[arg-type]


def shown(found: Diagnosis, note: str = "") -> str:
    out = Console(file=io.StringIO(), width=100, highlight=False)
    show(out, note, [found])
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_good_node_has_a_row_for_each_check_and_variable() -> None:
    """The ranks' variables say where they come from."""
    found = diagnosis(abcdef0123=replace(FACTS, environment={"NCCL_DEBUG": "INFO"}))
    assert not found.failed
    said = shown(found, note="only this machine was checked")
    assert "node gpu-7  10.0.0.7  8 GPUs  abcdef01" in said
    assert said.count("  ok ") == len(CHECKS) + len(TOGETHER)
    for part in ("NCCL_SOCKET_IFNAME==eth0", "NCCL_NVLS_ENABLE=0", "NCCL_DEBUG=INFO (set there)", "note: only this"):
        assert part in said


def test_bad_node_says_what_to_do() -> None:
    """The error stands in full, its remedy below it."""
    found = diagnosis(a=FACTS, b=replace(FACTS, container_bytes=1))
    assert found.failed
    said = shown(found)
    assert "  error  host_ram" in said
    assert "use tier: disk" in said


def test_silent_node_is_an_error() -> None:
    """Nobody should take a node for good that could not be asked."""
    found = diagnosis(a=FACTS, abcdef0123="it has not answered within 60 s")
    assert found.failed
    assert "node abcdef01  not examined: it has not answered within 60 s" in shown(found)


def test_cluster_without_gpus_is_an_error() -> None:
    """Each node alone is in order."""
    found = diagnosis(a=replace(FACTS, ray=replace(FACTS.ray, gpus=0)))
    assert found.failed
    assert not found.nodes[0].failed
    assert "a slot takes 2" in shown(found)


def test_json_has_everything() -> None:
    """Plain values only."""
    said = json.loads(json.dumps(plain(diagnosis(a=FACTS, b="gone"))))
    first, second = said["nodes"]
    assert (first["node"], first["gpus"], second["trouble"]) == ("gpu-7", 8, "gone")
    assert [finding["level"] for finding in first["findings"]] == ["ok"] * len(CHECKS)
    assert {"name": "NCCL_NVLS_ENABLE", "value": "0", "said_by": "serve_app"} in first["variables"]
    assert [finding["check"] for finding in said["together"]] == TOGETHER


def test_wrong_config_file_is_told_before_any_node_is_asked(tmp_path: pytest.TempPathFactory) -> None:
    """Each problem names the file."""
    result = CliRunner().invoke(cli.app, ["doctor", "--config", f"{tmp_path}/missing.yaml"])
    assert result.exit_code == 1
    assert "missing.yaml: cannot be read" in str(result.exception)
