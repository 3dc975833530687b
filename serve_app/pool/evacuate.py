"""What the pool does about nodes that Ray is told to drain: a spot notice, maintenance, a pod that is deleted. Pure.

Serve starts the replacement of a slot first and then stops it, or stops it at once where less than its grace is left;
neither asks which slot is active, and of a slot over several nodes Serve sees the first one only. So before Serve acts
a standby elsewhere takes over, and the slot drains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from serve_app.pool.decide import Order, cost
from serve_app.pool.messages import Verb
from serve_app.pool.view import ModelView, View


def evacuate(view: View) -> list[Order]:
    """Orders that move what is active off the nodes that go; none while the pool is frozen.

    As long as too few slots elsewhere are active, the ones that go keep serving.
    """
    orders: list[Order] = []
    if view.frozen or not any(slot.node_goes for slot in view.slots):
        return orders
    for model in view.models:
        orders += _move(view, model, {order.slot for order in orders})
    return [*orders, *_retire_unseen(view)]


def _move(view: View, model: ModelView, taken: set[str]) -> list[Order]:
    """Promote elsewhere what the model's load needs; once that is active, drain what goes."""
    active, name = view.active(model.model), model.model
    going = [slot for slot in active if slot.node_goes]
    if not going:
        return []
    staying = [slot for slot in active if not slot.node_goes]
    coming = [slot for slot in view.coming(name) if not slot.node_goes]
    load = sum(slot.in_flight for slot in active)
    wanted = min(max(model.min_active, math.ceil(load / view.soft)), len(active))
    if len(staying) >= wanted:
        return [Order(Verb.DRAIN, slot.slot, "its node is drained") for slot in going if slot.pending is None]
    standbys = [slot for slot in view.slots if slot.is_standby and name in slot.holds and slot.slot not in taken]
    usable = sorted((slot for slot in standbys if not slot.node_goes), key=lambda slot: cost(view, slot, name))
    missing = max(0, wanted - len(staying) - len(coming))
    reason = "the node of an active slot is drained"
    return [Order(Verb.PROMOTE, slot.slot, reason, name) for slot in usable[:missing]]


def _retire_unseen(view: View) -> Iterator[Order]:
    """A standby that Serve does not move, as only another of its nodes goes, makes room by leaving itself."""
    for slot in view.slots:
        if slot.is_standby and slot.node_goes and not slot.serve_moves:
            yield Order(Verb.RETIRE, slot.slot, "one of its nodes is drained")
