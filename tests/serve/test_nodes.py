"""Slots over several nodes, on Ray's multi-node test cluster: eight GPUs a node that Ray only believes in.

Ranks are real processes (`engine/simulated_ranks.py`), so where a slot says they run is where they do.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.node import Node
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from serve_app.pool import naming

from .pool import MODEL, Pool, served
from .test_cli import run_cli

ONE = {"slots": {"min": 1, "max": 3, "standby": 2, "demote_after_s": 1}}


class GpuNodes:
    """The nodes beside the head node, and who else uses their GPUs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: list[tuple[int, Node]] = []
        self._others: list[tuple[tuple[int, ...], PlacementGroup]] = []

    def have(self, *gpus: int) -> None:
        """Add and remove nodes until there are those with this many GPUs, all of them unused by others."""
        for occupied, _ in list(self._others):
            self.free(*occupied)
        missing = list(gpus)
        for count, node in list(self._nodes):
            if count in missing:
                missing.remove(count)
            else:
                self._nodes.remove((count, node))
                self._cluster.remove_node(node)
        self._nodes += [(count, self._cluster.add_node(num_cpus=1, num_gpus=count)) for count in missing]

    def occupy(self, *gpus: int) -> None:
        """Somebody else takes so many GPUs, each number on a node of its own."""
        group = placement_group([{"GPU": count} for count in gpus], strategy="STRICT_SPREAD")
        ray.get(group.ready(), timeout=30)
        self._others.append((gpus, group))

    def free(self, *gpus: int) -> None:
        """They give back what they took with the same numbers."""
        taken = next(taken for taken in self._others if taken[0] == gpus)
        self._others.remove(taken)
        remove_placement_group(taken[1])


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[GpuNodes]:
    made = GpuNodes(cluster)
    yield made
    made.have()


@pytest.fixture(scope="module")
def wide(nodes: GpuNodes, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """An application that is deployed without waiting: what it waits for is what these tests are about."""
    pool = Pool(serve_port, tmp_path_factory.mktemp("script") / "script.json")
    pool.script({})
    yield pool
    ask()


def ask(*names: str, tensor_parallel: int = 8, live: dict[str, Any] | None = None) -> None:
    """Make Serve want these applications and no other, with two pipeline stages on two nodes; wait for nothing."""
    sizes = {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": 2}
    shape = {"gpus": 2 * tensor_parallel, "nodes": 2, "cpus": 0.01}
    applications = [
        {
            "name": name,
            "route_prefix": "/" if name == "default" else f"/{name}",
            "import_path": "serve_app:app",
            "args": {
                "models": [{"id": MODEL, "engine": "simulated", "engine_kwargs": {"start_s": 0.2, **sizes}}],
                "slot": {"max_ongoing_requests": 4, "health_check_period_s": 0.5, **shape},
            },
            "deployments": [{"name": "Pool", "user_config": live or ONE}],
        }
        for name in names
    ]
    schema = ServeDeploySchema.model_validate({"applications": applications})
    serve.context._get_global_client().deploy_apps(schema, _blocking=False)


def groups(application: str = "default") -> list[dict[str, Any]]:
    """The placement groups of an application's slots."""
    prefix = naming.placement_groups(application)
    listed = [group for group in placement_group_table().values() if group["name"].startswith(prefix)]
    return [group for group in listed if group["state"] != "REMOVED"]


def assert_two_nodes_of_eight(slot: dict[str, Any]) -> None:
    """Ranks 0-7 beside the replica, ranks 8-15 on another node: one tensor parallel group on each."""
    first, second = set(slot["ranks"][:8]), set(slot["ranks"][8:])
    assert len(slot["ranks"]) == 16
    assert first == {slot["node"]}
    assert len(second) == 1 and first != second


def test_slot_that_the_nodes_cannot_hold_is_infeasible_until_a_node_comes(wide: Pool, nodes: GpuNodes) -> None:
    """8 + 7 GPUs for a slot of 16: said with what is missing, no further slot asked for; with 8 + 8 it starts."""
    nodes.have(8, 7)
    ask("default")
    message = "a slot needs 16 x GPU on 2 nodes with 8 each; the nodes have 8 and 7: 1 GPU is missing"
    shortage = {"trouble": "infeasible", "message": message}
    wide.wait(lambda status: status["shortage"] == shortage, "the shortage is reported", timeout_s=30)
    assert f"slots are missing, infeasible: {message}" in run_cli("status").stdout
    # Serve began with two; the one beyond `slots.min` is given up.
    wide.wait(lambda _: len(groups()) == 1, "one slot is asked for")
    [group] = groups()
    assert (group["state"], set(group["bundles_to_node_id"].values())) == ("PENDING", {""})

    nodes.have(8, 8)
    status = wide.wait(lambda s: [slot["state"] for slot in s["slots"]] == ["active"], "the slot is active")
    assert_two_nodes_of_eight(status["slots"][0])
    # Two more are wanted, and none is asked for: nodes that hold one can never hold three.
    assert wide.wait(lambda s: not s["shortage"], "nothing is missing")["fits_another"] is False
    assert [group["state"] for group in groups()] == ["CREATED"]


def test_slots_over_nodes_are_refilled_and_promoted(wide: Pool, nodes: GpuNodes) -> None:
    """Two more nodes get a standby, its ranks on them; a burst promotes it, and it comes back to rest."""
    nodes.have(8, 8, 8, 8)
    ask("default")
    slots = wide.settled(active=1, standby=1)["slots"]
    for slot in slots:
        assert_two_nodes_of_eight(slot)
    assert len({node for slot in slots for node in slot["ranks"]}) == 4
    assert run_cli("status").stdout.count("2 nodes") == 2
    answers = wide.burst(8, tokens=40)
    assert len(served(answers, 40)) == 8, answers
    assert {answer.slot for answer in answers} == {str(slot["pid"]) for slot in slots}
    wide.settled(active=1, standby=1)


def test_dead_rank_fails_its_slot_and_the_pool_heals(wide: Pool, nodes: GpuNodes) -> None:
    """One of 16 processes dies on the second node: the standby takes over, and a new slot takes the freed nodes."""
    nodes.have(8, 8, 8, 8)
    ask("default")
    wide.settled(active=1, standby=1)
    [active], [standby] = wide.slots("active"), wide.slots("standby")
    os.kill(rank_pid(active["ranks"][8]), signal.SIGKILL)
    status = wide.wait(
        lambda s: (
            sorted((x["slot"] == standby["slot"], x["state"]) for x in s["slots"])
            == [(False, "standby"), (True, "active")]
        ),
        "the standby is active and another one has come",
    )
    [fresh] = [slot for slot in status["slots"] if slot["slot"] != standby["slot"]]
    assert fresh["slot"] != active["slot"]
    assert_two_nodes_of_eight(fresh)
    assert set(fresh["ranks"]) == set(active["ranks"])


def rank_pid(node: str) -> int:
    """A rank's process on a node."""
    alive: list[dict[str, Any]] = list(actors(actor_state_name="ALIVE").values())
    ranks = [actor for actor in alive if actor["ActorClassName"].endswith("Rank")]
    return int(next(actor["Pid"] for actor in ranks if actor["Address"]["NodeID"] == node))


def test_placement_that_splits_a_tensor_parallel_group_is_refused(wide: Pool, nodes: GpuNodes) -> None:
    """Others left 6, 6 and 4 GPUs: Ray packs the slot into those, and its engine is not started there."""
    nodes.have(8, 8, 8, 8)
    ask()
    nodes.occupy(2, 2, 4, 8)
    ask("default")
    status = wide.wait(lambda s: any(entry["error"] for entry in s["ledger"]), "a cold start fails")
    error = next(entry["error"] for entry in status["ledger"] if entry["error"])
    placed = re.match(r"Ray placed the slot's GPUs as (.*?); TP group 0 spans ", error)
    assert placed, error
    assert sorted(int(part.rsplit(" ", 1)[1]) for part in placed[1].split(", ")) == [4, 6, 6]
    assert "wanted: 2 nodes with 8 GPUs each; free whole nodes" in error
    ask()


def test_two_pools_after_the_same_gpus_get_all_or_nothing(wide: Pool, nodes: GpuNodes) -> None:
    """Three nodes with two free GPUs each, two slots of 2 x 2: one is placed in full, the other holds nothing."""
    nodes.have(8, 8, 8, 8)
    nodes.occupy(6, 6, 6, 6)
    nodes.occupy(2)
    ask("left", "right", tensor_parallel=2, live={"slots": {"min": 1, "max": 1, "standby": 0}})
    # Serve begins with two slots each; the one beyond `slots.max` is given up.
    until(lambda: sorted((trouble(name), len(groups(name))) for name in ("left", "right")) == [("", 1), ("waiting", 1)])
    [loser] = [name for name in ("left", "right") if trouble(name)]
    [winner] = {"left", "right"} - {loser}
    [placed], [waits] = groups(winner), groups(loser)
    assert (placed["state"], waits["state"]) == ("CREATED", "PENDING")
    assert sorted(Counter(placed["bundles_to_node_id"].values()).values()) == [2, 2]
    assert set(waits["bundles_to_node_id"].values()) == {""}
    assert ray.available_resources()["GPU"] == 2
    assert re.search(r"on 2 nodes with 2 each; free: 2 on \S+$", status(loser)["shortage"]["message"])

    nodes.free(2)
    until(lambda: not any(trouble(name) for name in ("left", "right")) and active("left") and active("right"))
    taken = [set(active(name)[0]["ranks"]) for name in ("left", "right")]
    assert [len(part) for part in taken] == [2, 2] and taken[0].isdisjoint(taken[1])


def until(true: Callable[[], object], timeout_s: float = 60) -> None:
    """Wait for something about both applications; fails with what their coordinators say."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, [status(name) for name in ("left", "right")]
        time.sleep(0.1)


def status(application: str) -> dict[str, Any]:
    """What an application's coordinator says; nothing as long as there is none."""
    names = naming.coordinator_names(application)
    return ray.get(naming.coordinator(names[0]).status.remote(), timeout=10) if names else {}


def trouble(application: str) -> str:
    """Why an application's slots are missing; empty if none are."""
    said = status(application)
    return said["shortage"]["trouble"] if said.get("shortage") else "" if said.get("slots") else "no slot yet"


def active(application: str) -> list[dict[str, Any]]:
    return [slot for slot in status(application)["slots"] if slot["state"] == "active"]
