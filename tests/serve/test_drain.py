"""A node that is told to go (spot notice, maintenance, scale-down): what serves on it moves before it is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from .pool import Answer, Pool, served
from .test_nodes import GpuNodes

# One active slot, whatever the load: what is promoted is promoted for the node's sake.
LIVE = {"slots": {"min": 3, "max": 3, "standby": 2, "demote_after_s": 1}, "promote_when": {"in_flight": 16}}
SLOT = {"gpus": 1, "max_ongoing_requests": 16, "shutdown_grace_s": 30}
LONG = 250  # tokens


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[GpuNodes]:
    """Two nodes with two GPUs: of three slots, wherever the active one is, a standby is on the other."""
    made = GpuNodes(cluster)
    made.have(2, 2)
    yield made
    made.have()


@pytest.fixture
def spread(nodes: GpuNodes, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """The application on these nodes; gone with its slots before the nodes are."""
    pool = Pool(serve_port, tmp_path_factory.mktemp("script") / "script.json")
    yield pool
    serve.delete("default")


def drain(node: str, notice_s: float | None) -> None:
    """What a spot notice does (`ray drain-node`); None: no deadline."""
    deadline_ms = int((time.time() + notice_s) * 1000) if notice_s is not None else 0
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = gcs.drain_node(node, reason, "spot notice", deadline_ms)
    assert accepted, why


async def under_requests(pool: Pool, node: str, notice_s: float | None) -> tuple[list[Answer], list[Answer], float]:
    """Drain `node` while two long streams run on it, and one short request follows another until those end.

    Returns:
        The long answers, the short ones, and the seconds from the drain to the end of the last long one.
    """
    async with httpx.AsyncClient(timeout=90) as client:
        long = [asyncio.create_task(pool.stream(client, LONG)) for _ in range(2)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(drain, node, notice_s)
        begin, short = time.monotonic(), []
        while not all(task.done() for task in long):
            short.append(await pool.stream(client, 3))
        return [await task for task in long], short, time.monotonic() - begin


def test_notice_shorter_than_the_grace_promotes_elsewhere_and_streams_finish(spread: Pool) -> None:
    """As on spot: Serve takes the slot out at once, a standby on the other node takes over, and no request fails."""
    spread.deploy(LIVE, slot=SLOT)
    spread.settled(active=1, standby=2)
    [active] = spread.slots("active")
    long, short, took_s = asyncio.run(under_requests(spread, active["node"], notice_s=20))
    assert len(served(long, LONG)) == 2, long
    assert {answer.slot for answer in long} == {str(active["pid"])}
    assert len(served(short, 3)) == len(short) > 10
    assert took_s < 20, "within the notice"
    assert short[-1].slot != str(active["pid"])
    status = spread.wait(lambda s: not on_node(s, active["node"]), "nothing is left on the node that goes")
    assert [slot["state"] for slot in status["slots"]].count("active") == 1
    # Its free GPUs are no room for the replacement.
    spread.wait(lambda s: s["shortage"] and "room for 2 of 3" in s["shortage"]["message"], "the shortage is reported")


def test_drain_without_deadline_moves_the_active_role_and_waits_for_room(spread: Pool) -> None:
    """The pool promotes and drains at once; the slot sleeps there until Serve has a place for its replacement."""
    spread.deploy(LIVE, slot=SLOT)
    spread.settled(active=1, standby=2)
    [active] = spread.slots("active")
    long, short, _ = asyncio.run(under_requests(spread, active["node"], notice_s=None))
    assert len(served(long, LONG)) == 2, long
    assert len(served(short, 3)) == len(short) > 10
    status = spread.settled(active=1, standby=2)
    assert spread.slots("active")[0]["node"] != active["node"]
    reasons = [entry["reason"] for entry in status["ledger"] if entry["kind"] == "promotion"]
    assert "the node of an active slot is drained" in reasons
    assert active["slot"] in [slot["slot"] for slot in status["slots"]]


def test_second_node_of_a_slot_is_drained_and_the_slot_moves(spread: Pool, nodes: GpuNodes) -> None:
    """Serve moves only slots whose first node goes; the pool promotes another one and frees the node itself."""
    nodes.have(1, 1, 1, 1)
    spread.deploy(
        {"slots": {"min": 2, "max": 2, "standby": 1}},
        engine={"pipeline_parallel_size": 2},
        slot={"gpus": 2, "nodes": 2, "cpus": 0.01},
    )
    spread.settled(active=1, standby=1)
    [active], [standby] = spread.slots("active"), spread.slots("standby")
    drain(active["ranks"][1], notice_s=20)
    status = spread.wait(lambda s: active["slot"] not in [slot["slot"] for slot in s["slots"]], "the slot has left")
    assert [(slot["slot"], slot["state"]) for slot in status["slots"]] == [(standby["slot"], "active")]
    assert len(served(spread.burst(4, tokens=3), 3)) == 4


def on_node(status: dict[str, Any], node: str) -> list[str]:
    return [slot["slot"] for slot in status["slots"] if slot["node"] == node and not slot["leaving"]]
