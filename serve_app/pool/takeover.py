"""Which slot one model may take from another, when no standby is left. Pure.

A model gives up what it does not need. Where all want more than there is, the one with less than its share by weight
takes from one with more, but only if the balance is better afterwards: a slot that tips it would go back at once. One
that has no slot at all takes its turn on another's last one. `slots.keep_model_s` bounds how often a slot changes hands
under load; one that has run out of work would only stand idle meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from serve_app.live import LiveSettings
from serve_app.pool.view import ModelView, SlotView, View

# A slot has run out of work if nothing has reached it for this long after its promotion: what was held for it takes
# milliseconds, on a busy machine some more.
ARRIVAL_S = 0.5


def victim(view: View, settings: LiveSettings, taken: Set[str], taker: ModelView, given: int) -> SlotView | None:
    """The active slot that drains soonest of those that `taker` may take over; None if there is none.

    A model's last one only where there is no other: that model would at once take one from a third.

    Args:
        taken: slots that have been given another order in this step. given: how many of these orders are for `taker`.
    """
    has = view.share(taker) + given / taker.weight
    keep_s = settings.slots.keep_model_s
    stayed = [
        slot
        for owner in view.models
        if owner.model != taker.model
        for slot in _given_up(view, taken, owner, taker, has)
        if slot.stayed_s >= (keep_s if slot.in_flight else min(keep_s, ARRIVAL_S))
    ]
    return min(stayed, key=lambda slot: (_is_last(view, taken, slot), slot.in_flight, slot.slot), default=None)


def others(view: View, taker: ModelView) -> list[SlotView]:
    """Active slots of other models that `taker` could ever be given: those above their `min_active`."""
    found: list[SlotView] = []
    for owner in view.models:
        active = view.active(owner.model) if owner.model != taker.model else []
        if len(active) > owner.min_active:
            found += [slot for slot in active if taker.model in slot.holds]
    return found


def _is_last(view: View, taken: Set[str], slot: SlotView) -> bool:
    """Whether its model, which has work, would have no slot left."""
    left = [other for other in view.active(slot.model) if other is not slot and other.slot not in taken]
    return not left and bool(slot.in_flight or view.need(slot.model))


def _given_up(view: View, taken: Set[str], owner: ModelView, taker: ModelView, has: float) -> Iterator[SlotView]:
    """The slots of one model out of which `taker`, whose share is `has`, may have one."""
    active = view.active(owner.model)
    mine = [slot for slot in active if slot.slot not in taken and slot.pending is None]
    if len(mine) <= owner.min_active:
        return
    after = has + 1 / taker.weight
    before = view.share(owner) - (len(active) - len(mine)) / owner.weight
    if view.has_spare(owner) or after < before or not has:
        yield from (slot for slot in mine if taker.model in slot.holds)
