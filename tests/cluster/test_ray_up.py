"""From nothing to an answer and back: what cluster/README.md tells to do with machines that are there already.

The tests follow one another on one cluster, as an operator would; the last one takes it down.
"""

from __future__ import annotations

import shlex
import subprocess

import httpx
import pytest
import yaml

from .conftest import SERVE_PORT, RayCluster, chat, is_ready, until
from .machines import ROOT, Machine

pytestmark = pytest.mark.timeout(600)  # seconds; Ray takes a minute to give up a node, and another to start one anew


def slots(cluster: RayCluster, state: str | None = None, on: Machine | None = None) -> list[str]:
    """Names of the slots in this state, on this machine; all of them by default."""
    found = [slot for slot in cluster.status()["slots"] if not slot["leaving"]]
    node = cluster.node(on) if on else ""
    return [slot["slot"] for slot in found if state in (None, slot["state"]) and slot["node"].startswith(node)]


def settled(cluster: RayCluster) -> bool:
    """Three slots, one of them active, and both machines with a part."""
    try:
        here, there = slots(cluster, on=cluster.head), slots(cluster, on=cluster.worker)
        return bool(here and there) and len(slots(cluster, "active")) == 1 and len(slots(cluster, "standby")) == 2
    except (AssertionError, KeyError, subprocess.TimeoutExpired):
        return False


def activate(cluster: RayCluster, machine: Machine) -> None:
    """Have the only active slot on this machine."""
    if slots(cluster, "active", on=machine):
        return
    [active] = slots(cluster, "active")
    cluster.operate("freeze")  # or the pool would demote one of the two, and not the one that is meant
    cluster.operate("promote", slots(cluster, "standby", on=machine)[0])
    until(lambda: slots(cluster, "active", on=machine), "it is active")
    cluster.operate("drain", active)
    until(lambda: len(slots(cluster, "active")) == 1, "it is the only one")
    cluster.operate("unfreeze")


def test_ray_up_serves(application: RayCluster) -> None:
    """Slots on both machines, and a request answered through either one's proxy."""
    until(lambda: settled(application), "three slots on two machines")
    for machine in (application.head, application.worker):
        url = f"http://{machine.address}:{SERVE_PORT}"
        until(lambda url=url: is_ready(url), "its proxy is ready")
        answer = chat(url)
        assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "stop", answer.text


def test_kubernetes_probes_say_yes_to_a_node_with_a_slot(application: RayCluster) -> None:
    """The commands of the manifests, run as the kubelet would run them."""
    service = yaml.safe_load((ROOT / "cluster" / "kuberay" / "base" / "rayservice.yaml").read_text())
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        done = application.worker.run(shlex.join(container[probe]["exec"]["command"]))
        assert done.returncode == 0, (probe, done.stdout, done.stderr)
    readiness = container["readinessProbe"]["httpGet"]
    assert httpx.get(f"http://{application.worker.address}:{SERVE_PORT}{readiness['path']}").status_code == 200


def test_machine_cut_off_with_the_active_slot_is_replaced_before_ray_notices(application: RayCluster) -> None:
    """Its slot falls silent, a standby takes over, and requests are answered; plugged in again, it comes back whole."""
    until(lambda: settled(application), "three slots on two machines")
    activate(application, application.worker)
    application.worker.plugged(False)
    until(lambda: slots(application, "active", on=application.head), "a standby has taken over")
    assert application.nodes() == {application.head.address, application.worker.address}, "Ray believes in it still"
    assert chat(application.url).status_code == 200
    until(lambda: application.nodes() == {application.head.address}, "Ray has given it up")
    application.worker.plugged(True)
    until(lambda: settled(application), "both machines have their slots again", 240)


def test_leave_moves_the_active_slot_and_frees_the_machine(application: RayCluster) -> None:
    """What a pod's preStop hook and a spot notice run."""
    until(lambda: settled(application), "three slots on two machines")
    activate(application, application.worker)
    done = application.worker.run("serve-app leave --notice-s 90", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert application.nodes() == {application.head.address}
    assert chat(application.url).status_code == 200


def test_ray_down_leaves_nothing(application: RayCluster) -> None:
    """No process of Ray on either machine."""
    application.ray("down", "--yes", str(application.file))
    for machine in (application.head, application.worker):
        until(lambda machine=machine: machine.run("pgrep -c 'raylet|gcs_server'").stdout == "0\n", "Ray has ended")
