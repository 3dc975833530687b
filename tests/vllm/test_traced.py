"""Real vLLM's start-up, sleep and wake as one trace each, across the slot's process, EngineCore and worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import spans
from tests.serve.conftest import free_port

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def received(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[spans.Span]:
    """All spans that a receiver process got."""
    path, port = tmp_path_factory.mktemp("spans") / "spans.jsonl", free_port()
    receiver = subprocess.Popen([sys.executable, "-m", "tests.otlp", str(port), str(path)], cwd=REPOSITORY)
    environment = os.environ | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "PYTHONPATH": str(REPOSITORY),
    }
    try:
        command = [sys.executable, "-m", "tests.vllm.traced", str(tiny_llama)]
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=240)
        return spans.wait_for(path, lambda found: bool(spans.roots(found, "promotion")), "the last root")
    finally:
        receiver.terminate()
        receiver.wait()


def test_cold_start_holds_the_workers_stages_and_vllms_own_spans(received: list[spans.Span]) -> None:
    """One trace: ours from the slot and, per rank, from the worker; vLLM's nested below where they ran."""
    [root] = spans.roots(received, "cold_start")
    tree = spans.tree(received, root)
    assert list(tree) == ["runtime.import", "model.files", "engine.core", "engine.api_server"]
    ours = {"device.context", "comm.init", "weights.load", "kv_cache.allocate", "graph.capture"}
    assert ours <= set(tree["engine.core"])
    ranks = {span["name"]: span["attributes"]["serve_app.rank"] for span in received if span["name"] in ours}
    assert ranks == dict.fromkeys(ours, 0)
    family = [span for span in received if span["trace"] == root["trace"]]
    vllms = {span["name"] for span in family if "serve_app.role" not in span["resource"]}
    assert {"Load model", "Allocate KV cache"} <= vllms, f"of vLLM's own spans only {sorted(vllms)} are in the trace"
    assert len({span["resource"].get("process.pid") for span in family}) > 1


def test_sleep_and_wake_hold_the_workers_part(received: list[spans.Span]) -> None:
    """What a rank did lies below the slot's own stage of that name."""
    [demotion], [promotion] = spans.roots(received, "demotion"), spans.roots(received, "promotion")
    assert spans.tree(received, demotion) == {"engine.sleep": {"engine.sleep": {}}}
    assert spans.tree(received, promotion) == {
        "engine.wake.weights": {"engine.wake.weights": {}},
        "engine.wake.kv_cache": {"engine.wake.kv_cache": {}},
    }
