"""The coordinator's book: what slots and routers said, which commands are under way, which role map is published.

Plain state without Ray and without clock; `PoolCoordinator` owns one and is its only writer. It is soft: a new
coordinator starts with an empty book and learns everything from the reports that come in anyway.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from serve_app.engine.base import Fingerprint
from serve_app.errors import Refused
from serve_app.live import LiveSettings, Verify
from serve_app.pool import decide, eta, holdings, presence, publishing, takeover
from serve_app.pool.breaker import Breaker
from serve_app.pool.capacity import Outlook
from serve_app.pool.decide import Order
from serve_app.pool.entries import Entries
from serve_app.pool.evacuate import evacuate
from serve_app.pool.holdings import Budget, Holdings, ModelCost
from serve_app.pool.messages import (
    Command,
    NeedReport,
    PoolTarget,
    RoleMap,
    SlotReport,
    Verb,
    Welcome,
)
from serve_app.pool.meter import StandbyMeter
from serve_app.pool.peaks import Peaks
from serve_app.pool.records import RouterRecord, Since, SlotRecord
from serve_app.pool.view import ModelView, RouterView, SlotView, View
from serve_app.telemetry.stages import Stage

# A router that has not been heard for this long is gone; it reports several times a second.
ROUTER_LEASE_S = 2.0
# A slot that reports four times a second and has been silent for this long may be dead: ask Ray.
OVERDUE_S = 0.6
# A new coordinator orders and publishes nothing for this long, unless every slot has reported before.
GRACE_S = 2.0
# ... and this long while `Pool` has not handed over the live settings; then it adds capacity, and takes none away.
UNCONFIGURED_S = 10.0
# Of an epoch, which is a time in nanoseconds: the part that is as good as random.
OWN_PART = 1 << 20
# What a refill takes, as long as no cold start has been measured.
REFILL_S = 60.0


@dataclass
class PoolBook:
    """See the module. Times are `now` in seconds of one monotonic clock, given by the caller.

    Attributes:
        models: by id, what clients may call each; the first one is for requests that name none.
        assigned: what each slot was told to hold, until it says so itself.
        prepare: may complete a new command for a slot before it is sent; the coordinator adds the trace.
        asked: how many slots Serve wanted when the policy asked last. going: ids of the nodes that are being drained.
        entries: what slots have finished.
    """

    epoch: int
    live: LiveSettings
    models: Mapping[str, tuple[str, ...]]
    hard: int
    born_s: float
    configured: bool = False
    frozen: bool = False
    outlook: Outlook = field(default_factory=Outlook)
    asked: int = 0
    going: frozenset[str] = frozenset()
    slots: dict[str, SlotRecord] = field(default_factory=dict)
    routers: dict[str, RouterRecord] = field(default_factory=dict)
    assigned: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    meter: StandbyMeter = field(default_factory=StandbyMeter)
    anchors: dict[str, Fingerprint] = field(default_factory=dict)
    breaker: Breaker = field(default_factory=Breaker)
    prepare: Callable[[str, Command], Command] = lambda _, command: command
    entries: Entries = field(default_factory=Entries)
    role_map: RoleMap = field(default_factory=RoleMap)
    _op: int = 0
    _missed: bool = False
    _now: float = 0.0
    _peaks: Peaks = field(default_factory=Peaks)
    _quiet: defaultdict[str, Since] = field(default_factory=lambda: defaultdict(Since))
    _short: Since = field(default_factory=Since)
    _surplus: Since = field(default_factory=Since)
    _sighted: bool = False
    _said: tuple[object, ...] = ()
    _kept_for: tuple[object, ...] = ()
    _ordered: list[SlotRecord] = field(default_factory=list[SlotRecord])
    _model_views: tuple[LiveSettings | None, tuple[ModelView, ...]] = (None, ())

    # What is said to us.

    def on_report(self, report: SlotReport, now: float) -> bool:
        """Returns whether it says anything new; if not, the next tick is early enough for a step."""
        self._now = now
        record = self.slots.get(report.slot)
        new = record is None or bool(report.transitions)
        if record is None:
            record = self.slots[report.slot] = SlotRecord(report, now, entered_s=now)
            self._ordered = []
        elif report.seq < record.report.seq:
            return False  # overtaken on the way
        new = self._outdo(report.op[0]) or new
        new = record.heard(report, self.epoch, now) or new
        if report.engines:
            self.assigned.pop(report.slot, None)
        self.breaker.on_report(report, now)
        for transition in report.transitions:
            self.entries.add(report.slot, transition)
        return new

    def on_need(self, need: NeedReport, now: float) -> bool:
        """Returns whether it says anything new, as `on_report` does."""
        known = self.routers.get(need.router)
        if known is not None and need.seq < known.need.seq:
            return False
        self.routers[need.router] = RouterRecord(need, now)
        return self._outdo(need.seen[0]) or known is None or replace(known.need, seq=need.seq) != need

    def _outdo(self, epoch: int) -> bool:
        """Slots and routers follow the highest epoch they have seen. One of a coordinator before us is higher than ours
        if the wall clock has stepped back meanwhile; then what we have said counts only when it is said anew.
        """
        if epoch <= self.epoch:
            return False
        # Plus something of our own: two coordinators that outdo the same one, one after the other, must differ.
        self.epoch, self._said = epoch + 1 + self.epoch % OWN_PART, ()
        for record in self.slots.values():
            record.unpublished()
            if record.pending is not None:
                self._op += 1
                record.ordered(replace(record.pending, epoch=self.epoch, op=self._op))
        return True

    def on_dead(self, slot: str) -> bool:
        """Returns whether nobody had told it to go."""
        record = self.slots.pop(slot, None)
        self._ordered = []
        self.assigned.pop(slot, None)
        return record is not None and not record.was_told_to_go

    def suspects(self, now: float) -> list[str]:
        """Slots worth asking Ray about: silent for too long, or found dead by a router."""
        died = {slot for router in self.routers.values() for slot in router.need.died}
        return [name for name, record in self.slots.items() if name in died or now - record.heard_s > OVERDUE_S]

    def assign(self, slot: str, costs: Sequence[ModelCost], budget: Budget) -> Holdings:
        """Say which models a new slot holds. Raises NothingFits."""
        others = {
            name: tuple(engine.model for engine in record.report.engines if not engine.error)
            for name, record in self.slots.items()
            if not record.leaving
        } | self.assigned
        held = Counter(model for name, models in others.items() if name != slot for model in models)
        found = holdings.choose(costs, budget, held)
        self.assigned[slot] = found.models
        return found

    def welcome(self, model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        """What a new engine is compared with: the first fingerprint of a kind becomes the anchor of all later ones."""
        anchor = self.anchors.setdefault(kind, fingerprint)
        return Welcome(anchor, self.verify, self.live.verify_tolerance, self.live.model(model).tier)

    # What we say.

    def step(self, now: float) -> list[Command]:
        """Bring the book up to date, decide, publish; returns the commands that are new."""
        self._now = now
        self._forget_silent_routers(now)
        lists = [router.need.slots for router in self.routers.values() if router.need.slots]
        presence.notice_vanished(self.slots, lists, now)
        presence.notice_silent(self.slots.values())
        if self.blind(now):
            return []
        # First tell routers what has become true: a need they stated before that is stale and must not be answered.
        view = self.view()
        if self._publish(view):
            view = self.view()
        commands = [self._order(order) for order in evacuate(view)]
        if commands:
            view = self.view()
        self.meter.update(view.slots, now)
        self._peaks.update(sum(1 for slot in view.slots if slot.is_active or slot.is_coming), now)
        quiet_s = {
            model.model: seconds
            for model in view.models
            if (seconds := self._quiet[model.model].update(decide.is_quiet(view, self.live, model), now)) is not None
        }
        commands += [self._order(order) for order in decide.decide(view, self.live, quiet_s)]
        if commands:
            self._publish(self.view())
        return commands

    def target(self, current: int, now: float) -> tuple[PoolTarget, Command | None]:
        """How many slots there should be, for the autoscaling policy; and a standby to retire first, if any."""
        self.asked, self._now = current, now
        self._missed = self._missed or self._is_missing
        if self.blind(now) or not self.configured:
            return PoolTarget(current, blind=True), None
        view = self.view()
        wanted = decide.wanted_slots(view, self.live)
        short_s = self._short.update(wanted > current, now)
        surplus_s = self._surplus.update(wanted < current, now)
        if self.frozen:
            return PoolTarget(current, blind=False), None
        target, order = decide.next_target(view, self.live, current, short_s, surplus_s)
        return PoolTarget(target, blind=False), self._order(order) if order else None

    def take_missing(self) -> bool:
        """Whether Serve wanted more slots than had said a word, now or at any time since the last call."""
        missing, self._missed = self._missed or self._is_missing, False
        return missing

    @property
    def _is_missing(self) -> bool:
        return self.asked > sum(1 for record in self.slots.values() if not record.leaving)

    def command_for(self, slot: str) -> Command | None:
        record = self.slots.get(slot)
        return record.pending if record else None

    def is_needed(self, slot: str) -> bool:
        """Whether a slot is active or has been told to become so."""
        view = self.slot_view(slot)
        return view is not None and (view.is_coming or view.is_active)

    def operate(self, verb: Verb, slot: str, model: str, now: float, reason: str = "operator") -> str:
        """An operator's own order; returns what was done. Raises Refused, with nothing changed, where it cannot be.

        Args:
            model: which one to promote the slot for; empty: the one it has served last.
        """
        self._now = now
        record = self.slots.get(slot)
        if record is None:
            raise Refused(f"no slot {slot}; there are: {', '.join(sorted(self.slots)) or 'none'}")
        view = record.view(now)
        model = (model or view.model or next(iter(view.holds), "")) if verb is Verb.PROMOTE else ""
        legal = {Verb.PROMOTE: view.is_standby, Verb.DRAIN: view.is_active and view.pending is None}
        if self.blind(now):
            raise Refused(f"slot {slot} is {view.state}: the coordinator has just started, try again in a few seconds")
        if not legal.get(verb, False):
            pending = f" and told to {view.pending}" if view.pending else ""
            raise Refused(f"slot {slot} is {view.state}{pending}: cannot {verb}")
        if verb is Verb.PROMOTE and model not in view.holds:
            raise Refused(f"slot {slot} does not hold {model}, only {', '.join(view.holds) or 'nothing'}")
        self._order(Order(verb, slot, reason, model))
        self._publish(self.view())
        return f"{verb} {slot}" + (f" for {model}" if model and len(self.models) > 1 else "")

    def blind(self, now: float) -> bool:
        """Just started, and not every slot that the routers know has reported. Once sighted, always sighted."""
        if not self._sighted:
            # A slot that a router lists and that has not reported may be active.
            expected = frozenset[str]().union(*(router.need.slots for router in self.routers.values()))
            age_s = now - self.born_s
            complete = bool(expected) and expected <= set(self.slots)
            self._sighted = (self.configured and (complete or age_s >= GRACE_S)) or age_s >= UNCONFIGURED_S
        return not self._sighted

    def view(self) -> View:
        settled_s = max(self.live.slots.keep_model_s, takeover.ARRIVAL_S)
        soft = self.live.promote_when.in_flight
        return View(
            slots=tuple(r.kept or r.view(self._now, self.going, settled_s) for r in self._records(settled_s)),
            models=self._all_models(),
            routers=tuple(self._router_view(router.need) for router in self.routers.values()),
            version=self.role_map.version,
            soft=soft if soft is not None else max(1, int(self.hard * 0.8)),
            standby=self._standby(),
            frozen=self.frozen,
            room=self.outlook.room_beside(self.asked),
            possible=self.outlook.possible,
            configured=self.configured,
        )

    def _records(self, settled_s: float) -> list[SlotRecord]:
        """By name; none keeps what was seen under other circumstances."""
        if len(self._ordered) != len(self.slots):
            self._ordered = [record for _, record in sorted(self.slots.items())]
        circumstances = (self.going, settled_s)
        if circumstances != self._kept_for:
            self._kept_for = circumstances
            for record in self._ordered:
                record.kept = None
        return self._ordered

    def _standby(self) -> int:
        """How many to keep: as set, or as many as could have been needed before a new slot had replaced one."""
        if self.live.slots.standby != "auto":
            return self.live.slots.standby
        return max(1, self._peaks.largest_rise(self.entries.typical_s.get(Stage.COLD_START, REFILL_S)))

    def slot_view(self, slot: str) -> SlotView | None:
        """One slot as decisions see it; None if it is not known."""
        return self.slots[slot].view(self._now) if slot in self.slots else None

    def held(self) -> dict[str, int]:
        """Requests that routers hold, by model; only where there are some."""
        waiting: Counter[str] = Counter()
        for router in self.routers.values():
            waiting.update(self._router_view(router.need).waiting)
        return dict(+waiting)

    def _all_models(self) -> tuple[ModelView, ...]:
        if self._model_views[0] is not self.live:
            lives = ((model, self.live.model(model)) for model in self.models)
            views = tuple(ModelView(model, live.min_active, live.tier, live.weight) for model, live in lives)
            self._model_views = (self.live, views)
        return self._model_views[1]

    def _router_view(self, need: NeedReport) -> RouterView:
        """A router that does not know the models yet reports what clients call them."""
        waiting: Counter[str] = Counter()
        if not need.needs:
            return RouterView(waiting, need.seen)
        ids = {name: model for model, names in self.models.items() for name in names}
        for name, held in need.needs.items():
            waiting[ids.get(name, name)] += held.waiting
        return RouterView(waiting, need.seen)

    @property
    def golden_failed(self) -> int:
        """How many failed the golden check lately that have no hardware in common."""
        return self.breaker.count(self._now)

    @property
    def breaker_open(self) -> bool:
        return self.golden_failed >= self.live.breaker_failures

    @property
    def verify(self) -> Verify:
        enforced = self.live.verify is Verify.ENFORCE
        return Verify.WARN if enforced and self.breaker_open else self.live.verify

    def _order(self, order: Order) -> Command:
        self._op += 1
        deadlines = self.live.deadlines
        command = Command(
            epoch=self.epoch,
            op=self._op,
            verb=order.verb,
            model=order.model,
            tiers={model: self.live.model(model).tier for model in self.models},
            verify=self.verify,
            tolerance=self.live.verify_tolerance,
            wake_s=deadlines.wake_s,
            verify_s=deadlines.verify_s,
            sleep_s=deadlines.sleep_s,
            drain_s=deadlines.drain_s,
            reason=order.reason,
        )
        command = self.prepare(order.slot, command)
        self.slots[order.slot].ordered(command)
        return command

    def _publish(self, view: View) -> bool:
        """Publish the role map if it says something new, and note for each slot since when it is not routed to.

        Returns whether anything may be different from `view` now.
        """
        retry_s = eta.retry_after_s(view.under_way, self.entries.typical_s)
        said = (self.live, retry_s, *(self.slots[slot.slot].said for slot in view.slots))
        if said == self._said:
            return False
        self._said = said
        fresh = publishing.role_map(self.role_map, view, self.slots, self.models, self.live.hold, retry_s)
        epoch, n = self.role_map.version
        if fresh != self.role_map or epoch != self.epoch:
            self.role_map = replace(fresh, version=(self.epoch, n + 1 if epoch == self.epoch else 1))
        for name, record in self.slots.items():
            routed = name in self.role_map.active
            record.set_unrouted(None if routed else record.unrouted or self.role_map.version)
        return True

    def _forget_silent_routers(self, now: float) -> None:
        for name in [name for name, router in self.routers.items() if now - router.heard_s > ROUTER_LEASE_S]:
            del self.routers[name]

    def __repr__(self) -> str:
        states = ", ".join(f"{name} {record.report.state}" for name, record in sorted(self.slots.items()))
        return f"<PoolBook v{self.role_map.version[1]} [{states}] {len(self.routers)} routers>"
