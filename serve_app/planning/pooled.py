"""A pool under its real coordinator's book, in virtual time.

`PoolBook` is stepped when something may have changed: a slot's state, a need, a load that crosses one of the bounds at
which decisions turn, a delay that has run out. In between, its steps would order nothing. Within `eager` windows it is
stepped as often as in production, for who wants to measure that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.config import Tier
from serve_app.planning.fleet import Fleet
from serve_app.planning.loop import Loop
from serve_app.planning.slots import Slot
from serve_app.planning.traffic import Router, Traffic
from serve_app.pool import decide
from serve_app.pool.book import OVERDUE_S, PoolBook
from serve_app.pool.capacity import Outlook
from serve_app.pool.holdings import Budget, ModelCost
from serve_app.pool.lifecycle import Event, State
from serve_app.pool.messages import RoleMap
from serve_app.pool.presence import SILENT_S
from serve_app.pool.view import QUIET_SHARE, View

# Rates of production: slot/link.py, pool/coordinator.py and pool/policy.py, which cannot be imported without Ray.
BEAT_S, TICK_S, ASK_S = 0.25, 0.1, 0.5
# A slot that retires fails its health check; Serve removes it then.
REAP_S = 2.0
# Serve notices a dead slot, and a coordinator that died is back, after this long (shared measurements: 1.1 to 2.9 s).
NOTICE_S, RESTART_S = 1.0, 2.0
SOON_S = 1e-3


@dataclass
class _Turn:
    """At which loads a model's decisions turn, and on which side of them its load was at the last step."""

    load: int
    spare_below: float
    full_from: float

    def side(self) -> tuple[bool, bool]:
        return self.load <= self.spare_below, self.load >= self.full_from


class Pooled:
    """The coordinator, the policy and Serve's part, around one `PoolBook`."""

    def __init__(
        self,
        loop: Loop,
        fleet: Fleet,
        traffic: Traffic,
        *,
        book_type: type[PoolBook] = PoolBook,
        costs: list[ModelCost] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.loop, self.fleet, self.traffic = loop, fleet, traffic
        self.setup, self.times = fleet.setup, fleet.setup.times
        self._book_type, self._costs, self._budget = book_type, costs, budget or Budget()
        self.epoch = 0
        self.book: PoolBook | None = None
        self.target = 0
        self.promotions = 0
        self._dirty: set[str] = set()
        self._poked_s = float("inf")
        self._told_s = float("-inf")
        self._asks: set[float] = set()
        self._turns: dict[str, tuple[_Turn, tuple[bool, bool]]] = {}
        self._quiet: set[str] = set()
        self._active: dict[str, str] = {}
        self._eager_until_s = 0.0
        self._all_new = False
        traffic.on_load, traffic.on_need = self._load_changed, self._need_changed

    def begin(self, slots: int) -> None:
        """A pool that has long been there: so many slots are standby, and those that must be active become so."""
        self._start_coordinator()
        self.target = slots
        for _ in range(slots):
            slot = self._add(0.0)
            slot.task_ends(self.loop.now)
        self._list()
        self.poke(0.0)
        self._ask_later()

    # The coordinator.

    def poke(self, after_s: float) -> None:
        """Step the book after so many seconds, if it is not stepped before."""
        when_s = self.loop.now + after_s
        if when_s < self._poked_s:
            self._poked_s = when_s
            self.loop.at(when_s, self._poked, when_s)

    def _poked(self, when_s: float) -> None:
        if when_s == self._poked_s:
            self._poked_s = float("inf")
            self.step()

    def step(self) -> None:
        """What has been said since, one step, and what follows from it."""
        book, now = self.book, self.loop.now
        if book is None:
            return
        self._say(book)
        for router in self.traffic.routers:
            book.on_need(router.need(now), now)
        self._step_book(book)
        if book.blind(now):
            self._say_all()
            self.poke(BEAT_S)
            return
        self._look(book.view())

    def _say(self, book: PoolBook) -> None:
        """What has changed; and now and then what has not, as who is silent beside others counts as cut off."""
        now = self.loop.now
        everybody = now - self._told_s > SILENT_S / 2
        self._told_s = now if everybody else self._told_s
        for name, slot in self.fleet.slots.items():
            if slot.alive and (everybody or name in self._dirty):
                book.on_report(slot.report(), now)
        self._dirty.clear()

    def _step_book(self, book: PoolBook) -> None:
        now, before = self.loop.now, book.role_map.version
        if book.step(now):
            self._deliver(book)
        if book.role_map.version != before:
            self.loop.at(now + self.times.publish_s, self._publish, book.role_map)

    def _deliver(self, book: PoolBook) -> None:
        now = self.loop.now
        wake_s = {tier: max(0.0, s - self.times.publish_s) for tier, s in self.times.promotion_s.items()}
        for slot in list(self.fleet.slots.values()):
            command = book.command_for(slot.name)
            if command is None:
                continue
            if slot.alive and slot.take(command, now, wake_s, self._sleep_s(slot)):
                self._changed(slot)
                self.promotions += slot.task is Event.PROMOTED
                self._schedule(slot)
                if slot.state is State.RETIRING:
                    self.loop.at(now + REAP_S, self._reap, slot)

    def _sleep_s(self, slot: Slot) -> float:
        """A `ready` engine stays awake."""
        return 0.0 if self.setup.live.model(slot.model).tier is Tier.READY else self.times.sleep_s or 0.0

    def _publish(self, role_map: RoleMap) -> None:
        for router in self.traffic.routers:
            router.apply(role_map)
        self.traffic.release()
        self.poke(SOON_S)

    def _look(self, view: View) -> None:
        """Note at which loads the next decisions turn, and when a quiet time will have been long enough."""
        self._active = {slot.slot: slot.model for slot in view.slots if slot.is_active}
        waits = False
        for model in view.models:
            active, name = view.active(model.model), model.model
            coming = len(view.coming(name))
            spare = (len(active) - 1) * view.soft * QUIET_SHARE if len(active) > model.min_active else -1.0
            full = view.soft * (len(active) + coming) if active else float("inf")
            turn = _Turn(sum(slot.in_flight for slot in active), spare, full)
            self._turns[name] = (turn, turn.side())
            waits = waits or bool(view.need(name))
            if not decide.is_quiet(view, self.setup.live, model):
                self._quiet.discard(name)
            elif name not in self._quiet:
                self._quiet.add(name)
                self.poke_at(self.loop.now + self.setup.live.slots.demote_after_s + SOON_S)
        if waits and len(view.models) > 1:  # who may take whose slot depends on how long it has stayed
            self.poke(TICK_S)

    def poke_at(self, when_s: float) -> None:
        """A step at that time whatever happens before."""
        self.loop.at(when_s, self.poke, 0.0)

    def _load_changed(self, slot: Slot, change: int) -> None:
        self._dirty.add(slot.name)
        if change < 0 and slot.shut_if_idle(self.loop.now, self._sleep_s(slot)):
            self._changed(slot)
            self._schedule(slot)
        name = self._active.get(slot.name)
        if name is None or name not in self._turns:
            return
        turn, side = self._turns[name]
        turn.load += change
        if turn.side() != side:
            self.poke(BEAT_S / 2)

    def _need_changed(self) -> None:
        self.poke(self.times.trigger_s)

    def _changed(self, slot: Slot) -> None:
        self._dirty.add(slot.name)
        self.fleet.note()
        self.poke(SOON_S)
        self._ask_later()

    def _schedule(self, slot: Slot) -> None:
        if slot.ends_s < float("inf"):
            self.loop.at(slot.ends_s, self._task_ends, slot, slot.ends_s)

    def _task_ends(self, slot: Slot, when_s: float) -> None:
        if not slot.alive or slot.ends_s != when_s:
            return
        started = slot.state is State.STARTING
        slot.task_ends(self.loop.now)
        self._changed(slot)
        if started:
            self._list()

    # The policy and Serve.

    def _ask_later(self) -> None:
        slots = self.setup.live.slots
        patience = [0.0, slots.refill_delay_s, slots.shrink_after_s or 0.0]
        for delay_s in sorted(set(patience)):
            beats = int((self.loop.now + delay_s) / ASK_S) + (2 if delay_s else 1)
            if beats not in self._asks:
                self._asks.add(beats)
                self.loop.at(beats * ASK_S, self._ask, beats)

    def _ask(self, beats: int) -> None:
        self._asks.discard(beats)
        book = self.book
        if book is None:
            return
        count, possible = len(self.fleet.slots), self.setup.existing
        book.outlook = Outlook(max(0, possible - count), possible)
        said, retire = book.target(self.target, self.loop.now)
        if retire is not None:
            self._deliver(book)
        if not said.blind and said.slots != self.target:
            self.target = said.slots
            self._ask_later()
        self._scale()

    def _scale(self) -> None:
        """What Serve does with a target: start what is missing, drop what has not started yet."""
        surplus = len(self.fleet.slots) - self.target
        unborn = [slot for slot in self.fleet.slots.values() if slot.state is State.STARTING]
        for slot in unborn[::-1][: max(0, surplus)]:
            self.fleet.remove(slot)
            self._forget(slot)
        for _ in range(-surplus):
            self._add(self.times.cold_start_s or 0.0)
            self.fleet.starts += 1
        if surplus < 0:
            self._ask_later()

    def _add(self, duration_s: float) -> Slot:
        models = tuple(self.setup.models)
        if self._costs is not None and self.book is not None:
            models = self.book.assign(f"s{self.fleet.made:05d}", self._costs, self._budget).models
        slot = self.fleet.add(models, duration_s)
        self._changed(slot)
        self._schedule(slot)
        return slot

    def _list(self) -> None:
        """Serve tells routers which slots run."""
        listed = [slot.name for slot in self.fleet.slots.values() if slot.state is not State.STARTING]
        for router in self.traffic.routers:
            router.hear_list(listed)
        self.traffic.release()
        self.poke(SOON_S)

    def _reap(self, slot: Slot) -> None:
        if slot.alive:
            self.fleet.remove(slot)
            self._forget(slot)
            self._list()

    def _forget(self, slot: Slot) -> None:
        """Ray no longer has its actor."""
        if self.book is not None:
            self.book.on_dead(slot.name)
        self.poke(SOON_S)
        self._ask_later()

    # Faults, and production's own pace.

    def kill(self, slot: Slot) -> None:
        """The slot's process dies; Serve and the coordinator find out as they do."""
        slot.alive = False
        self.traffic.slot_died(slot)
        self.loop.at(self.loop.now + OVERDUE_S + TICK_S, self._forget, slot)
        self.loop.at(self.loop.now + NOTICE_S, self._bury, slot)

    def _bury(self, slot: Slot) -> None:
        self.fleet.remove(slot)
        self._list()
        self._ask_later()

    def restart(self) -> None:
        """The coordinator dies with all it knew; another one begins anew."""
        self.book = None
        self.loop.at(self.loop.now + RESTART_S, self._restarted)

    def _restarted(self) -> None:
        self._start_coordinator()
        self._turns.clear()
        self._quiet.clear()
        self._say_all()
        self.poke(SOON_S)
        self._ask_later()

    def _start_coordinator(self) -> None:
        self.epoch += 1
        self.book = self._book_type(
            epoch=self.epoch,
            live=self.setup.live,
            models=self.setup.models,
            hard=self.setup.hard,
            born_s=self.loop.now,
            configured=True,
        )

    def _say_all(self) -> None:
        self._dirty |= {name for name, slot in self.fleet.slots.items() if slot.alive}

    def eager(self, seconds: float, *, all_new: bool = False) -> None:
        """For so long production's pace: every slot and router reports four times a second, and ticks come.

        Args:
            all_new: step after every report, as if each said something new.
        """
        now = self.loop.now
        self._all_new = all_new
        self._eager_until_s = now + seconds
        slots = list(self.fleet.slots.values())
        for index, slot in enumerate(slots):
            self.loop.at(now + BEAT_S * index / len(slots), self._beat, slot)
        for router in self.traffic.routers:
            self.loop.at(now, self._tell, router)
        self.loop.at(now, self._tick)

    def _beat(self, slot: Slot) -> None:
        if self.book is not None and slot.alive and slot.name in self.fleet.slots:
            self._dirty.discard(slot.name)
            if self.book.on_report(slot.report(), self.loop.now) or self._all_new:
                self._step_book(self.book)
        self._again(BEAT_S, self._beat, slot)

    def _tell(self, router: Router) -> None:
        if self.book is not None and self.book.on_need(router.need(self.loop.now), self.loop.now):
            self._step_book(self.book)
        self._again(BEAT_S, self._tell, router)

    def _tick(self) -> None:
        if self.book is not None:
            self.book.suspects(self.loop.now)
            self._step_book(self.book)
        self._again(TICK_S, self._tick)

    def _again(self, after_s: float, call: Callable[..., None], *args: Any) -> None:
        if self.loop.now + after_s < self._eager_until_s:
            self.loop.at(self.loop.now + after_s, call, *args)
