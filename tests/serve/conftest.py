"""A private Ray and Serve for these tests, and one application on it with simulated engines."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

import serve_app  # noqa: F401  (sets the environment of Serve's own processes before Ray starts)
from benchmarks.processes import free_port

from .pool import Pool


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Ray with room for many small slots on its head node; a test may add nodes, and takes them away again."""
    # Ray's socket paths must stay short, so this is not below pytest's own folder.
    temp = subprocess.run(["mktemp", "-d", "/tmp/rayXXXX"], capture_output=True, text=True, check=True).stdout.strip()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", temp)  # also of the file that says which cluster this machine runs
        cluster = Cluster()
        cluster.add_node(num_cpus=16, include_dashboard=False)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
    subprocess.run(["rm", "-rf", temp], check=False)


@pytest.fixture(scope="session")
def serve_port(cluster: Cluster) -> Iterator[int]:
    """Serve with its proxy on the head node; yields the proxy's port."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()


@pytest.fixture(scope="module")
def pool(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One application per test module; each test brings it to the settings it needs with `pool.deploy`."""
    script: Path = tmp_path_factory.mktemp("script") / "script.json"
    pool = Pool(serve_port, script)
    yield pool
    serve.delete("default")
