"""vLLM's own metrics, of each engine of a slot, through Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .metered import MODELS, WANTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def temp() -> Iterator[str]:
    """A short path, for Ray's sockets."""
    folder = subprocess.run(["mktemp", "-d", "/tmp/rayXXXX"], capture_output=True, text=True, check=True).stdout.strip()
    yield folder
    subprocess.run(["rm", "-rf", folder], check=False)


@pytest.mark.timeout(600)
def test_both_engines_of_a_process_are_told_apart(tiny_llama: Path, tmp_path: Path, temp: str) -> None:
    """By `model_name`; what dashboards ask for is there, and tokens were counted."""
    out = tmp_path / "metrics.json"
    command = [sys.executable, "-m", "tests.vllm.metered", str(tiny_llama), str(out)]
    environment = os.environ | {"RAY_TMPDIR": temp, "RAY_metrics_report_interval_ms": "1000"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = json.loads(out.read_text())
    found = {(line.split("{")[0], name) for line in lines for name in MODELS if f'model_name="{name}"' in line}
    assert found == {(name, model) for name in WANTED for model in MODELS}
    tokens = [line for line in lines if line.startswith("ray_vllm_generation_tokens_total")]
    assert all("ReplicaId=" in line and float(line.rsplit(" ", 1)[1]) > 0 for line in tokens)
