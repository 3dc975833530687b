"""A whole pool without Ray, for `test_interleavings.py`: nothing happens here unless a test says so.

Real: `PoolBook`, `Dispatch`, `Roles`, `Lifecycle`. Modelled: what a slot does with a command (slot/deployment.py), its
gate (slot/gate.py), the router's glue (pool/router.py), the coordinator's glue, Serve, and the messages between them.
Every message is a snapshot that is taken, and delivered, when the test wants: late, twice, overtaken, or never.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace

from serve_app.config import Tier
from serve_app.errors import IllegalTransition, Overloaded
from serve_app.live import Hold, LiveModel, LiveSettings, PromoteWhen, SlotCounts
from serve_app.pool.book import OWN_PART, PoolBook
from serve_app.pool.dispatch import Dispatch, Ticket
from serve_app.pool.lifecycle import GATE_OPEN, Event, Lifecycle, State
from serve_app.pool.messages import Command, EngineReport, ModelNeed, NeedReport, RoleMap, SlotReport, Verb
from serve_app.pool.roles import Roles
from serve_app.pool.takeover import ARRIVAL_S

HARD = 3
MAX_HELD = 6
DRAIN_S = 2.0
KEEP_S = 0.3
FOREVER_S = 10_000.0
SETTLED = (State.STANDBY, State.ACTIVE)
ADDS = (Verb.PROMOTE, Verb.KEEP, Verb.SHUT)
# Every slot holds both.
MODELS = {"m": ("m",), "n": ("n",)}


def live_settings(
    min_active: int = 0, demote_after_s: float = 0.5, soft: int = HARD, min_active_n: int = 0
) -> LiveSettings:
    return LiveSettings(
        slots=SlotCounts(min=1, max=5, standby=1, demote_after_s=demote_after_s, shrink_after_s=1, keep_model_s=KEEP_S),
        models={"m": LiveModel(min_active=min_active), "n": LiveModel(min_active=min_active_n)},
        promote_when=PromoteWhen(in_flight=soft),
        hold=Hold(max_held_requests=MAX_HELD, max_hold_s=FOREVER_S),
    )


@dataclass(eq=False)
class Request:
    """One request, wherever it is: held, travelling to a slot, at its gate, inside, or ended."""

    router: ModelRouter
    ticket: Ticket
    where: str = "held"


class ModelSlot:
    """What slot/deployment.py and slot/gate.py do, as steps that take no time; `slow` is the task that runs."""

    def __init__(self, name: str, coordinator: str, now: float) -> None:
        self.name, self.coordinator = name, coordinator
        self.life = Lifecycle(name, now)
        self.op = (0, 0)
        self.seq = 0
        self.model = "m"
        self.awake = True
        self.gate_open = False
        self.alive = True
        self.removed = False  # by Serve, gracefully: it ends when its requests have ended
        self.slow = "start"
        self.may_shut = False
        self.inside: list[Request] = []
        self.at_gate: list[Request] = []
        self.promotions = 0

    @property
    def ongoing(self) -> int:
        return len(self.inside) + len(self.at_gate)

    def take(self, command: Command, now: float) -> None:
        """As `Slot.take`."""
        order = (command.epoch, command.op)
        if order <= self.op:
            return
        with suppress(IllegalTransition):
            self._obey(command, now)
        self.op = order

    def _obey(self, command: Command, now: float) -> None:
        match command.verb:
            case Verb.PROMOTE:
                self.life.apply(Event.PROMOTE, now)
                self.model = command.model
                self.slow = "wake"
                self.promotions += 1
            case Verb.DRAIN:
                self.life.apply(Event.DRAIN, now)
                self.may_shut = False
            case Verb.KEEP:
                self.life.apply(Event.KEEP, now)
                self.may_shut = False
            case Verb.SHUT:
                self.may_shut = self.life.state is State.DRAINING
                self.shut_if_idle(now)
            case Verb.RETIER:
                self.life.apply(Event.RETIER, now)
                self._fall_asleep()
            case Verb.RETIRE:
                self.life.apply(Event.RETIRE, now)
                self._refuse_waiting()

    def slow_ends(self, now: float, *, well: bool = True) -> None:
        """The task that runs (start, wake or sleep) ends."""
        if not self.alive or not self.slow:
            return
        kind, self.slow = self.slow, ""
        if self.life.state is State.FAILED:
            return
        if not well:
            self.fail(now)
        elif kind == "start":
            self.awake = False
            self.life.apply(Event.STARTED, now)
        elif kind == "wake":
            self.awake = True
            self.life.apply(Event.PROMOTED, now)
            self.gate_open = True
        else:
            self.life.apply(Event.ASLEEP, now)

    def shut_if_idle(self, now: float) -> None:
        if self.may_shut and self.life.state is State.DRAINING and not self.inside:
            self.gate_open = self.may_shut = False
            self.life.apply(Event.SHUT, now)
            self._fall_asleep()

    def drain_deadline(self, now: float) -> None:
        if self.life.state is State.DRAINING and now - self.life.since_s >= DRAIN_S:
            self.life.apply(Event.KEEP, now)
            self.may_shut = False

    def arrive(self, request: Request) -> None:
        if self.lets_in(request):
            self._enter(request)
        elif self.life.state in (State.FAILED, State.RETIRING):
            end(request, "refused")
        else:
            request.where = "at gate"
            self.at_gate.append(request)

    def let_in(self) -> None:
        """One of those who wait gets its turn on the slot's event loop; the gate may have shut again by then."""
        first = next((request for request in self.at_gate if self.lets_in(request)), None)
        if first is not None:
            self.at_gate.remove(first)
            self._enter(first)

    def lets_in(self, request: Request) -> bool:
        return self.gate_open and request.ticket.model == self.model

    def fail(self, now: float) -> None:
        if self.life.allows(Event.FAIL):
            self.life.apply(Event.FAIL, now)
        self.gate_open = False
        self._refuse_waiting()

    def die(self) -> None:
        self.alive = False
        for request in [*self.inside, *self.at_gate]:
            end(request, "lost")
        self.inside, self.at_gate = [], []

    def report(self) -> SlotReport:
        self.seq += 1
        return SlotReport(
            slot=self.name,
            seq=self.seq,
            state=self.life.state,
            since_s=self.life.since_s,
            model=self.model,
            hard=HARD,
            op=self.op,
            in_flight=len(self.inside),
            at_gate=len(self.at_gate),
            gate_model=self.at_gate[0].ticket.model if self.at_gate else "",
            engines=tuple(EngineReport(model, self._tier(model)) for model in MODELS),
        )

    def _tier(self, model: str) -> Tier:
        return Tier.READY if self.awake and model == self.model else Tier.HOST

    def _enter(self, request: Request) -> None:
        request.where = "inside"
        self.inside.append(request)

    def _refuse_waiting(self) -> None:
        for request in self.at_gate:
            end(request, "refused")
        self.at_gate = []

    def _fall_asleep(self) -> None:
        assert not self.inside, f"{self.name} falls asleep with {len(self.inside)} requests inside"
        self.awake, self.slow = False, "sleep"


def end(request: Request, how: str) -> None:
    """The request has ended; its router hears of that (`on_request_completed`)."""
    placed, request.where = request.ticket.slot, how
    if placed is not None:
        request.router.dispatch.finished(placed)


class ModelRouter:
    """What pool/router.py does around `Dispatch` and `Roles`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dispatch = Dispatch(Hold(max_held_requests=MAX_HELD, max_hold_s=FOREVER_S))
        self.roles = Roles()
        self.listed: dict[str, str] = {}  # slot -> its coordinator
        self.died: set[str] = set()
        self.seq = 0
        self.requests: list[Request] = []

    def ask(self, now: float, model: str) -> None:
        self._offer(Request(self, Ticket(now, now + FOREVER_S, model)), now)

    def again(self, request: Request, now: float) -> None:
        """Serve hands a request back: same arrival, same deadline."""
        if request.ticket.slot is not None:
            self.dispatch.finished(request.ticket.slot)
        self.requests.remove(request)
        self._offer(Request(self, replace(request.ticket, slot=None)), now)

    def _offer(self, request: Request, now: float) -> None:
        self.requests.append(request)
        try:
            if self.dispatch.offer(request.ticket, now) is not None:
                request.where = "travelling"
        except Overloaded:
            request.where = "refused"

    def release(self, now: float) -> None:
        placed = self.dispatch.release(now)
        for request in self.requests:
            if request.ticket in placed:
                request.where = "travelling"

    def apply(self, now: float) -> None:
        newest = self.roles.newest()
        if newest is not None:
            self.dispatch.hold = newest.hold
        self.dispatch.set_roles(self.roles.active())
        self.dispatch.set_present(set(self.listed) - self.died)
        self.release(now)

    def hear_list(self, listed: dict[str, str], now: float) -> None:
        self.listed = dict(listed)
        self.died &= set(listed)
        if listed:
            self.roles.keep_only(set(listed.values()))
        self.apply(now)

    def needs(self, now: float) -> list[tuple[str, NeedReport]]:
        needs = {model: ModelNeed(waiting) for model, (waiting, _) in self.dispatch.need(now).items()}
        reachable = set(self.listed.values())
        asked = {model: self.roles.answerable(model, reachable) for model in needs}
        self.seq += 1
        return [
            (
                name,
                NeedReport(
                    router=self.name,
                    seq=self.seq,
                    needs={model: need for model, need in needs.items() if asked[model] in (name, None)},
                    seen=self.roles.seen(name),
                    slots=frozenset(self.listed),
                    died=frozenset(self.died),
                ),
            )
            for name in sorted(reachable)
        ]

    def where(self, place: str) -> list[Request]:
        return [request for request in self.requests if request.where == place]


@dataclass
class Wires:
    """Messages under way."""

    reports: list[tuple[str, SlotReport]] = field(default_factory=list)
    commands: list[tuple[str, Command]] = field(default_factory=list)
    maps: list[tuple[ModelRouter, str, RoleMap]] = field(default_factory=list)
    needs: list[tuple[str, NeedReport]] = field(default_factory=list)


class Cluster:
    """Coordinators, slots, routers, Serve and the wires between them."""

    def __init__(self, live: LiveSettings, slots: int, routers: int) -> None:
        self.live = live
        self.now = 0.0
        self.epoch = 0
        self.made = 0
        self.books: dict[str, PoolBook | None] = {}
        self.slots: dict[str, ModelSlot] = {}
        self.routers = [ModelRouter(f"r{i}") for i in range(routers)]
        self.wires = Wires()
        self.start_coordinator("old")
        for _ in range(slots):
            self.add_slot()
            self.settle_slow()
        for router in self.routers:
            router.hear_list(self.serve_list(), self.now)

    # Serve.

    def serve_list(self) -> dict[str, str]:
        """What Serve tells routers: slots that run and that it does not remove. It learns late of a death."""
        return {
            slot.name: slot.coordinator
            for slot in self.slots.values()
            if slot.life.state is not State.STARTING and not slot.removed
        }

    def add_slot(self) -> ModelSlot:
        name = f"s{self.made}"
        self.made += 1
        slot = self.slots[name] = ModelSlot(name, list(self.books)[-1], self.now)
        return slot

    def start_coordinator(self, name: str, *, configured: bool = True, back: bool = False) -> None:
        """`back`: the wall clock, of which its epoch is, has stepped back to before everybody else's."""
        self.epoch += 1
        epoch = (1000 - self.epoch if back else 1000 + self.epoch) * OWN_PART + self.epoch
        self.books[name] = PoolBook(
            epoch=epoch, live=self.live, models=MODELS, hard=HARD, born_s=self.now, configured=configured
        )

    def kill_coordinator(self, name: str) -> None:
        """What was on the way to it is lost; what it had sent is not."""
        self.books[name] = None
        self.wires.reports = [wire for wire in self.wires.reports if wire[0] != name]
        self.wires.needs = [wire for wire in self.wires.needs if wire[0] != name]

    def reap(self) -> None:
        """Serve ends slots that fail their health check and removed ones that are done; dead ones leave its list."""
        for slot in list(self.slots.values()):
            if slot.alive and (
                slot.life.state in (State.FAILED, State.RETIRING) or (slot.removed and not slot.ongoing)
            ):
                slot.die()
            if not slot.alive:
                del self.slots[slot.name]

    # Messages: first taken, later delivered.

    def send_report(self, slot: ModelSlot) -> None:
        if slot.alive and self.books.get(slot.coordinator) is not None:
            self.wires.reports.append((slot.coordinator, slot.report()))

    def send_command(self, slot: ModelSlot) -> None:
        book = self.books.get(slot.coordinator)
        command = book.command_for(slot.name) if book else None
        if slot.alive and command is not None:
            self.wires.commands.append((slot.name, command))

    def send_need(self, router: ModelRouter) -> None:
        self.wires.needs += [wire for wire in router.needs(self.now) if self.books.get(wire[0]) is not None]

    def send_maps(self, router: ModelRouter) -> None:
        for name in sorted(set(router.listed.values())):
            book = self.books.get(name)
            if book is not None and book.role_map.version != router.roles.seen(name):
                self.wires.maps.append((router, name, book.role_map))

    def deliver(self, kind: str, pick: int = 0) -> bool:
        """Deliver one of the messages of a kind, not necessarily the oldest; False if there is none."""
        wires = getattr(self.wires, kind)
        if not wires:
            return False
        getattr(self, f"_deliver_{kind}")(*wires.pop(pick % len(wires)))
        return True

    def _deliver_reports(self, name: str, report: SlotReport) -> None:
        self._on_book(name, lambda book: book.on_report(report, self.now))

    def _deliver_needs(self, name: str, need: NeedReport) -> None:
        self._on_book(name, lambda book: book.on_need(need, self.now))

    def _deliver_commands(self, name: str, command: Command) -> None:
        slot = self.slots.get(name)
        if slot is None or not slot.alive:
            return
        before = (slot.life.state, slot.may_shut, slot.slow, slot.op)
        stale = (command.epoch, command.op) <= slot.op
        slot.take(command, self.now)
        after = (slot.life.state, slot.may_shut, slot.slow, slot.op)
        assert not stale or before == after, f"{name}: the old command {command} changed {before} to {after}"

    def _deliver_maps(self, router: ModelRouter, name: str, role_map: RoleMap) -> None:
        if name in router.listed.values() and router.roles.update(name, role_map):
            router.apply(self.now)

    def _on_book(self, name: str, say: Callable[[PoolBook], bool]) -> None:
        """What says nothing new is not followed by a step, as in pool/coordinator.py."""
        book = self.books.get(name)
        if book is not None and say(book):
            self._step(book)

    def _step(self, book: PoolBook) -> None:
        """What the book keeps from one step to the next must be what it would find anew."""
        commands = book.step(self.now)
        if not book.configured:  # by settings that are not the user's nobody is sent away, but for another's requests
            taken = [c for c in commands if c.verb not in ADDS and not (c.verb is Verb.DRAIN and c.model)]
            assert not taken, f"without settings: {taken}"
        anew = copy(book)
        anew.slots = {name: replace(record, kept=None, _held=((), {}, False)) for name, record in book.slots.items()}
        anew._said, anew._ordered, anew._model_views = (), [], (None, ())
        kept, found = book.view(), anew.view()
        settled = [replace(slot, stayed_s=min(slot.stayed_s, max(KEEP_S, ARRIVAL_S))) for slot in kept.slots]
        assert settled == [replace(slot, stayed_s=min(slot.stayed_s, max(KEEP_S, ARRIVAL_S))) for slot in found.slots]
        assert replace(kept, slots=()) == replace(found, slots=())
        if not book.blind(self.now):
            anew._publish(found)
            assert anew.role_map == book.role_map
            assert [r.unrouted for r in anew.slots.values()] == [r.unrouted for r in book.slots.values()]

    # Requests.

    def requests(self, *places: str) -> list[Request]:
        return [request for router in self.routers for request in router.requests if request.where in places]

    def arrive(self, request: Request) -> None:
        router, name = request.router, request.ticket.slot
        assert name is not None
        slot = self.slots.get(name)
        if slot is None or not slot.alive:
            router.died |= {name} & set(router.listed)
            router.apply(self.now)
            router.again(request, self.now)
        elif slot.ongoing >= HARD:  # Serve's replica refuses, and says how much it has
            router.dispatch.observed(name, slot.ongoing, self.now)
            router.again(request, self.now)
        else:
            slot.arrive(request)
            router.dispatch.observed(name, slot.ongoing, self.now)
            router.dispatch.accepted(name)
        router.release(self.now)

    def finish(self, request: Request) -> None:
        name = request.ticket.slot
        assert name is not None
        slot = self.slots[name]
        slot.inside.remove(request)
        end(request, "served")
        slot.shut_if_idle(self.now)
        request.router.release(self.now)

    def give_up(self, request: Request) -> None:
        """The client of a held request goes away."""
        request.router.dispatch.give_up(request.ticket)
        request.where = "cancelled"
        request.router.release(self.now)

    # Time.

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for slot in self.slots.values():
            if slot.alive:
                slot.drain_deadline(self.now)
        for book in [book for book in self.books.values() if book is not None]:
            for name in book.suspects(self.now):
                if name not in self.slots or not self.slots[name].alive:
                    book.on_dead(name)
            self._step(book)
        for router in self.routers:
            router.release(self.now)

    def settle_slow(self) -> None:
        for slot in self.slots.values():
            slot.slow_ends(self.now)

    def flush(self) -> None:
        """Everybody says how it is, and everything under way arrives."""
        for slot in self.slots.values():
            self.send_report(slot)
        while self.deliver("reports"):
            pass
        for router in self.routers:
            self.send_maps(router)
        while self.deliver("maps"):
            pass
        for router in self.routers:
            self.send_need(router)
        while self.deliver("needs"):
            pass
        for slot in self.slots.values():
            self.send_command(slot)
        while self.deliver("commands"):
            pass

    def settle_round(self, seconds: float, *, finish: bool) -> None:
        self.reap()
        self.settle_slow()
        for router in self.routers:
            router.hear_list(self.serve_list(), self.now)
        self.flush()
        for _ in range(
            8
        ):  # a round trip takes milliseconds: all full slots refuse before the first refusal is old news
            for request in self.requests("travelling"):
                self.arrive(request)
        for router in self.routers:  # says so at once when it has to hold a request, also one that Serve handed back
            self.send_need(router)
        while self.deliver("needs"):
            pass
        for slot in self.slots.values():
            for _ in list(slot.at_gate):
                slot.let_in()
        if finish:
            for request in self.requests("inside"):
                self.finish(request)
        self.pass_time(seconds)

    def settle(self, *, finish: bool, rounds: int) -> None:
        for name, book in list(self.books.items()):
            if book is None:
                self.start_coordinator(name)
            else:
                book.configured = True
        for index in range(rounds):
            self.settle_round(1.1 if index % 8 == 7 else 0.21, finish=finish)

    # What must always be true.

    def check(self) -> None:
        for slot in self.slots.values():
            assert slot.awake or not slot.inside, f"{slot.name} sleeps with {len(slot.inside)} requests inside"
            assert all(request.ticket.model == slot.model for request in slot.inside), f"{slot.name}: wrong model"
            assert not slot.gate_open or slot.life.state in GATE_OPEN, f"{slot.name}: gate open while {slot.life.state}"
        for router in self.routers:
            held = router.where("held")
            for model in MODELS:
                waiting = router.dispatch.need(self.now).get(model, (0, 0.0))[0]
                assert waiting == sum(request.ticket.model == model for request in held) <= MAX_HELD
            placed = [r.ticket.slot for place in ("travelling", "at gate", "inside") for r in router.where(place)]
            for name in set(self.slots) | {slot for slot in placed if slot}:
                mine = router.dispatch._mine[name]
                assert mine == placed.count(name), f"{router.name} counts {mine} on {name}, truly {placed.count(name)}"
