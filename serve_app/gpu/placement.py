"""From a slot's shape to its placement group, and from what Ray made of it to who runs where. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.config import SlotConfig
from serve_app.errors import PlacementSplit


@dataclass(frozen=True)
class Placement:
    """What Serve is told, and what it needs.

    Attributes:
        bundles: resource name -> amount, one mapping a bundle; the replica actor runs in the first.
        strategy: of the placement group.
        actor_options: the replica actor's own share of the first bundle.
        nodes: what each of the slot's nodes must have, resource name -> amount; every entry needs a node of its own.
    """

    bundles: list[dict[str, float]]
    strategy: str
    actor_options: dict[str, float]
    nodes: list[dict[str, float]]


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs: the index of its bundle, and that bundle's node (Ray's id)."""

    bundle: int
    node: str


def place(slot: SlotConfig) -> Placement:
    """The placement group of one slot.

    On one node it is a single bundle that the replica actor takes in full: vLLM's processes are its children and use
    what it reserved. Over several nodes every rank is a Ray actor with a bundle of its own (vLLM refuses bundles of
    more than one GPU), and the replica actor, which has no GPU, runs beside the first.
    """
    return _on_one_node(slot) if slot.nodes == 1 else _on_several_nodes(slot)


def _on_one_node(slot: SlotConfig) -> Placement:
    bundle: dict[str, float] = {"CPU": slot.cpus}
    options: dict[str, float] = {"num_cpus": slot.cpus}
    if slot.gpus:
        bundle["GPU"] = options["num_gpus"] = slot.gpus
    if slot.host_ram_gb is not None:
        bundle["memory"] = options["memory"] = slot.host_ram_gb * 1e9
    return Placement([bundle], "STRICT_PACK", options, [bundle])


def _on_several_nodes(slot: SlotConfig) -> Placement:
    rank: dict[str, float] = {"GPU": 1.0}  # vLLM's workers ask for no CPU
    if slot.host_ram_gb is not None:
        rank["memory"] = slot.host_ram_gb * 1e9 / slot.gpu_count
    first = {"CPU": slot.cpus} | rank
    share = {name: amount * slot.gpus_on_a_node for name, amount in rank.items()}
    return Placement(
        bundles=[first, *(dict(rank) for _ in range(slot.gpu_count - 1))],
        strategy="PACK",
        actor_options={"num_cpus": slot.cpus, "num_gpus": 0},
        nodes=[{"CPU": slot.cpus} | share, *(dict(share) for _ in range(slot.nodes - 1))],
    )


def rank_places(bundle_nodes: Sequence[str], driver_node: str) -> list[RankPlace]:
    """Which rank goes where, as vLLM's Ray executor decides it.

    Its rule (`get_bundles_sorted_by_node` in vllm/v1/executor/ray_utils.py, 0.32): the bundles on the driver's node
    come first, the others follow by node id, and within a node they keep their index; the n-th of them is rank n. The
    older executor sorts the other nodes by address instead; both keep a node's ranks together.

    Args:
        bundle_nodes: the node of each bundle, by bundle index.
        driver_node: the node of the replica actor, whose child is the EngineCore.
    """
    places = [RankPlace(bundle, node) for bundle, node in enumerate(bundle_nodes)]
    return sorted(places, key=lambda place: (place.node != driver_node, place.node))


def check_ranks(ranks: Sequence[str], tensor_parallel: int, slot: SlotConfig, names: Mapping[str, str]) -> None:
    """Check that every tensor parallel group is inside one node, and that the slot spans the nodes it was told to.

    Args:
        ranks: the node of each rank, in rank order; a group is `tensor_parallel` ranks that follow one another.
        names: what to call the nodes.

    Raises:
        PlacementSplit: with the placement found.
    """
    found = Counter(names.get(node, node) for node in ranks)
    groups = [ranks[first : first + tensor_parallel] for first in range(0, len(ranks), tensor_parallel)]
    split = [
        f"TP group {index} spans {' and '.join(dict.fromkeys(names.get(node, node) for node in group))}"
        for index, group in enumerate(groups)
        if len(set(group)) > 1
    ]
    if split or len(found) != slot.nodes:
        raise PlacementSplit(dict(found), split, slot.nodes, slot.gpus_on_a_node)


def names_of(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What to call each of `ray.nodes()`, by id: its name (its address, unless someone chose one).

    Where several nodes share a name, the beginning of the id tells them apart.
    """
    called: list[str] = [node["NodeName"] or node["NodeManagerAddress"] for node in nodes]
    return {
        node["NodeID"]: name if called.count(name) == 1 else f"{name}/{node['NodeID'][:8]}"
        for node, name in zip(nodes, called, strict=True)
    }
