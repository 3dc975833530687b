"""What the pool does during a replay: how many slots are in which state, and when slots are promoted and started."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.cli import burst_pool, burst_view
from serve_app.cli.burst_pool import Seen
from serve_app.errors import NotRunning
from serve_app.pool.lifecycle import State
from serve_app.telemetry.stages import Stage

# A coordinator remembers 200 transitions; asked this often, none is forgotten before it has been seen.
LEDGER_EVERY_S = 5.0
KINDS = (Stage.PROMOTION, Stage.COLD_START)


@dataclass(frozen=True)
class Level:
    """How many slots are in each state from `at_s` on, in seconds since the replay began."""

    at_s: float
    slots: dict[str, int]


@dataclass(frozen=True)
class Event:
    """A promotion or a cold start, from its beginning to its end, in seconds since the replay began.

    Attributes:
        tier: how warm a promoted standby was; empty for a cold start.
    """

    kind: str
    slot: str
    at_s: float
    duration_s: float
    tier: str = ""
    reason: str = ""
    error: str = ""


@dataclass(frozen=True)
class PoolRecord:
    """What was seen of the pool, or why nothing was.

    Attributes:
        seen_s: from when to when it was looked at, since the replay began.
    """

    trouble: str = ""
    levels: Sequence[Level] = ()
    events: Sequence[Event] = ()
    seen_s: tuple[float, float] = (0.0, 0.0)

    def slot_seconds(self) -> dict[str, float]:
        """For how many seconds all slots together were in each state, over the whole replay."""
        return slot_seconds(self.levels, *self.seen_s)


def level(seen: Seen, at_s: float) -> Level:
    return Level(at_s, dict(Counter(str(slot["state"]) for slot in seen.slots.values())))


def slot_seconds(levels: Sequence[Level], begin_s: float, end_s: float) -> dict[str, float]:
    """Slots times seconds in each state between two moments; a level lasts until the next one."""
    sums: Counter[str] = Counter()
    ends = [*(following.at_s for following in levels[1:]), end_s]
    for current, until_s in zip(levels, ends, strict=False):
        lasted_s = min(until_s, end_s) - max(current.at_s, begin_s)
        if lasted_s > 0:
            sums.update({state: count * lasted_s for state, count in current.slots.items()})
    return {state: round(seconds, 3) for state, seconds in sums.items()}


def events(entries: Iterable[dict[str, Any]], begun_s: float) -> list[Event]:
    """The promotions and cold starts among a ledger's entries that ended after the replay had begun, in their order.

    Args:
        begun_s: wall clock at which the replay began.
    """
    told: dict[tuple[str, str], list[Event]] = {}
    for entry in sorted(entries, key=lambda entry: entry["start_s"]):
        if entry["kind"] in KINDS and entry["start_s"] + entry["duration_s"] > begun_s:
            _add(told.setdefault((entry["kind"], entry["slot"]), []), _event(entry, begun_s))
    return sorted((event for some in told.values() for event in some), key=lambda event: event.at_s)


def _add(told: list[Event], event: Event) -> None:
    """A promotion may have been seen before it was confirmed, and again as a whole: then the longer one counts."""
    if told and event.at_s < told[-1].at_s + told[-1].duration_s:
        told[-1] = max(told[-1], event, key=lambda either: either.duration_s)
    else:
        told.append(event)


def _event(entry: dict[str, Any], begun_s: float) -> Event:
    tier = burst_view.tier(entry) if entry["kind"] == Stage.PROMOTION else ""
    at_s, duration_s = entry["start_s"] - begun_s, entry["duration_s"]
    return Event(entry["kind"], entry["slot"], at_s, duration_s, tier, entry["reason"], entry["error"])


class Recorder:
    """Looks at the pool from a thread of its own until it is stopped.

    Attributes:
        now: the last look.
        usable: since when each slot has finished starting, in seconds since `start`; those of the first look: always.
    """

    def __init__(self, app: str | None) -> None:
        """Look once. Raises NotRunning if there is no pool to be seen."""
        self._app = app
        self.now = burst_pool.look(app)
        self.usable: dict[str, float] = {}
        self._levels: list[Level] = []
        self._entries: dict[tuple[str, str, float], dict[str, Any]] = {}
        self._began_s, self._began_wall_s = time.monotonic(), time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay-recorder", daemon=True)
        self._note(self.now, -math.inf)

    def start(self, began_s: float) -> None:
        """Begin; `began_s` is the replay's beginning on the monotonic clock."""
        self._began_s = began_s
        self._began_wall_s = time.time() - (time.monotonic() - began_s)
        self._levels[:] = [level(self.now, 0.0)]
        self._thread.start()

    def stop(self) -> PoolRecord:
        """End, and tell what was seen."""
        self._stop.set()
        self._thread.join()
        ended_s = time.monotonic() - self._began_s
        self._ask_ledger()
        told = events(self._entries.values(), self._began_wall_s)
        return PoolRecord("", tuple(self._levels), tuple(told), (0.0, ended_s))

    def _run(self) -> None:
        asked_s = time.monotonic()
        while not self._stop.wait(burst_pool.LOOK_S):
            try:
                self._note(burst_pool.look(self._app), max(0.0, time.monotonic() - self._began_s))
            except NotRunning:
                continue  # a coordinator that restarts; requests do not need it
            if time.monotonic() - asked_s > LEDGER_EVERY_S:
                asked_s = time.monotonic()
                self._ask_ledger()

    def _note(self, seen: Seen, at_s: float) -> None:
        for name, slot in seen.slots.items():
            if slot["state"] != State.STARTING:
                self.usable.setdefault(name, at_s)
        fresh = level(seen, at_s)
        if not self._levels or fresh.slots != self._levels[-1].slots:
            self._levels.append(fresh)
        self.now = seen

    def _ask_ledger(self) -> None:
        self._entries |= {burst_pool.identity(entry): entry for entry in burst_pool.ledger(self._app)}
