"""Requests on their way through simulated routers and slots. The routing is `Dispatch` and `Roles` themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from serve_app.errors import Overloaded
from serve_app.planning.fleet import Fleet
from serve_app.planning.loop import Loop
from serve_app.planning.requests import Outcome, Request
from serve_app.planning.slots import InvariantBroken, Slot
from serve_app.pool.dispatch import Dispatch, Ticket
from serve_app.pool.messages import ModelNeed, NeedReport, RoleMap
from serve_app.pool.roles import Roles

# As pool/router.py, which cannot be imported without Ray: a held request looks for room again this often.
LOOK_AGAIN_S = 0.1
# The one coordinator's name, for `Roles`.
COORDINATOR = "coordinator"
# A request that its slots keep refusing: nobody may be asked for ever.
MOST_TRIES = 50


class Router:
    """What pool/router.py does around `Dispatch` and `Roles`."""

    def __init__(self, name: str, dispatch: Dispatch) -> None:
        self.name, self.dispatch = name, dispatch
        self.roles = Roles()
        self.listed: frozenset[str] = frozenset()
        self.died: set[str] = set()
        self.seq = 0
        self.held: dict[Ticket, Request] = {}
        self.looks = False

    def apply(self, role_map: RoleMap) -> None:
        if self.roles.update(COORDINATOR, role_map):
            self.dispatch.hold = role_map.hold
            self.dispatch.set_roles(self.roles.active())

    def hear_list(self, listed: Iterable[str]) -> None:
        self.listed = frozenset(listed)
        self.died &= self.listed
        self.dispatch.set_present(self.listed - self.died)

    def need(self, now: float) -> NeedReport:
        self.seq += 1
        needs = {model: ModelNeed(waiting, now - age_s) for model, (waiting, age_s) in self.dispatch.need(now).items()}
        return NeedReport(self.name, self.seq, needs, self.roles.seen(COORDINATOR), self.listed, frozenset(self.died))


class Traffic:
    """Moves requests; tells `on_load` of every slot whose load has changed, and `on_need` of every router's need."""

    def __init__(self, loop: Loop, fleet: Fleet, dispatch_type: type[Dispatch] = Dispatch) -> None:
        self.loop, self.fleet = loop, fleet
        hold = fleet.setup.live.hold
        self.routers = [Router(f"r{index}", dispatch_type(hold)) for index in range(fleet.setup.routers)]
        self.on_load: Callable[[Slot, int], None] = lambda slot, change: None
        self.on_need: Callable[[], None] = lambda: None
        self.lost = 0
        self._times = fleet.setup.times
        self._hold_s = hold.max_hold_s

    def arrive(self, request: Request) -> None:
        now = self.loop.now
        request.ticket = Ticket(now, now + self._hold_s, request.model)
        self._offer(self._router(request), request)

    def release(self) -> None:
        """Place what is held and has room now."""
        for router in self.routers:
            if router.held:
                self._release(router)

    def slot_died(self, slot: Slot) -> None:
        """Its requests are lost; routers find out when they send it the next one, or from Serve's list."""
        for request in sorted(slot.busy, key=lambda request: request.number):
            request.outcome = Outcome.LOST
            self.lost += 1
            self._router(request).dispatch.finished(slot.name)
        slot.busy.clear()
        slot.stream_event += 1
        if slot.engine:
            slot.engine.clear()

    def _router(self, request: Request) -> Router:
        return self.routers[request.number % len(self.routers)]

    def _offer(self, router: Router, request: Request) -> None:
        """Send a request off, or hold or refuse it; a slot that does not take it gives it back."""
        for _ in range(MOST_TRIES):
            ticket = request.ticket
            assert ticket is not None
            try:
                name = router.dispatch.offer(ticket, self.loop.now)
            except Overloaded:
                request.outcome = Outcome.REFUSED
                return
            if name is None:
                self._hold(router, request, ticket)
                return
            if self._enters(router, request, name):
                return
            request.ticket = replace(ticket, slot=None)
        raise InvariantBroken(f"request {request.number} was sent to and fro {MOST_TRIES} times")

    def _hold(self, router: Router, request: Request, ticket: Ticket) -> None:
        request.held = True
        router.held[ticket] = request
        self.loop.at(ticket.deadline_s, self._give_up, router, ticket)
        if len(self.routers) > 1 and not router.looks:
            router.looks = True
            self.loop.at(self.loop.now + LOOK_AGAIN_S, self._look_again, router)
        self.on_need()

    def _look_again(self, router: Router) -> None:
        """What other routers' requests leave is seen by looking."""
        router.looks = bool(router.held)
        if router.held:
            self._release(router)
            self.loop.at(self.loop.now + LOOK_AGAIN_S, self._look_again, router)

    def _release(self, router: Router) -> None:
        for ticket in router.dispatch.release(self.loop.now):
            request = router.held.pop(ticket)
            if not self._enters(router, request, ticket.slot or ""):
                request.ticket = replace(ticket, slot=None)
                self._offer(router, request)

    def _give_up(self, router: Router, ticket: Ticket) -> None:
        request = router.held.pop(ticket, None)
        if request is not None:
            router.dispatch.give_up(ticket)
            request.outcome = Outcome.REFUSED

    def _enters(self, router: Router, request: Request, name: str) -> bool:
        """Whether the slot took it."""
        slot, now, dispatch = self.fleet.slots.get(name), self.loop.now, router.dispatch
        if slot is None or not slot.alive:
            dispatch.finished(name)
            router.died |= {name} & router.listed
            dispatch.set_present(router.listed - router.died)
            self.on_need()
            return False
        if len(self.routers) > 1:
            full = len(slot.busy) >= slot.hard
            dispatch.observed(name, len(slot.busy) + (0 if full else 1), now)
            if full:
                dispatch.finished(name)
                return False
            dispatch.accepted(name)
        slot.enter(request)
        self.on_load(slot, 1)
        assert slot.engine is not None
        self.loop.at(slot.engine.prompt_ends(request, now), self._prompt_done, slot, request)
        return True

    def _prompt_done(self, slot: Slot, request: Request) -> None:
        if request.outcome is not Outcome.OPEN:
            return
        assert slot.engine is not None
        slot.engine.begin(request, self.loop.now)
        request.first_s = self.loop.now + self._times.first_token_s + slot.engine.step_s
        self._forecast(slot)

    def _forecast(self, slot: Slot) -> None:
        assert slot.engine is not None
        slot.stream_event += 1
        if slot.engine.streams:
            self.loop.at(slot.engine.next_end(), self._stream_ends, slot, slot.stream_event)

    def _stream_ends(self, slot: Slot, forecast: int) -> None:
        if forecast != slot.stream_event:
            return  # others began or ended since
        assert slot.engine is not None
        request = slot.engine.end(self.loop.now)
        request.outcome = Outcome.SERVED
        slot.busy.remove(request)
        router = self._router(request)
        router.dispatch.finished(slot.name)
        self._forecast(slot)
        self.on_load(slot, -1)
        if router.held:
            self._release(router)
