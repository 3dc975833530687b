"""What keeps a slot off a node is told before it starts: by `serve-app doctor`, and by the slot itself."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.config import parse_app
from serve_app.errors import UnfitNode
from serve_app.slot.preflight import ensure_fit

from .test_cli import run_cli

GPUS = 2
# What a deployment that cannot work may take until everybody knows.
TOLD_WITHIN_S = 60


@pytest.fixture(scope="module")
def gpu_node(cluster: Cluster, serve_port: int) -> Iterator[str]:
    """A node that pretends to have GPUs; its id."""
    node = cluster.add_node(num_cpus=1, num_gpus=GPUS)
    yield node.node_id
    cluster.remove_node(node)


def application(nccl: dict[str, Any]) -> dict[str, Any]:
    """A simulated engine on all the GPUs that this cluster pretends to have."""
    slot = {"gpus": GPUS, "cpus": 0.1, "nccl": nccl}
    model = {"id": "sim", "engine": "simulated", "engine_kwargs": {"start_s": 0.1, "tensor_parallel_size": GPUS}}
    return {"name": "doctor", "route_prefix": "/doctor", "import_path": "serve_app:app"} | {
        "args": {"models": [model], "slot": slot}
    }


def doctor(file: Path, nccl: dict[str, Any], **variables: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the only application of `serve-app doctor --json`."""
    file.write_text(json.dumps({"applications": [application(nccl)]}))  # JSON is YAML
    done = run_cli("doctor", "--config", str(file), "--json", **variables)
    [told] = json.loads(done.stdout)["applications"]
    return done.returncode, told


def levels(node: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in node["findings"]}


def test_doctor_examines_every_node_of_the_running_cluster(gpu_node: str, tmp_path: Path) -> None:
    """The facts come from a task on the node itself; its variables are those a slot's ranks would have."""
    code, told = doctor(tmp_path / "good.yaml", {"nvls": False})
    nodes = {node["node_id"]: node for node in told["nodes"]}
    assert (code, len(nodes), sorted(node["gpus"] for node in nodes.values())) == (0, 2, [0, GPUS])
    node = nodes[gpu_node]
    assert (node["trouble"], node["node"]) == ("", socket.gethostname())
    assert "error" not in levels(node).values()
    assert [found["check"] for found in told["together"]] == ["gpus", "versions", "clocks", "ports"]
    assert {found["level"] for found in told["together"][1:]} == {"ok"}
    assert "at most" in told["together"][2]["what"]
    measured = {found["check"]: found["what"] for found in node["findings"]}
    assert "GB/s" in measured["disk"] or "could not be measured" in measured["disk"]
    assert measured["environment"] == "Serve's processes have what they need"
    assert "a proxy answers" in measured["port"]
    variables = {variable["name"]: variable["value"] for variable in node["variables"]}
    assert variables["NCCL_NVLS_ENABLE"] == "0"
    assert variables["VLLM_HOST_IP"] == node["address"]


def test_doctor_ends_with_an_error_for_a_wrong_interface(gpu_node: str, tmp_path: Path) -> None:
    """Exit status 1; the table names interface and remedy. A node without GPUs need not have it."""
    code, told = doctor(tmp_path / "bad.yaml", {"interface": "nosuch"})
    found = {node["node_id"]: levels(node)["interface"] for node in told["nodes"]}
    assert (code, found.pop(gpu_node), list(found.values())) == (1, "error", ["warning"])
    shown = run_cli("doctor", "--config", str(tmp_path / "bad.yaml"))
    assert shown.returncode == 1
    assert "no network interface 'nosuch'" in shown.stdout
    assert "set slot.nccl.interface" in shown.stdout


def test_doctor_without_a_driver_for_real_engines(gpu_node: str) -> None:
    """The settings' defaults are vLLM's engine, and these GPUs have no driver."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        done = run_cli("doctor")
        assert done.returncode == 1
        assert "NVML finds no NVIDIA driver" in done.stdout
    else:
        pytest.skip("this machine has a driver")


def test_slot_with_a_wrong_interface_fails_at_once_and_says_so(gpu_node: str) -> None:
    """Serve's own status names interface and node; without the check the ranks would wait for each other."""
    schema = ServeDeploySchema.model_validate({"applications": [application({"interface": "nosuch"})]})
    serve.context._get_global_client().deploy_apps(schema, _blocking=False)
    try:
        message, deadline = "", time.monotonic() + TOLD_WITHIN_S
        while "nosuch" not in message and time.monotonic() < deadline:
            time.sleep(0.2)
            told = serve.status().applications.get("doctor")
            message = told.deployments["Slot"].message if told and "Slot" in told.deployments else ""
        assert f"node {socket.gethostname()} cannot run this slot" in message
        assert "no network interface 'nosuch' (slot.nccl.interface)" in message
    finally:
        serve.delete("doctor")


def test_slot_checks_all_its_nodes(cluster: Cluster, gpu_node: str) -> None:
    """The node of its own process is in order; another one, on which ranks would run, is told to use what it lacks."""
    other = cluster.add_node(num_cpus=1, num_gpus=GPUS, env_vars={"NCCL_SOCKET_IFNAME": "nosuch"})
    bundles = [{"GPU": GPUS}, {"GPU": GPUS}]
    selectors = [{"ray.io/node-id": gpu_node}, {"ray.io/node-id": other.node_id}]
    group = placement_group(bundles, bundle_label_selector=selectors)
    try:
        ray.get(group.ready(), timeout=30)
        here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        check = ray.remote(num_cpus=0, max_retries=0)(ensure_fit).options(scheduling_strategy=here)
        config = parse_app(application({})["args"])
        with pytest.raises(UnfitNode, match=r"'nosuch' \(NCCL_SOCKET_IFNAME in its environment\)"):
            ray.get(check.remote(config, None))
    finally:
        remove_placement_group(group)
        cluster.remove_node(other)
