"""Where Ray has placed the slot that this process belongs to. Asks Ray; what follows from it is `placement`'s."""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group_table

from serve_app.gpu import nvml
from serve_app.gpu.placement import RankPlace, names_of, rank_places


def own_group() -> PlacementGroup:
    """The placement group of this slot; Serve gives every slot one."""
    group = get_current_placement_group()
    assert group is not None, "a slot runs inside its placement group"
    return group


def own_node() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def own_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs that Ray has given to this process; empty where no driver can name them (simulated ones)."""
    import pynvml

    try:
        return tuple(nvml.visible())
    except pynvml.NVMLError:
        return ()


def own_rank_places() -> list[RankPlace]:
    """Where vLLM's Ray executor will start each rank of this slot. Blocks for milliseconds."""
    nodes: dict[int, str] = placement_group_table(own_group())["bundles_to_node_id"]
    return rank_places([nodes[index] for index in sorted(nodes)], own_node())


def node_names() -> dict[str, str]:
    """What to call each live node, by id. Blocks for milliseconds."""
    return names_of([node for node in ray.nodes() if node["Alive"]])
