"""The pool as the coordinator sees it at one moment: what every decision starts from. Values only, no Ray, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from serve_app.config import Tier
from serve_app.pool.capacity import NO_LIMIT
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Verb, Version

# An active slot may go when the others would still be at most this full, measured against their soft capacity.
QUIET_SHARE = 0.5


@dataclass(frozen=True)
class SlotView:
    """One slot as the coordinator sees it.

    Attributes:
        model: which one it serves, is to serve, or has served last.
        holds: the models that it could serve, each with the tier of its engine.
        lent: those whose engine has another one's weights now, so that its tier is nothing to be mended.
        node: where its own process runs.
        gate_model: which model most of the requests at its gate are for.
        engine_waiting, kv_use, prefill_tokens: see `engine.base.EngineLoad`.
        pending: the command that was sent and not taken yet.
        taken_for: the model for which it was told to drain, as long as it is on the way to standby.
        stayed_s: how long it has been in its state.
        unrouted: version of the role map since which routers must not use it; None while it is routable.
        leaving: Serve no longer lists it.
        shut_sent: it already has permission to shut its gate.
        impaired: an engine of it is lost for good.
        fenced: it cannot start, since somebody else holds memory of its GPUs, and keeps them from other slots.
        node_goes: a node of its is being drained; serve_moves: its first node is, so that Serve replaces the slot.
    """

    slot: str
    state: State
    model: str = ""
    holds: Mapping[str, Tier] = field(default_factory=dict[str, Tier])
    lent: frozenset[str] = frozenset()
    hard: int = 10
    in_flight: int = 0
    at_gate: int = 0
    node: str = ""
    gate_model: str = ""
    engine_waiting: int = 0
    kv_use: float = 0.0
    prefill_tokens: int = 0
    pending: Verb | None = None
    taken_for: str = ""
    stayed_s: float = math.inf
    unrouted: Version | None = None
    leaving: bool = False
    shut_sent: bool = False
    impaired: bool = False
    fenced: bool = False
    node_goes: bool = False
    serve_moves: bool = False

    @cached_property
    def is_active(self) -> bool:
        return not self.leaving and self.state is State.ACTIVE and self.pending is not Verb.DRAIN

    @cached_property
    def is_coming(self) -> bool:
        """Will be active without another order."""
        if self.leaving:
            return False
        return self.state is State.PROMOTING or self.pending in (Verb.PROMOTE, Verb.KEEP)

    @cached_property
    def is_standby(self) -> bool:
        return not self.leaving and self.state is State.STANDBY and self.pending is None

    @cached_property
    def is_taken_over(self) -> bool:
        """On the way from one model to another, and not standby yet."""
        return not self.leaving and bool(self.taken_for) and not self.is_coming and self.state is not State.STANDBY

    @cached_property
    def is_awaited(self) -> bool:
        """Requests at its gate are for the model that it is on the way to; no other slot can serve those."""
        return bool(self.at_gate) and self.gate_model == self.taken_for

    @cached_property
    def is_fenced(self) -> bool:
        """Holds GPUs that nobody can use."""
        return self.fenced and not self.leaving and self.state is State.STARTING

    @cached_property
    def is_about_to_be_standby(self) -> bool:
        """Falls asleep, or has only to shut its gate for that, and not for another model."""
        shutting = self.state is State.DRAINING and not self.in_flight
        asleep_soon = self.state is State.PARKING or shutting
        return asleep_soon and not (self.leaving or self.node_goes or self.taken_for or self.is_coming)

    @cached_property
    def can_be_kept(self) -> bool:
        """Drains, but its gate is still open: the cheapest capacity there is."""
        if self.leaving or self.node_goes:
            return False
        return self.state is State.DRAINING and self.pending in (None, Verb.SHUT)

    @cached_property
    def warmth(self) -> Tier | str:
        """The tier of all its engines; empty if it is not the same for all."""
        return _only(set(self.holds.values())) or ""

    @cached_property
    def runs(self) -> bool:
        """Serve counts it as running, also while it fails its health check: until it is gone, or before it is there."""
        return not self.leaving and self.state is not State.STARTING


@dataclass(frozen=True)
class ModelView:
    """One model as the coordinator sees it; the fields are those of `live.LiveModel`."""

    model: str = ""
    min_active: int = 1
    tier: Tier = Tier.HOST
    weight: float = 1.0


@dataclass(frozen=True)
class RouterView:
    """One leased router's need by model, as a level, with the role-map version it has acted on."""

    waiting: Mapping[str, int]
    seen: Version


@dataclass(frozen=True)
class View:
    """Everything `decide` may know.

    Attributes:
        models: those that are configured, the first one being for requests that name none.
        soft: requests per active slot beyond which another slot should be promoted.
        standby: slots to keep beside the active ones.
        configured: the settings are the user's; until `Pool` has handed them over they are defaults.
        room: slots that would fit now on the nodes that exist, beside those that Serve has been asked for.
        possible: slots that those nodes could hold if they were empty.
    """

    slots: tuple[SlotView, ...] = ()
    models: tuple[ModelView, ...] = (ModelView(),)
    routers: tuple[RouterView, ...] = ()
    version: Version = (0, 0)
    soft: int = 8
    standby: int = 1
    frozen: bool = False
    room: int = NO_LIMIT
    possible: int = NO_LIMIT
    configured: bool = True

    def active(self, model: str) -> list[SlotView]:
        return self._active.get(model, [])

    def coming(self, model: str) -> list[SlotView]:
        """Slots that will be active for `model`, or be standby for it, without another order."""
        return self._coming.get(model, [])

    def need(self, model: str) -> int:
        """Requests for `model` that no router could place, from those routers that have acted on the newest role map.

        A router that has not is about to look again; counting it too would answer one need by two promotions.
        """
        unnamed = self._waiting.get("", 0) if model == self.models[0].model != "" else 0
        return self._waiting.get(model, 0) + unnamed

    @cached_property
    def standbys(self) -> list[SlotView]:
        return [slot for slot in self.slots if slot.is_standby]

    def in_state(self, state: State) -> list[SlotView]:
        return self._states.get(state, [])

    @cached_property
    def told(self) -> list[SlotView]:
        """Slots with a command that they have not taken yet."""
        return [slot for slot in self.slots if slot.pending is not None]

    @cached_property
    def under_way(self) -> list[SlotView]:
        """Slots that start, or will be active without another order."""
        return [slot for slot in self.slots if slot.state is State.STARTING or slot.is_coming]

    @cached_property
    def hard(self) -> int:
        """The most requests that any slot may be given at once."""
        return max((slot.hard for slot in self.slots), default=1)

    @cached_property
    def warmth(self) -> Tier | None:
        """The tier of all models' standbys; None if it is not the same for all."""
        return _only({model.tier for model in self.models})

    # One pass over the slots, not one for each model.

    @cached_property
    def _states(self) -> dict[State, list[SlotView]]:
        found: dict[State, list[SlotView]] = {}
        for slot in self.slots:
            found.setdefault(slot.state, []).append(slot)
        return found

    @cached_property
    def _active(self) -> dict[str, list[SlotView]]:
        found: dict[str, list[SlotView]] = {}
        for slot in self.slots:
            if slot.is_active:
                found.setdefault(slot.model, []).append(slot)
        return found

    @cached_property
    def _coming(self) -> dict[str, list[SlotView]]:
        found: dict[str, list[SlotView]] = {}
        for slot in self.slots:
            if slot.is_coming:
                found.setdefault(slot.model, []).append(slot)
            elif slot.is_taken_over:
                found.setdefault(slot.taken_for, []).append(slot)
        return found

    @cached_property
    def _waiting(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for router in self.routers:
            if router.seen >= self.version:
                for name, waiting in router.waiting.items():
                    found[name] = found.get(name, 0) + waiting
        return found

    def share(self, model: ModelView) -> float:
        """Slots that the model has or is about to have, by its weight."""
        return (len(self.active(model.model)) + len(self.coming(model.model))) / model.weight

    def has_spare(self, model: ModelView) -> bool:
        """The model's load, held or in flight, would leave one of its active slots idle."""
        active = self.active(model.model)
        load = sum(slot.in_flight for slot in active)
        return not self.need(model.model) and load <= (len(active) - 1) * self.soft * QUIET_SHARE


def _only(tiers: set[Tier]) -> Tier | None:
    return next(iter(tiers)) if len(tiers) == 1 else None
