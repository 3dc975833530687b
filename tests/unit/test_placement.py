"""A slot's placement group, and which rank runs where in it."""

from __future__ import annotations

import pytest

from serve_app.config import SlotConfig
from serve_app.errors import PlacementSplit
from serve_app.gpu.placement import check_ranks, names_of, place, rank_places

A, B, C = "aaaa", "bbbb", "cccc"
NAMES = {A: "node-a", B: "node-b", C: "node-c"}


def test_place_on_cpu_is_one_bundle_that_the_replica_takes() -> None:
    """Without GPUs there is nothing but CPUs to reserve."""
    placement = place(SlotConfig(cpus=2))
    assert (placement.bundles, placement.strategy) == ([{"CPU": 2}], "STRICT_PACK")
    assert placement.actor_options == {"num_cpus": 2}
    assert placement.nodes == placement.bundles


def test_place_on_one_node_is_one_bundle_with_all_gpus_that_the_replica_takes() -> None:
    """vLLM's worker processes are the replica's children, so the GPUs are the replica's."""
    placement = place(SlotConfig(gpus=8, cpus=4, host_ram_gb=100))
    assert placement.bundles == [{"CPU": 4, "GPU": 8, "memory": 100e9}]
    assert placement.actor_options == {"num_cpus": 4, "num_gpus": 8, "memory": 100e9}
    assert (placement.strategy, placement.nodes) == ("STRICT_PACK", placement.bundles)


def test_place_on_several_nodes_is_one_bundle_per_rank_with_the_replica_in_the_first() -> None:
    """vLLM's Ray executor wants bundles of one GPU; the replica actor leaves that of the first to its rank."""
    placement = place(SlotConfig(gpus=16, nodes=2, cpus=4, host_ram_gb=160))
    assert placement.bundles == [{"CPU": 4, "GPU": 1, "memory": 10e9}, *[{"GPU": 1, "memory": 10e9}] * 15]
    assert (placement.strategy, placement.actor_options) == ("PACK", {"num_cpus": 4, "num_gpus": 0})
    assert placement.nodes == [{"CPU": 4, "GPU": 8, "memory": 80e9}, {"GPU": 8, "memory": 80e9}]


def test_rank_places_begin_on_the_drivers_node_and_keep_nodes_together() -> None:
    """vLLM's own example: bundles on c, a, b, c, a, b with the driver on a."""
    places = rank_places([C, A, B, C, A, B], driver_node=A)
    assert [(place.bundle, place.node) for place in places] == [(1, A), (4, A), (2, B), (5, B), (0, C), (3, C)]
    assert [place.node for place in rank_places([C, A, B], driver_node=C)] == [C, A, B]


@pytest.mark.parametrize(
    ("counts", "tensor_parallel"),
    [({A: 8, B: 8}, 8), ({A: 8, B: 8}, 4), ({A: 8, B: 8}, 1), ({A: 12, B: 4}, 4), ({A: 1, B: 1}, 1)],
)
def test_check_ranks_accepts_whole_groups_on_the_wanted_nodes(counts: dict[str, int], tensor_parallel: int) -> None:
    """What matters is that no group spans nodes; unequal pipeline stages per node work too."""
    ranks = [node for node, count in counts.items() for _ in range(count)]
    check_ranks(ranks, tensor_parallel, SlotConfig(gpus=len(ranks), nodes=2), NAMES)


def test_check_ranks_split_group_names_the_placement_and_what_to_do() -> None:
    """PACK on three nodes with room for 6, 6 and 4: both groups are split, and the error says how."""
    with pytest.raises(PlacementSplit) as raised:
        check_ranks([A] * 6 + [B] * 6 + [C] * 4, 8, SlotConfig(gpus=16, nodes=2), NAMES)
    assert str(raised.value) == (
        "Ray placed the slot's GPUs as node-a 6, node-b 6, node-c 4; TP group 0 spans node-a and node-b; "
        "TP group 1 spans node-b and node-c; wanted: 2 nodes with 8 GPUs each; "
        "free whole nodes, or keep some for these slots alone, by a label of theirs (slot.labels)"
    )
    assert raised.value.found == {"node-a": 6, "node-b": 6, "node-c": 4}


def test_check_ranks_whole_groups_on_more_nodes_is_refused() -> None:
    """TP4 x PP4 on three nodes works, but not as told: another node's network and failures come with it."""
    with pytest.raises(PlacementSplit, match=r"node-a 4, node-b 8, node-c 4; wanted: 2 nodes .*; free whole nodes"):
        check_ranks([A] * 4 + [B] * 8 + [C] * 4, 4, SlotConfig(gpus=16, nodes=2), NAMES)


def test_check_ranks_on_fewer_nodes_says_which_number_fits() -> None:
    """PACK put on one node what was to span two: on one node there is no need for Ray's workers."""
    with pytest.raises(PlacementSplit, match=r"node-a 4; wanted: 2 nodes with 2 GPUs each; set slot.nodes to 1"):
        check_ranks([A] * 4, 2, SlotConfig(gpus=4, nodes=2), NAMES)


def test_names_of_nodes_that_share_a_name_carry_their_id() -> None:
    """Raylets on one machine share its address; a chosen name needs nothing more."""
    nodes = [
        {"NodeID": "0123456789ab", "NodeName": "10.0.0.1", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "ba9876543210", "NodeName": "10.0.0.1", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "cccc", "NodeName": "gpu-1", "NodeManagerAddress": "10.0.0.2"},
        {"NodeID": "dddd", "NodeName": "", "NodeManagerAddress": "10.0.0.3"},
    ]
    assert names_of(nodes) == {
        "0123456789ab": "10.0.0.1/01234567",
        "ba9876543210": "10.0.0.1/ba987654",
        "cccc": "gpu-1",
        "dddd": "10.0.0.3",
    }
