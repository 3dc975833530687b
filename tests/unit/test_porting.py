"""`serve-app import`: configurations as Ray Serve LLM's users have them, and what becomes of every key in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app import cli
from serve_app.cli.files import UNCHECKED, check_file
from serve_app.errors import ConfigError
from serve_app.porting import Ported, port
from serve_app.yaml_file import read_yaml

SAMPLES = sorted((Path(__file__).parent / "llm_configs").glob("*.yaml"))


def ported(name: str) -> Ported:
    return port(read_yaml(Path(__file__).parent / "llm_configs" / f"{name}.yaml"))


def application(found: Ported, name: str) -> dict[str, Any]:
    return next(entry for entry in found.config["applications"] if entry["name"] == name)


def live(entry: dict[str, Any]) -> dict[str, Any]:
    return next(deployment["user_config"] for deployment in entry["deployments"] if deployment["name"] == "Pool")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.stem)
def test_what_is_printed_passes_check(sample: Path, tmp_path: Path) -> None:
    """As a user does it: the output into a file, and that file through `serve-app check`."""
    assert len(SAMPLES) == 3
    printed = CliRunner().invoke(cli.app, ["import", str(sample)])
    assert printed.exit_code == 0, printed.output
    (tmp_path / "ported.yaml").write_text(printed.stdout)
    report = check_file(tmp_path / "ported.yaml")
    assert report.problems == []
    assert report.applications
    notes = [note for note in report.notes if not note.startswith(UNCHECKED) and "runtime_env" not in note]
    assert notes == []


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.stem)
def test_no_key_is_lost_without_a_word(sample: Path) -> None:
    """Every value of the sample stands in the result, or a key that leads to it in a note."""
    found = port(read_yaml(sample))
    values = {str(value) for _, value in leaves(found.config)}
    for path, value in leaves(read_yaml(sample)):
        noted = any(re.search(rf"\b{re.escape(key)}\b", note) for key in path for note in found.notes)
        assert str(value) in values or noted or value in MEANS_NOTHING_HERE, f"{'.'.join(path)}: {value}"


# Whose builder it is, that the engine is vLLM, and what the application was called whose models have their own now.
MEANS_NOTHING_HERE = ("ray.serve.llm:build_openai_app", "vLLM", "llms", "/")


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, str(name)))]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner, path)]
    return [(path, value)]


def test_each_model_becomes_an_application() -> None:
    """With the slots that its replicas were, and a place of its own for clients; others' applications stay."""
    found = ported("two_models")
    small, large = application(found, "qwen-0.5b"), application(found, "llama-3.1-70b")
    assert application(found, "other") == {"name": "other", "route_prefix": "/other", "import_path": "elsewhere:app"}
    assert (small["route_prefix"], large["route_prefix"]) == ("/qwen-0.5b", "/llama-3.1-70b")
    assert live(small)["slots"] == {"min": 2, "max": 4, "standby": 1}
    assert live(small)["promote_when"] == {"in_flight": 64}
    assert small["args"]["slot"] | {"cpus": 0} == {"gpus": 1, "cpus": 0, "max_ongoing_requests": 128}
    assert large["args"]["slot"]["gpus"] == 8 and "nodes" not in large["args"]["slot"]
    assert large["args"]["slot"]["shutdown_grace_s"] == 300
    assert live(large)["hold"] == {"max_held_requests": 500}
    assert {"name": "Slot", "health_check_timeout_s": 60} in large["deployments"]
    assert "request_timeout_s" not in found.config["http_options"]


def test_notes_say_what_to_do() -> None:
    """A standby costs one slot more where replicas were fixed; a bucket has to be copied; a queue was too long."""
    notes = "\n".join(ported("two_models").notes)
    for words in (
        "slots.max: 2, one more than max_replicas",
        "copy s3://models/llama-3.1-70b-instruct/ to /models/llama-3.1-70b",
        "slot.max_ongoing_requests: 282, max_num_seqs (256) and a short queue; it was 10000",
        "lora_config: adapters stand in engine_kwargs",
        "autoscaling_config.downscale_delay_s: slots.demote_after_s",
        "args.ingress_deployment_config: there is no separate ingress",
    ):
        assert words in notes


def test_model_over_two_nodes_keeps_its_shape() -> None:
    """Sixteen GPUs on two nodes, and scale to zero as `min_active: 0`."""
    found = ported("one_llm_config")
    (only,) = found.config["applications"]
    slot = only["args"]["slot"]
    assert (slot["gpus"], slot["nodes"], slot["cpus"], slot["host_ram_gb"]) == (16, 2, 36, 64)
    assert "accelerator_type: H200 is not asked for" in "\n".join(found.notes)
    assert live(only)["models"] == {"meta-llama/Llama-3.1-405B-Instruct-FP8": {"min_active": 0, "tier": "host"}}
    assert live(only)["slots"] == {"min": 1, "max": 2, "standby": 1}
    assert "distributed_executor_backend" not in only["args"]["models"][0]["engine_kwargs"]
    assert only["runtime_env"] == {"env_vars": {"VLLM_USE_DEEP_GEMM": "1"}}


def test_share_of_a_gpu_stays_one() -> None:
    """And the application keeps its name and its route."""
    found = ported("cpu_share")
    (only,) = found.config["applications"]
    assert (only["name"], only["route_prefix"]) == ("embeddings", "/embeddings")
    assert only["args"]["slot"]["gpus"] == 0.25
    assert "num_replicas: 'auto'" in "\n".join(found.notes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "neither an LLMConfig"),
        ({"applications": [{"import_path": "a:b"}]}, "neither an LLMConfig"),
        ({"model_loading_config": {}}, "model_id: missing"),
        ({"model_loading_config": {"model_id": "m"}, "llm_engine": "SGLang"}, "allowed: vLLM"),
        ({"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"data_parallel_size": 2}}, "data_parallel_size"),
        ({"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"tensor_parallel_size": 12}}, "one node"),
        ({"applications": [{"args": {"llm_configs": ["a.yaml"]}}]}, "'a.yaml' is a file of its own"),
    ],
)
def test_what_cannot_be_ported_is_an_error(config: dict[str, Any], words: str) -> None:
    """Naming the key, before anything is printed."""
    with pytest.raises(ConfigError, match=words):
        port(config)
