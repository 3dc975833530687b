"""cluster/local.yaml, really run: `ray up` over ssh to two machines, and an application deployed on them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from .machines import ROOT, Machine, Machines, why_not

SERVE_PORT = 8000
LIVE_NODES = """
import ray
ray.init(logging_level='ERROR', log_to_driver=False)
for node in ray.nodes():
    if node['Alive']:
        print(node['NodeManagerAddress'], node['NodeID'])
"""


@dataclass
class RayCluster:
    """A cluster that `ray up` has started.

    Attributes:
        file: cluster/local.yaml with our addresses, user and key.
        state: where `ray` on this side keeps what it knows of the cluster.
    """

    head: Machine
    worker: Machine
    file: Path
    state: Path

    @property
    def url(self) -> str:
        return f"http://{self.head.address}:{SERVE_PORT}"

    def ray(self, *arguments: str, timeout_s: float = 240) -> str:
        """The `ray` command on our side, as a user of the cluster runs it. Fails with what it said."""
        ray = Path(sys.executable).with_name("ray")
        own = {"RAY_TMPDIR": str(self.state), "RAY_USAGE_STATS_ENABLED": "0", "RAY_UP_enable_autoscaler_v2": "0"}
        done = subprocess.run(
            [ray, *arguments],
            env=os.environ | own,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def deploy(self, config: Path) -> None:
        """As cluster/README.md says."""
        self.ray("rsync-up", str(self.file), str(config), "~/serve.yaml")
        self.ray("exec", str(self.file), "serve deploy ~/serve.yaml")

    def nodes(self) -> set[str]:
        """Addresses of the nodes that Ray believes to be alive."""
        return set(self._nodes())

    def node(self, machine: Machine) -> str:
        """Ray's id of a machine's node."""
        return self._nodes()[machine.address]

    def _nodes(self) -> dict[str, str]:
        said = self.head.run(f'python -c "{LIVE_NODES}"').stdout.split()
        return dict(zip(said[::2], said[1::2], strict=True))

    def operate(self, *command: str) -> None:
        """An order of `serve-app`, given on the head."""
        done = self.head.run(f"serve-app {' '.join(command)}")
        assert done.returncode == 0, done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        """What `serve-app status` says on the head."""
        said = self.head.run("serve-app status --json")
        assert said.returncode == 0, said.stderr
        [coordinator] = yaml.safe_load(said.stdout)
        return coordinator


def until(true: Callable[[], object], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.3)


def chat(url: str, tokens: int = 3, timeout_s: float = 60) -> httpx.Response:
    body = {"model": "simulated", "messages": [], "max_tokens": tokens}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Two machines with an ssh server."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Machines(2) as made:
        made.boot()
        yield made


@pytest.fixture(scope="module")
def cluster(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Both of them in one Ray cluster."""
    head, worker = machines.machines
    config = yaml.safe_load((ROOT / "cluster" / "local.yaml").read_text())
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address]}
    config["auth"] |= {"ssh_user": "root", "ssh_private_key": str(machines.key)}
    file = tmp_path_factory.mktemp("cluster") / "local.yaml"
    file.write_text(yaml.safe_dump(config))
    with tempfile.TemporaryDirectory(prefix="ray") as state:
        cluster = RayCluster(head, worker, file, Path(state))
        cluster.ray("up", "--yes", "--no-config-cache", str(file))
        until(lambda: cluster.nodes() == {head.address, worker.address}, "both nodes are there", 240)
        yield cluster


@pytest.fixture(scope="module")
def application(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> RayCluster:
    """configs/cpu-simulated.yaml on it: three slots, of which each machine has room for two."""
    config = yaml.safe_load((ROOT / "configs" / "cpu-simulated.yaml").read_text())
    config["http_options"] |= {"host": "0.0.0.0", "port": SERVE_PORT}
    [application] = config["applications"]
    application["args"]["slot"]["cpus"] = (os.cpu_count() or 2) / 2
    application["deployments"][0]["user_config"]["slots"] |= {"min": 3, "max": 3, "standby": 2}
    file = tmp_path_factory.mktemp("serve") / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    cluster.deploy(file)
    until(lambda: is_ready(cluster.url), "the pool is ready")
    return cluster
