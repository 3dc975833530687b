"""Ray's control plane on Redis: the head dies and comes back, and the pool goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .conftest import SERVE_PORT, RayCluster, chat, is_ready, until
from .machines import Machines, why_not
from .test_ray_up import activate, settled, slots

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two machines, and a Redis server on our side of their network, which Ray is told of by its environment."""
    reason = why_not() or ("" if shutil.which("redis-server") else "not installed: redis-server (apt: redis-server)")
    if reason:
        pytest.skip(reason)
    # Processes of a worker give up a minute after the control plane is gone, unless told otherwise (KubeRay does).
    with Machines(2) as made:
        made.environment(RAY_REDIS_ADDRESS=f"{made.address}:6379", RAY_gcs_rpc_server_reconnect_timeout_s="600")
        folder = tmp_path_factory.mktemp("redis")
        options = f"--bind {made.address} --port 6379 --protected-mode no --dir {folder}".split()
        with subprocess.Popen(["redis-server", *options, "--save", ""], stdout=subprocess.DEVNULL) as redis:
            try:
                made.boot()
                yield made
            finally:
                redis.terminate()


def test_head_killed_and_started_again_the_pool_answers(application: RayCluster) -> None:
    """What a restarted head pod is: all of its processes are gone, its address and Redis are not."""
    until(lambda: settled(application), "three slots on two machines")
    activate(application, application.worker)
    [active] = slots(application, "active")
    killed = application.head.run("ray stop --force")
    assert killed.returncode == 0, killed.stderr
    url = f"http://{application.worker.address}:{SERVE_PORT}"
    assert chat(url).status_code == 200, "the worker's proxy and slot need no head"
    start = yaml.safe_load(Path(application.file).read_text())["head_start_ray_commands"][-1]
    started = application.head.run(start.replace("$(echo $SSH_CONNECTION | cut -d' ' -f3)", application.head.address))
    assert started.returncode == 0, started.stdout + started.stderr
    until(lambda: settled(application), "the pool is whole again")
    assert active in slots(application), "the worker's slot was never restarted"
    until(lambda: is_ready(application.url), "the head's proxy serves again")
    assert chat(application.url).status_code == 200
