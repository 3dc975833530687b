"""What a collector gets from an application on GPUs: one GPU, two tensor parallel ones, two nodes of a GPU each."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from benchmarks.gpu import random_model
from serve_app.gpu import nvml
from tests import served_traces

pytestmark = pytest.mark.timeout(600)

# Without compilation, which is not what this is about; with CUDA graphs.
KWARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.3,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4]},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one GPU": (1, {}, 1),
    "tensor parallel": (2, {"tensor_parallel_size": 2}, 1),
    "pipeline over two nodes": (2, {"pipeline_parallel_size": 2}, 2),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    random_model.write(path, "tiny", fp8=False)
    return path


@contextmanager
def two_nodes(variables: dict[str, str]) -> Iterator[dict[str, str]]:
    """Ray with two raylets, of which each has one of this machine's GPUs."""
    temp = subprocess.run(["mktemp", "-d", "/tmp/rayXXXX"], capture_output=True, text=True, check=True).stdout.strip()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (variables | {"RAY_TMPDIR": temp}).items():
            environment.setenv(name, value)
        cluster = Cluster()
        for gpu in nvml.visible()[:2]:
            cluster.add_node(num_cpus=8, num_gpus=1, include_dashboard=False, env_vars={"CUDA_VISIBLE_DEVICES": gpu})
        yield variables | {"RAY_ADDRESS": cluster.address, "RAY_TMPDIR": temp}
        cluster.shutdown()
    subprocess.run(["rm", "-rf", temp], check=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_ranks_stages_and_the_request_arrive(home: Path, model: Path, tmp_path: Path, layout: str) -> None:
    """Under vLLM's own workers and Ray's, whichever model runner this version takes."""
    gpus, parallel, nodes = LAYOUTS[layout]
    if len(nvml.visible()) < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    slot = {"gpus": gpus, "nodes": nodes, "cpus": 2, "max_ongoing_requests": 4}
    on = two_nodes if nodes > 1 else nullcontext
    found = served_traces.collect(tmp_path, model, KWARGS | parallel, slot, on)
    served_traces.check_cold_start(found, gpus, gpus=True)
    served_traces.check_promotion(found, gpus, gpus=True)
    served_traces.check_request(found)
