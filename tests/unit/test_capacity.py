"""How many slots fit on the nodes that exist, and what is said to be missing where one does not."""

from __future__ import annotations

import pytest

from serve_app.config import SlotConfig
from serve_app.gpu.placement import place
from serve_app.pool.capacity import NO_LIMIT, Node, Outlook, Resources, Shortage, Trouble, outlook, room, shortage

CPU1, GPU1, GPU4 = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 4.0}
TWO_NODES = place(SlotConfig(gpus=16, nodes=2, cpus=1)).nodes


def node(name: str, total: float, free: float | None = None, **other: float) -> Node:
    """A node with many CPUs and this many GPUs, all of them free unless said."""
    return Node(
        name, {"CPU": 64.0, "GPU": total} | other, {"CPU": 64.0, "GPU": total if free is None else free} | other
    )


@pytest.mark.parametrize(
    ("slot", "nodes", "expected"),
    [
        ([CPU1], [], 0),
        ([CPU1], [{"CPU": 0.9}], 0),
        ([CPU1], [{"CPU": 1.0 - 1e-9}], 1),
        ([CPU1], [{"CPU": 64.0}], 9),
        ([GPU1], [{"CPU": 8.0}], 0),
        ([GPU1], [{"CPU": 2.0, "GPU": 1.0}] * 2, 2),
        ([GPU4], [{"CPU": 9.0, "GPU": 8.0}, {"CPU": 9.0, "GPU": 7.0}], 3),
        ([GPU4, GPU1], [{"CPU": 9.0, "GPU": 1.0}, {"CPU": 9.0, "GPU": 4.0}], 1),
        ([GPU4, GPU4], [{"CPU": 9.0, "GPU": 8.0}], 0),
        ([GPU4, GPU4], [{"CPU": 9.0, "GPU": 8.0}] * 2, 2),
        (TWO_NODES, [{"CPU": 9.0, "GPU": 8.0}] * 5, 2),
        (TWO_NODES, [{"CPU": 9.0, "GPU": 6.0}, {"CPU": 9.0, "GPU": 6.0}, {"CPU": 9.0, "GPU": 4.0}], 0),
    ],
)
def test_room_counts_slots_whose_nodes_have_all_they_need(
    slot: list[Resources], nodes: list[Resources], expected: int
) -> None:
    """Each part of a slot needs a node of its own with all it asks for; counting ends at the most that matter."""
    assert room(slot, nodes, most=9) == expected


def test_room_leaves_its_arguments_alone() -> None:
    """Asking does not take anything."""
    free = [{"CPU": 2.0}]
    room([CPU1], free, most=9)
    assert free == [{"CPU": 2.0}]


@pytest.mark.parametrize(
    ("slot", "nodes", "message"),
    [
        (
            SlotConfig(gpus=16, nodes=2),
            [node("a", 8), node("b", 7)],
            "a slot needs 16 x GPU on 2 nodes with 8 each; the nodes have 8 and 7: 1 GPU is missing",
        ),
        (
            SlotConfig(gpus=16, nodes=2),
            [node("a", 8)],
            "a slot needs 16 x GPU on 2 nodes with 8 each; the nodes have 8: 8 GPUs are missing",
        ),
        (
            SlotConfig(gpus=16, nodes=2),
            [node("a", 6), node("b", 6), node("c", 4)],
            "a slot needs 16 x GPU on 2 nodes with 8 each; the nodes have 6, 6 and 4: 4 GPUs are missing",
        ),
        (
            SlotConfig(gpus=8),
            [node("a", 4), node("b", 4)],
            "a slot needs 8 x GPU on one node; the nodes have 4 and 4: 4 GPUs are missing",
        ),
        (
            SlotConfig(gpus=1),
            [Node("a", CPU1, CPU1)],
            "a slot needs 1 x GPU on one node; no node has any GPU: 1 GPU is missing",
        ),
        (
            SlotConfig(cpus=4),
            [Node("a", CPU1, CPU1)],
            "a slot needs 4 x CPU on one node; the nodes have 1: 3 CPUs are missing",
        ),
        (
            SlotConfig(gpus=1, host_ram_gb=200),
            [node("a", 1, memory=64e9)],
            "a slot needs 200 GB x memory on one node; the nodes have 64 GB: 136 GB are missing",
        ),
        (
            SlotConfig(gpus=2, cpus=4),
            [Node("a", {"CPU": 64.0}, {}), Node("b", {"CPU": 1.0, "GPU": 2.0}, {})],
            "a slot needs 2 x GPU on one node; the nodes have 2: no node has 4 x CPU and 2 x GPU at once",
        ),
    ],
)
def test_shortage_infeasible_says_what_is_missing(slot: SlotConfig, nodes: list[Node], message: str) -> None:
    """The resource, how much of it on how many nodes, what the nodes have, and how much they lack."""
    assert shortage(place(slot).nodes, nodes, placed=0, unplaced=1) == Shortage(Trouble.INFEASIBLE, message)


def test_shortage_infeasible_with_room_for_some_says_for_how_many() -> None:
    """Where one of two slots has its place, nothing is missing for a slot, only room for two."""
    nodes = [node("a", 8, 0), node("b", 8, 0), node("c", 8)]
    assert shortage(TWO_NODES, nodes, placed=1, unplaced=1) == Shortage(
        Trouble.INFEASIBLE,
        "a slot needs 16 x GPU on 2 nodes with 8 each; the nodes have 8, 8 and 8: room for 1 of 2 slots",
    )
    few_cpus = [Node("a", {"CPU": 6.0, "GPU": 8.0}, {})]
    found = shortage(place(SlotConfig(gpus=1, cpus=4)).nodes, few_cpus, placed=1, unplaced=2)
    assert found is not None
    assert found.message == "a slot needs 4 x CPU on one node; the nodes have 6: room for 1 of 3 slots"


def test_shortage_waiting_says_what_is_free_and_where() -> None:
    """The nodes could hold the slot, others hold the GPUs: that passes, so it is another word."""
    nodes = [node("a", 8, 3), node("b", 8, 8), node("c", 8, 0)]
    assert shortage(TWO_NODES, nodes, placed=0, unplaced=1) == Shortage(
        Trouble.WAITING, "a slot needs 16 x GPU on 2 nodes with 8 each; free: 3 on a and 8 on b"
    )
    taken = [node("a", 8, 0), node("b", 8, 0)]
    found = shortage(TWO_NODES, taken, placed=0, unplaced=1)
    assert found is not None and found.message.endswith("; free: nothing")


def test_shortage_waiting_where_we_see_room_points_to_ray() -> None:
    """What only Ray knows (label selectors, a placement under way) is not ours to explain."""
    found = shortage(TWO_NODES, [node("a", 8), node("b", 8)], placed=0, unplaced=1)
    assert found is not None and found.trouble is Trouble.WAITING
    assert found.message.endswith("free: 8 on a and 8 on b, enough by our count: `ray status` may say why")


def test_shortage_of_many_nodes_lists_some() -> None:
    """A line for a cluster of a hundred nodes is still a line."""
    found = shortage(place(SlotConfig(gpus=16)).nodes, [node(str(n), 8) for n in range(100)], 0, 1)
    assert found is not None and "the nodes have 8, 8, 8, 8, 8, 8, 8, 8 and 92 more:" in found.message


def test_outlook_counts_asked_for_slots_before_it_sees_room() -> None:
    """Room is for further slots: who has been asked for takes it first."""
    nodes = [node(name, 8) for name in "abcdef"]
    assert outlook(TWO_NODES, nodes, most=9, placed=0, unplaced=0) == Outlook(room=3, possible=3)
    seen = outlook(TWO_NODES, nodes, most=9, placed=0, unplaced=2)
    assert (seen.room, seen.possible) == (1, 3)
    assert outlook(TWO_NODES, nodes[:3], most=9, placed=0, unplaced=5).room == 0


def test_outlook_before_the_first_look_limits_nothing() -> None:
    """A coordinator that has not looked yet does not know of any limit."""
    assert Outlook() == Outlook(room=NO_LIMIT, possible=NO_LIMIT, shortage=None)
