"""What the pool should do now: a pure function from a view of the pool to orders. No Ray, no clock, no log.

The coordinator calls `decide` at every change and a few times a second, and `next_target` when the autoscaling policy
asks. Slots say what is; a command that a slot has not taken yet lies over its state as `pending`, so that nothing is
ordered twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.config import Tier
from serve_app.live import LiveSettings, PromoteWhen
from serve_app.pool.capacity import NO_LIMIT
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Verb
from serve_app.pool.pressure import crowded
from serve_app.pool.takeover import victim
from serve_app.pool.view import QUIET_SHARE, ModelView, SlotView, View

TIER_ORDER = {Tier.READY: 0, Tier.HOST: 1, Tier.DISK: 2}


@dataclass(frozen=True)
class Order:
    """Tell `slot` to do `verb`, and why; `model` is which one to promote it for, or for which one it must go."""

    verb: Verb
    slot: str
    reason: str
    model: str = ""


@dataclass
class _Plan:
    """Orders so far, and which slots are still free to be ordered.

    Attributes:
        taken: slots that have been given an order.
        reserved: slots that will be standby by themselves, and are promoted then.
    """

    orders: list[Order] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    reserved: set[str] = field(default_factory=set)

    def add(self, verb: Verb, slot: SlotView, reason: str, model: str = "") -> None:
        self.orders.append(Order(verb, slot.slot, reason, model))
        self.taken.add(slot.slot)

    def free(self, view: View) -> list[SlotView]:
        ordered = self.taken | self.reserved
        return [slot for slot in view.slots if slot.slot not in ordered]


def decide(view: View, settings: LiveSettings, quiet_s: Mapping[str, float]) -> list[Order]:
    """The orders to give now.

    Args:
        quiet_s: by model, seconds for which `is_quiet` has been true of it; without an entry it is not.
    """
    plan = _Plan()
    if not view.frozen:
        _change_roles(view, settings, quiet_s, plan)
    # Last, so that a drain which is wanted back is called back rather than ended.
    _let_drained_slots_shut(view, plan)
    return plan.orders


def is_quiet(view: View, settings: LiveSettings, model: ModelView) -> bool:
    """One active slot more than the model needs and must have, so that one could go."""
    active = view.active(model.model)
    if len(active) <= model.min_active or view.coming(model.model) or not view.has_spare(model):
        return False
    return not any(crowded(slot, settings.promote_when, QUIET_SHARE) for slot in active)


def wanted_slots(view: View, settings: LiveSettings) -> int:
    """Slots that should exist: what is active or about to be, the standbys to keep beside it, and in place of each slot
    whose GPUs are fenced another one."""
    busy = sum(1 for slot in view.slots if slot.is_active or slot.is_coming or slot.is_taken_over)
    wanted = max(busy, sum(model.min_active for model in view.models)) + view.standby
    return min(max(wanted, settings.slots.min) + _fenced(view), _most_slots(view, settings))


def _most_slots(view: View, settings: LiveSettings) -> int:
    """Slots that may exist: without buying nodes, and beyond `slots.min`, no more than there could ever be."""
    most = settings.slots.max + _fenced(view)
    if settings.slots.refill == "buy":
        return most
    existing = sum(1 for slot in view.slots if not slot.leaving)
    return min(most, max(settings.slots.min, view.possible, existing))


def _fenced(view: View) -> int:
    """Slots that hold GPUs which nobody can use; `slots.max` does not count them."""
    return sum(1 for slot in view.in_state(State.STARTING) if slot.is_fenced)


def next_target(
    view: View, settings: LiveSettings, current: int, short_s: float | None, surplus_s: float | None
) -> tuple[int, Order | None]:
    """Serve's next target count, and whom to retire first.

    Serve picks its own victims: slots that do not run yet, then the newest, active or not. So the target drops only by
    slots that are not serving yet; to shrink further, a standby is retired, and when it is gone the target follows.

    Args:
        current: the target that Serve has now.
        short_s, surplus_s: seconds for which slots have been missing / too many; None when they are not.
    """
    wanted = wanted_slots(view, settings)
    if wanted > current:
        room = {"buy": NO_LIMIT, "existing_nodes": view.room, "off": 0}[settings.slots.refill]
        waited = short_s is not None and short_s >= settings.slots.refill_delay_s
        return max(min(wanted, current + room if waited else current), settings.slots.min), None
    patience = settings.slots.shrink_after_s
    patient = patience is not None and surplus_s is not None and surplus_s >= patience
    floor = wanted if patient else _most_slots(view, settings)
    if floor >= current:
        return current, None
    unborn = current - sum(1 for slot in view.slots if slot.runs)
    if unborn > 0:
        return max(floor, current - unborn), None
    leaving = any(slot.state in (State.RETIRING, State.FAILED) or slot.pending is Verb.RETIRE for slot in view.slots)
    standbys = [slot for slot in view.slots if slot.is_standby]
    if leaving or not standbys or view.frozen:
        return current, None
    return current, Order(Verb.RETIRE, _coldest(standbys).slot, "more slots than wanted")


def _change_roles(view: View, settings: LiveSettings, quiet_s: Mapping[str, float], plan: _Plan) -> None:
    """Promote what is missing; of models that miss nothing, demote; and if none does, change a tier."""
    _promote_late_arrivals(view, plan)
    missing = {model: reasons for model in view.models if (reasons := _missing(view, settings.promote_when, model))}
    for model in sorted(missing, key=view.share):  # who has least comes first
        for reason in missing[model]:
            _add_capacity(view, settings, plan, model, reason)
    if not view.configured:  # defaults must not take away what the user has asked for
        return
    for model in view.models:
        if model not in missing and quiet_s.get(model.model, -1.0) >= settings.slots.demote_after_s:
            _demote_one(view, model, plan)
    if not missing:
        _retier_one(view, plan)
        _replace_impaired(view, plan)


def _let_drained_slots_shut(view: View, plan: _Plan) -> None:
    """A draining slot may shut once every leased router has seen that it drains; late arrivals are served till then."""
    for slot in view.in_state(State.DRAINING):
        if slot.pending is not None or slot.slot in plan.taken:
            continue
        if slot.shut_sent or slot.unrouted is None:
            continue
        if all(router.seen >= slot.unrouted for router in view.routers):
            plan.add(Verb.SHUT, slot, "every router has seen the drain")


def _promote_late_arrivals(view: View, plan: _Plan) -> None:
    """Requests at the gate of a standby, or of a slot that has moved on to another model, were routed there and can be
    served nowhere else."""
    for slot in view.slots:
        if not slot.at_gate:
            continue
        model, reason = slot.gate_model or slot.model, f"{slot.at_gate} late arrivals at its gate"
        if model not in slot.holds:
            continue
        if slot.is_standby:
            plan.add(Verb.PROMOTE, slot, reason, model)
        elif slot.is_active and slot.pending is None and model != slot.model:
            plan.add(Verb.DRAIN, slot, reason, model)


def _missing(view: View, when: PromoteWhen, model: ModelView) -> list[str]:
    """One reason for every slot that should become active, beyond those that already are about to."""
    active, coming = view.active(model.model), view.coming(model.model)
    wanted: list[str] = []
    waiting = view.need(model.model)
    if not (active or waiting or model.min_active):
        return wanted
    if waiting:
        wanted += [f"{waiting} requests held"] * max(0, math.ceil(waiting / view.hard) - len(coming))
    load = sum(slot.in_flight for slot in active)
    full = load >= view.soft * (len(active) + len(coming) + len(wanted))
    if active and full:
        wanted.append(f"{load} in flight on {len(active)} active slots")
    # One at a time: what it relieves shows once it is there.
    if active and not coming and not wanted and all(crowded(slot, when) for slot in active):
        crowd = crowded(active[0], when)
        wanted.append(f"{crowd} on the least busy of {len(active)} active slots" if len(active) > 1 else crowd)
    short = model.min_active - len(active) - len(coming) - len(wanted)
    wanted += ["fewer active slots than min_active"] * max(0, short)
    return wanted


def _add_capacity(view: View, settings: LiveSettings, plan: _Plan, model: ModelView, reason: str) -> None:
    """The cheapest capacity first: a drain called back, the warmest standby, then a slot of another model."""
    free, name = plan.free(view), model.model
    kept = [slot for slot in free if slot.can_be_kept and slot.model == name]
    # One that drains for another model comes back only if that one has lost its need meanwhile, held or at its gate.
    kept = [slot for slot in kept if not slot.taken_for or not (view.need(slot.taken_for) or slot.is_awaited)]
    if kept:
        plan.add(Verb.KEEP, max(kept, key=lambda slot: slot.in_flight), reason)
        return
    standbys = [slot for slot in free if slot.is_standby and name in slot.holds]
    if standbys:
        plan.add(Verb.PROMOTE, min(standbys, key=lambda slot: cost(view, slot, name)), reason, name)
        return
    soon = next((slot for slot in free if slot.is_about_to_be_standby and name in slot.holds), None)
    if soon is not None:  # cheaper than to empty another one
        plan.reserved.add(soon.slot)
        return
    if not view.configured and not view.need(name):  # nobody waits, and the minimum may be another one
        return
    given = sum(1 for order in plan.orders if order.model == name)
    taken = victim(view, settings, plan.taken, model, given)
    if taken is not None:
        plan.add(Verb.DRAIN, taken, f"{name} needs it: {reason}", name)


def cost(view: View, standby: SlotView, model: str) -> tuple[bool, int, bool, int, int, str]:
    """What it takes to make a standby active for a model: whether it would have to move again at once, how cold its
    engine is, whether another one must fall asleep first, how much of the model would be lost with its node, and how
    many other models lose it."""
    another_awake = any(tier is Tier.READY for name, tier in standby.holds.items() if name != model)
    beside = sum(1 for slot in view.active(model) if slot.node == standby.node)
    return standby.node_goes, TIER_ORDER[standby.holds[model]], another_awake, beside, len(standby.holds), standby.slot


def _demote_one(view: View, model: ModelView, plan: _Plan) -> None:
    """The active slot that drains soonest: the one with the fewest requests."""
    active = [slot for slot in view.active(model.model) if slot.pending is None and slot.slot not in plan.taken]
    draining = any(
        slot.model == model.model and (slot.state is State.DRAINING or slot.pending is Verb.DRAIN)
        for slot in view.slots
    )
    if len(active) > model.min_active and not draining:
        plan.add(Verb.DRAIN, min(active, key=lambda slot: (slot.in_flight, slot.slot)), "quiet")


def _retier_one(view: View, plan: _Plan) -> None:
    """A standby kept at another tier than the settings say; one at a time, so that others stay usable."""
    if view.in_state(State.PARKING) or any(slot.pending is Verb.RETIER for slot in view.told):
        return
    for slot in view.standbys:
        if slot.warmth == view.warmth or slot.slot in plan.taken or slot.slot in plan.reserved:
            continue
        for model in view.models:
            tier = slot.holds.get(model.model, model.tier)
            if tier is not model.tier and not (model.model in slot.lent and model.tier is not Tier.READY):
                plan.add(Verb.RETIER, slot, f"tier of {model.model} is {tier}, wanted {model.tier}")
                return


def _replace_impaired(view: View, plan: _Plan) -> None:
    """A standby that has lost an engine makes room for a whole one, once another standby can take its place."""
    standbys = [slot for slot in view.standbys if slot.slot not in plan.taken | plan.reserved]
    whole = [slot for slot in standbys if not slot.impaired]
    leaving = view.in_state(State.RETIRING) or any(slot.pending is Verb.RETIRE for slot in view.told)
    if whole and len(whole) < len(standbys) and not leaving:
        lost = next(slot for slot in standbys if slot.impaired)
        plan.add(Verb.RETIRE, lost, "it has lost an engine; a new slot takes its place")


def _coldest(standbys: list[SlotView]) -> SlotView:
    return max(standbys, key=lambda slot: (min(TIER_ORDER[tier] for tier in slot.holds.values()), slot.slot))
