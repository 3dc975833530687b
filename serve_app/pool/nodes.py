"""What Ray says of its nodes, and of the slots that Serve has asked for. Every call blocks for milliseconds."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray._private.state import available_resources_per_node, state
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.util.placement_group import placement_group_table

from serve_app.config import SLOT_DEPLOYMENT
from serve_app.gpu.placement import names_of
from serve_app.pool import naming
from serve_app.pool.capacity import Node


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray was told to drain: they take nothing new, and may be gone at any moment."""
    return frozenset(state.get_draining_nodes())


def live_nodes(labels: dict[str, str], going: frozenset[str]) -> list[Node]:
    """Every live node that has these labels and stays, with what it has in all and what is free."""
    alive: list[dict[str, Any]] = [
        node
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in going and labels.items() <= node["Labels"].items()
    ]
    free, names = available_resources_per_node(), names_of(alive)
    return [Node(names[node["NodeID"]], node["Resources"], free.get(node["NodeID"], {})) for node in alive]


def placed_slots(application: str) -> tuple[list[str], list[str]]:
    """Actor names of the application's slots: those that have a place, and those that Ray has found none for yet."""
    prefix = naming.placement_groups(application)
    states = {group["name"]: group["state"] for group in placement_group_table().values()}
    ours = {name: state for name, state in states.items() if name.startswith(prefix)}
    placed = [name for name, state in ours.items() if state == "CREATED"]
    return placed, [name for name, state in ours.items() if state in ("PENDING", "RESCHEDULING")]


def end_unwanted(application: str, unplaced: list[str]) -> list[str]:
    """End those of the slots without a place that Serve no longer wants; returns their names.

    Serve asks a slot to shut down and waits `slot.shutdown_grace_s` for the answer of a process that has never begun:
    for so long it could neither delete the application nor start slots of another shape.
    """
    details: dict[str, Any] = serve.context._get_global_client().get_serve_details()
    deployments = details["applications"].get(application, {"deployments": {}})["deployments"]
    replicas = deployments.get(SLOT_DEPLOYMENT, {"replicas": []})["replicas"]
    stopping = {replica["actor_name"] for replica in replicas if replica["state"] == "STOPPING"}
    unwanted = [name for name in unplaced if name in stopping]
    for name in unwanted:
        with suppress(ValueError):  # gone already
            ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))
    return unwanted
