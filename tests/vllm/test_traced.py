"""Real vLLM's start-up, sleep and wake as one trace each, across the slot's process, EngineCore and worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import exporting, served_traces, spans
from tests.exporting import REPOSITORY

from .engines import KWARGS


@pytest.fixture(scope="module")
def received(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[spans.Span]:
    """All spans that a receiver process got."""
    path = tmp_path_factory.mktemp("spans") / "spans.jsonl"
    with exporting.receiver(path) as variables:
        environment = os.environ | variables | {"PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "tests.vllm.traced", str(tiny_llama)]
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=240)
        return spans.wait_for(path, lambda found: bool(spans.roots(found, "promotion")), "the last root")


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


@pytest.mark.timeout(600)
def test_a_request_that_wakes_a_standby_is_traced_from_its_client_to_the_engine(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Through HTTP, proxy, coordinator, slot and workers, with vLLM's own times of the request."""
    found = served_traces.collect(tmp_path, tiny_llama, KWARGS, {"cpus": 1, "max_ongoing_requests": 4})
    served_traces.check_cold_start(found, ranks=1, gpus=False)
    served_traces.check_promotion(found, ranks=1, gpus=False)
    served_traces.check_request(found)
