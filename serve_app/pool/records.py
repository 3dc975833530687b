"""What the coordinator keeps of each slot and router: their last reports, and what lies over them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.config import Tier
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Command, EngineReport, NeedReport, SlotReport, Verb, Version
from serve_app.pool.view import SlotView


@dataclass
class SlotRecord:
    """The last report of one slot, and what lies over it.

    Attributes:
        entered_s: when it was first heard to be in its state. taken_for: see `SlotView`.
        said: what the role map says of the slot, as far as it comes from here; up to date after `view`.
        kept: `view` would give the last answer again, whatever the time; None once anything has changed.
    """

    report: SlotReport
    heard_s: float
    entered_s: float
    pending: Command | None = None
    taken_for: str = ""
    shut_sent: bool = False
    unrouted: Version | None = None
    listed: bool = False
    absent_since_s: float | None = None
    trace: str = ""
    leaving: bool = False
    silent: bool = False
    said: tuple[object, ...] = ()
    kept: SlotView | None = None
    _held: tuple[tuple[EngineReport, ...], dict[str, Tier], bool] = ((), {}, False)

    def heard(self, report: SlotReport, epoch: int, now: float) -> bool:
        """A newer report; `epoch` is that of the coordinator which keeps this record.

        Returns whether it says anything new that decisions start from: several times a second most slots do not.
        """
        before = (self.pending, self.shut_sent, self.taken_for, self.silent)
        if report.state is not self.report.state:
            self.entered_s = now
        known, self.report, self.heard_s = self.report, report, now
        if self.pending and report.op >= (epoch, self.pending.op):
            self.pending = None
        if report.state is not State.DRAINING:
            self.shut_sent = False
        if self.pending is None and report.state not in (State.DRAINING, State.PARKING):
            self.taken_for = ""
        after = (self.pending, self.shut_sent, self.taken_for, False)
        new = after != before or _decisive(report) != _decisive(known)
        if new:
            self.kept = None
        return new

    def ordered(self, command: Command) -> None:
        """A command is on its way to the slot."""
        self.pending, self.kept = command, None
        self.trace = command.traceparent or self.trace
        self.shut_sent = self.shut_sent or command.verb is Verb.SHUT
        match command.verb:
            case Verb.DRAIN:
                self.taken_for = command.model
            case Verb.KEEP | Verb.PROMOTE:
                self.taken_for = ""
            case _:
                pass

    def unpublished(self) -> None:
        """Routers have not seen since when it is not routed to, so it may not shut its gate yet."""
        self.unrouted, self.shut_sent, self.kept = None, False, None
        if self.pending is not None and self.pending.verb is Verb.SHUT:
            self.pending = None

    # Said at every step, and most of the time what is known.

    def set_leaving(self, leaving: bool) -> None:
        if leaving is not self.leaving:
            self.leaving, self.kept = leaving, None

    def set_silent(self, silent: bool) -> None:
        if silent is not self.silent:
            self.silent, self.kept = silent, None

    def set_unrouted(self, version: Version | None) -> None:
        if version != self.unrouted:
            self.unrouted, self.kept = version, None

    def view(self, now: float, going: frozenset[str] = frozenset(), settled_s: float = math.inf) -> SlotView:
        """How decisions see it, and `kept` if that will do until something changes.

        Args:
            going: ids of the nodes that are being drained.
            settled_s: how long a slot must have stayed in its state for more of it to make no difference. `stayed_s`
                may be out of date beyond, except on the way to active, where what is left of it is told.
        """
        view, said = self._viewed(now - self.entered_s, going), self.report
        settled = view.stayed_s >= settled_s and view.state not in (State.STARTING, State.PROMOTING)
        self.kept = view if settled else None
        role = (view.state, view.model, view.holds, view.hard, view.pending, view.taken_for, view.leaving)
        flex = (said.flex_hard, said.flex_model, said.flex_in_flight)
        self.said = (view.slot, *role, *flex, self.trace, said.error, said.stage)
        return view

    def _viewed(self, stayed_s: float, going: frozenset[str]) -> SlotView:
        said = self.report
        if said.engines != self._held[0]:
            holds = {engine.model: engine.tier for engine in self.engines if engine.tier is not None}
            self._held = (said.engines, holds, any(engine.error for engine in said.engines))
        _, holds, impaired = self._held
        promoting = self.pending is not None and self.pending.verb is Verb.PROMOTE
        return SlotView(
            slot=said.slot,
            state=said.state,
            model=self.pending.model if self.pending and promoting else said.model,
            holds=holds,
            lent=frozenset(engine.model for engine in said.engines if engine.lent),
            hard=said.hard,
            in_flight=said.in_flight,
            at_gate=said.at_gate,
            node=said.node,
            gate_model=said.gate_model,
            engine_waiting=said.load.waiting,
            kv_use=said.load.kv_use,
            prefill_tokens=said.load.prefill_tokens,
            pending=self.pending.verb if self.pending else None,
            taken_for=self.taken_for,
            stayed_s=stayed_s,
            unrouted=self.unrouted,
            leaving=self.leaving or self.silent,
            shut_sent=self.shut_sent,
            impaired=impaired,
            fenced=bool(said.fenced),
            node_goes=not going.isdisjoint((said.node, *said.ranks)),
            serve_moves=said.node in going,
        )

    @property
    def was_told_to_go(self) -> bool:
        """By us, or by Serve: then it went on reporting after routers had lost it. One that dies falls silent first."""
        removed = self.absent_since_s is not None and self.heard_s >= self.absent_since_s
        return removed or self.report.state is State.RETIRING

    @property
    def engines(self) -> list[EngineReport]:
        """Those that it could still wake."""
        return [engine for engine in self.report.engines if not engine.error]


def _decisive(said: SlotReport) -> tuple[object, ...]:
    """Of a report, what decisions or the role map start from."""
    place = (said.state, said.model, said.hard, said.node, said.ranks, said.engines, said.stage)
    trouble = (said.error, said.fenced, said.golden_failed)
    flex = (said.flex_hard, said.flex_model, said.flex_in_flight)
    return (*place, *trouble, *flex, said.in_flight, said.at_gate, said.gate_model, said.load)


@dataclass
class RouterRecord:
    need: NeedReport
    heard_s: float


@dataclass
class Since:
    """For how long something has been true without a break."""

    at: float | None = None

    def update(self, true: bool, now: float) -> float | None:
        """Seconds for which it has been true, None if it is not."""
        self.at = (self.at if self.at is not None else now) if true else None
        return None if self.at is None else now - self.at
