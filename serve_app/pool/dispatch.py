"""Which active slot takes a request, who waits, and how much is needed: one plain object without Ray and without clock.

`PoolRouter` is a thin adapter around it. Every call names `now` in seconds (monotonic). Tickets of one model and
tenant are served first come, first served; tenants take turns, and models never wait for each other. A ticket that
Serve hands back (its slot turned out to be full) keeps its place.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serve_app.errors import Overloaded
from serve_app.live import Hold
from serve_app.pool.messages import Serving

# What another proxy has in flight on a slot is only heard in answers; older than this it is forgotten, because a slot
# believed full is asked nothing and would stay full in our eyes for ever.
OTHERS_TTL_S = 0.2
# How many more requests than the least loaded slot an affine slot may have.
AFFINITY_SLACK = 2


@dataclass(eq=False)
class Ticket:
    """One request that wants a slot.

    Attributes:
        model: id of the model it asks for; empty: whichever a slot serves (the pool has one model, or is off).
        arrived_s: orders the queue. deadline_s: beyond it the request is refused rather than held.
        session: empty, or requests with the same value prefer the same slot (prefix caches stay useful).
        tenant: who asks (one API key is one tenant); held requests of different tenants take turns.
        slot: where it was placed; None while it waits. evicted: it lost its place in the queue to another tenant.
    """

    arrived_s: float
    deadline_s: float
    model: str = ""
    session: str = ""
    tenant: str = ""
    slot: str | None = None
    evicted: bool = False


class Dispatch:
    """Places tickets on active slots and keeps those it cannot place."""

    def __init__(self, hold: Hold | None = None) -> None:
        self.hold = hold or Hold()
        self.retry_after_s = 5.0
        self._active: dict[str, Serving] = {}
        self._present: frozenset[str] = frozenset()
        self._mine: Counter[str] = Counter()
        self._others: dict[str, tuple[int, float]] = {}
        self._full: dict[str, float] = {}
        self._queues: dict[str, list[Ticket]] = {}
        self._turns: dict[str, int] = {}  # tenant -> when it had its last turn; only while somebody waits

    def set_roles(self, active: Mapping[str, Serving]) -> None:
        """The slots that may be routed to, each with its model and the requests it may be given at once."""
        self._active = dict(active)

    def set_present(self, slots: Iterable[str]) -> None:
        """The slots that Serve lists; a role without a replica behind it is not usable."""
        self._present = frozenset(slots)

    def offer(self, ticket: Ticket, now: float) -> str | None:
        """Place `ticket` now, or put it in the queue and return None.

        Raises:
            Overloaded: the queue is full, or the ticket's deadline has passed.
        """
        if now >= ticket.deadline_s:
            raise Overloaded("no active slot had room in time", self.retry_after_s)
        queue = self._queues.get(ticket.model, [])
        ahead = [other for other in queue if other.arrived_s <= ticket.arrived_s]
        slot = None if ahead else self._pick(ticket, now)
        if slot is not None:
            self._place(ticket, slot)
            return slot
        if len(queue) >= self.hold.max_held_requests and not _evict(queue, ticket.tenant):
            raise Overloaded(f"{len(queue)} requests are already held", self.retry_after_s)
        queue.insert(sum(1 for other in queue if other.arrived_s <= ticket.arrived_s), ticket)
        self._queues[ticket.model] = queue
        return None

    def release(self, now: float) -> list[Ticket]:
        """Place as many waiting tickets as there is room for; returns those placed.

        Of each model the tenants take turns, with their oldest ticket first.
        """
        placed: list[Ticket] = []
        for model in list(self._queues):
            placed += self._release(self._queues[model], now)
            if not self._queues[model]:
                del self._queues[model]
        if not self._queues:
            self._turns.clear()
        return placed

    def _release(self, queue: list[Ticket], now: float) -> list[Ticket]:
        placed: list[Ticket] = []
        while queue:
            ticket = min(queue, key=lambda ticket: self._turns.get(ticket.tenant, 0))  # the first of equals: the oldest
            slot = self._pick(ticket, now)
            if slot is None:
                break
            queue.remove(ticket)
            self._turns[ticket.tenant] = 1 + max(self._turns.values(), default=0)
            self._place(ticket, slot)
            placed.append(ticket)
        return placed

    def give_up(self, ticket: Ticket) -> None:
        """The caller has gone or was refused: the ticket leaves the queue, or its place on a slot."""
        queue = self._queues.get(ticket.model, [])
        if ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._queues[ticket.model]
        elif ticket.slot is not None:
            self.finished(ticket.slot)
        ticket.slot = None

    def finished(self, slot: str) -> None:
        """A request placed on `slot` has ended, however it ended."""
        if self._mine[slot] > 1:
            self._mine[slot] -= 1
        else:
            del self._mine[slot]

    def observed(self, slot: str, ongoing: int, now: float) -> None:
        """The slot said how many requests it has in all; what is not ours comes from other proxies."""
        self._others[slot] = (max(0, ongoing - self._mine[slot]), now)
        if ongoing >= self._hard(slot, math.inf):
            self._full[slot] = now

    def accepted(self, slot: str) -> None:
        """The slot has taken the request that it spoke about last; a full slot that has not, has refused it.

        A refused request is counted as ours until its end is heard, which would make room on the full slot again: it
        would be sent back and forth without ever waiting here, as need.
        """
        self._full.pop(slot, None)

    def need(self, now: float) -> dict[str, tuple[int, float]]:
        """By model: requests waiting, and how long the oldest has waited in seconds; only where some do."""
        return {model: (len(queue), max(0.0, now - queue[0].arrived_s)) for model, queue in self._queues.items()}

    def load(self, slot: str, now: float) -> float:
        """Requests in flight on `slot`, as far as this proxy knows."""
        others, heard = self._others.get(slot, (0, 0.0))
        known = self._mine[slot] + (others if now - heard < OTHERS_TTL_S else 0)
        refused = now - self._full.get(slot, -math.inf) < OTHERS_TTL_S
        return max(known, self._hard(slot, 0)) if refused else known

    @property
    def routable(self) -> list[str]:
        return sorted(slot for slot in self._active if slot in self._present)

    def serves(self, model: str) -> bool:
        """Whether some slot, with room or without, is active for a model."""
        return any(model in ("", self._active[slot].model) for slot in self.routable)

    def _hard(self, slot: str, unknown: float) -> float:
        return self._active[slot].hard if slot in self._active else unknown

    def _place(self, ticket: Ticket, slot: str) -> None:
        self._mine[slot] += 1
        ticket.slot = slot

    def _pick(self, ticket: Ticket, now: float) -> str | None:
        """The least loaded slot of its model with room, or the session's own one while that is not much busier."""
        serving = [slot for slot in self.routable if ticket.model in ("", self._active[slot].model)]
        loads = {slot: self.load(slot, now) for slot in serving}
        room = {slot: load for slot, load in loads.items() if load < self._active[slot].hard}
        if not room:
            return None
        least = min(room.values())
        if ticket.session:
            close = [slot for slot, load in room.items() if load <= least + AFFINITY_SLACK]
            return max(close, key=lambda slot: _score(ticket.session, slot))
        return min(room, key=lambda slot: (room[slot], slot))

    def __repr__(self) -> str:
        waiting = sum(len(queue) for queue in self._queues.values())
        return f"<Dispatch {len(self.routable)} routable, {self._mine.total()} in flight, {waiting} waiting>"


def _evict(queue: list[Ticket], tenant: str) -> bool:
    """Make room in a full queue for a tenant that has less than another one there: that one's newest ticket goes."""
    counts = Counter(ticket.tenant for ticket in queue)
    heaviest = max(counts, key=lambda name: counts[name], default=tenant)
    if counts[heaviest] <= counts[tenant] + 1:
        return False
    newest = [ticket for ticket in queue if ticket.tenant == heaviest][-1]
    newest.evicted = True
    queue.remove(newest)
    return True


def _score(session: str, slot: str) -> bytes:
    """Rendezvous hash: a session moves only when its own slot comes or goes (Thaler and Ravishankar, 1998)."""
    return hashlib.blake2b(f"{session}\0{slot}".encode(), digest_size=8).digest()
