"""Before Serve replaces the slots one by one: the slot that it stops first becomes a standby.

Serve stops outdated slots in an order of its own, and the first is usually the one that has served the longest
(`_stop_or_update_outdated_version_replicas` in ray/serve/_private/deployment_state.py, 2.60). A new version is built in
a task on the cluster before anything is stopped. That task is the moment to exchange roles; the stop then hits a slot
that no router uses, and the active slot is the last to go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.serve._private.common import DeploymentID

from serve_app.config import SLOT_DEPLOYMENT
from serve_app.pool import naming
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Verb

log = logging.getLogger("ray.serve")

REASON = "rollout"
# Waking up has its own deadline; whoever waits for longer than this is not worth delaying the rollout for.
PATIENCE_S = 60.0
_POLL_S = 0.05


class Seen(NamedTuple):
    """What counts of a slot: its state, the model it serves (or has served last), and those that it holds."""

    state: State
    model: str
    holds: frozenset[str]


def exchange(order: Sequence[str], slots: Mapping[str, Seen]) -> tuple[str, str] | None:
    """The standby to promote and the active slot to drain, so that `order[0]` is no longer active. Pure.

    Of the standbys that hold its model the one is taken that Serve stops last: it serves until the new version does.
    None where the first is not active, or where nobody could take its place.
    """
    first = slots.get(order[0]) if order else None
    if first is None or first.state is not State.ACTIVE:
        return None
    standbys = [
        name
        for name in order[1:]
        if name in slots and slots[name].state is State.STANDBY and first.model in slots[name].holds
    ]
    return (standbys[-1], order[0]) if standbys else None


def make_way(args: Mapping[str, Any]) -> None:
    """Exchange roles in the running application that is about to be replaced by one with these `args`.

    Called where Serve builds an application; elsewhere, and at a first deployment, it does nothing. Blocks while a
    standby wakes up. Never raises: a rollout without it only holds requests for as long as that takes.
    """
    if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return
    try:
        for application, order in _rolled(args).items():
            for coordinator in naming.coordinator_names(application):
                _exchange_roles(coordinator, order)
    except Exception as error:
        log.warning("the slots are replaced in Serve's order: %s", error)


def _rolled(args: Mapping[str, Any]) -> dict[str, list[str]]:
    """Applications that are being built with these `args`: their running slots in the order in which Serve stops them.

    A builder is not told the name of its application. Two that are built with the same `args` at the same time may
    each find both; to make way twice does nothing.
    """
    from ray import serve

    client = serve.context._get_global_client()
    applications = client.get_serve_details()["applications"]
    running = ray.get(client._controller._all_running_replicas.remote())
    return {
        name: [replica.replica_id.unique_id for replica in running.get(DeploymentID(SLOT_DEPLOYMENT, name), [])]
        for name, details in applications.items()
        if details["status"] == "DEPLOYING" and (details.get("deployed_app_config") or {}).get("args") == args
    }


def _exchange_roles(coordinator: str, order: Sequence[str]) -> None:
    """Promote, wait until it serves, and only then drain: there is an active slot at every moment."""
    slots = _slots(coordinator)
    wanted = exchange(order, slots)
    if wanted is None:
        return
    promoted, drained = wanted
    log.info("before the rollout slot %s takes over from %s, which Serve stops first", promoted, drained)
    actor = naming.coordinator(coordinator)
    ray.get(actor.operate.remote(Verb.PROMOTE, promoted, slots[drained].model, REASON))
    deadline = time.monotonic() + PATIENCE_S
    while (now := _slots(coordinator).get(promoted)) is None or now.state is not State.ACTIVE:
        if time.monotonic() > deadline:
            raise TimeoutError(f"slot {promoted} is not active after {PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    ray.get(actor.operate.remote(Verb.DRAIN, drained, "", REASON))


def _slots(coordinator: str) -> dict[str, Seen]:
    status = ray.get(naming.coordinator(coordinator).status.remote(ledger=False))
    return {
        slot["slot"]: Seen(
            slot["state"],
            slot["model"],
            frozenset(engine["model"] for engine in slot["engines"] if engine["tier"] and not engine["error"]),
        )
        for slot in status["slots"]
        if not slot["leaving"]
    }
