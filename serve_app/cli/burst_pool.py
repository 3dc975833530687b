"""What the pool does meanwhile: looks at the coordinators, and tells what has changed between two looks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.cli import cluster
from serve_app.errors import NotRunning
from serve_app.pool.lifecycle import State

# Short against a promotion, long against what a look costs the coordinator (below a millisecond).
LOOK_S = 0.05
# The ledger has a promotion when all routers have confirmed it, which they do several times a second.
LEDGER_S = 2.0
# As soon as requests are back, the need that the routers reported is stale for this long at most.
SETTLE_S = 0.3


@dataclass(frozen=True)
class Seen:
    """One look: every slot of every coordinator by its name, and how many requests are held."""

    slots: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: int = 0
    model: str = ""

    def count(self, state: State) -> int:
        return sum(1 for slot in self.slots.values() if slot["state"] == state and not slot["leaving"])


def look(app: str | None) -> Seen:
    """Look once. Raises NotRunning."""
    answers = [said.status for said in cluster.coordinators(app, ledger=False) if said.status is not None]
    if not answers:
        raise NotRunning("its coordinator does not answer")
    slots = {slot["slot"]: slot for status in answers for slot in status["slots"]}
    return Seen(slots, sum(status["held"] for status in answers), next(iter(answers[0]["models"])))


def ledger(app: str | None) -> list[dict[str, Any]]:
    """All transitions that the coordinators remember; none if nobody answers."""
    try:
        answers = cluster.coordinators(app)
    except NotRunning:
        return []
    return [entry for answer in answers for entry in (answer.status or {}).get("ledger", [])]


def changes(before: Seen, after: Seen) -> list[str]:
    """What happened between two looks, as sentences."""
    told: list[str] = []
    if after.held and not before.held:
        told.append(f"{after.held} requests are held: no active slot has room for them")
    for name, slot in sorted(after.slots.items()):
        old = before.slots.get(name)
        if old is None or old["state"] != slot["state"]:
            told.append(f"slot {name} {_becomes(State(old['state']) if old else State.STARTING, slot)}")
    told += [f"slot {name} is gone" for name in sorted(before.slots.keys() - after.slots.keys())]
    if before.held and not after.held:
        told.append("no request is held any more")
    return told


def _becomes(old: State, slot: dict[str, Any]) -> str:
    match slot["state"]:
        case State.STARTING:
            return "is being started: a new one, from scratch"
        case State.STANDBY:
            how = "has started" if old is State.STARTING else "sleeps again"
            return f"{how}: it is standby, ready for the next burst"
        case State.PROMOTING:
            return f"is woken: it was standby, tier {slot['tier']}"
        case State.ACTIVE:
            began = {State.DRAINING: "is wanted again:", State.STANDBY: "was woken:"}.get(old, "is active:")
            return f"{began} it takes requests from now on"
        case State.DRAINING:
            return "is no longer needed: it finishes its requests and takes no more"
        case State.PARKING:
            return "falls asleep"
        case State.FAILED:
            return f"has failed: {slot['error']}"
        case _:
            return f"is {slot['state']}"


def summary(seen: Seen) -> str:
    """The pool in words for somebody who has never seen one."""
    meaning = {State.ACTIVE: "active (take requests)", State.STANDBY: "standby (started, asleep, can wake at once)"}
    counts = Counter({state: seen.count(state) for state in State})
    shown = [state for state in State if counts[state] or state in meaning]
    order = sorted(shown, key=lambda state: (state is not State.ACTIVE, state is not State.STANDBY))
    return ", ".join(f"{counts[state]} {meaning.get(state, state)}" for state in order)


class Watcher:
    """Looks at the pool from a thread of its own and tells every change.

    Attributes:
        seen: the last look. first: the one before the burst.
        refilled_s: when there were as many standbys as before again, seconds since `start`; None if that is not so.
        short: there have been fewer standbys than before.
    """

    def __init__(self, app: str | None, tell: Callable[[str], None]) -> None:
        """Look once. Raises NotRunning if there is no pool to be seen."""
        self._app, self._tell = app, tell
        self.first = self.seen = look(app)
        self.refilled_s: float | None = None
        self.short = False
        self._before = {identity(entry) for entry in ledger(self._app)}
        self._began_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="burst-watcher", daemon=True)

    def start(self, began_s: float) -> None:
        """Begin; `began_s` is the burst's beginning on the monotonic clock."""
        self._began_s = began_s
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def wait_refilled(self, timeout_s: float) -> bool:
        """Wait until there are as many standbys as before; False if there are fewer after so many seconds."""
        deadline = time.monotonic() + timeout_s
        time.sleep(SETTLE_S)
        while self.short and self.refilled_s is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def promotions(self) -> list[dict[str, Any]]:
        """The ledger's entries of the promotions since the first look."""
        deadline = time.monotonic() + LEDGER_S
        while True:
            entries = [entry for entry in ledger(self._app) if identity(entry) not in self._before]
            found = [entry for entry in entries if entry["kind"] == "promotion"]
            whole = all(entry["error"] or _is_published(entry) for entry in found)
            if (whole and (found or not self.short)) or time.monotonic() >= deadline:
                return sorted(found, key=lambda entry: entry["start_s"])
            time.sleep(2 * LOOK_S)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                seen = look(self._app)
            except NotRunning:
                continue  # a coordinator that restarts; requests do not need it
            self.note(seen, time.monotonic() - self._began_s)

    def note(self, seen: Seen, at_s: float) -> None:
        """Take a look over that was taken at `at_s`."""
        for change in changes(self.seen, seen):
            self._tell(change)
        enough = seen.count(State.STANDBY) >= self.first.count(State.STANDBY)
        if not enough:
            self.short, self.refilled_s = True, None
        elif self.short and self.refilled_s is None:
            self.refilled_s = at_s
            self._tell("the pool is refilled: as many standbys as before the burst")
        self.seen = seen


def identity(entry: dict[str, Any]) -> tuple[str, str, float]:
    """What makes an entry of the ledger the same one at the next look."""
    return entry["slot"], entry["kind"], entry["start_s"]


def _is_published(entry: dict[str, Any]) -> bool:
    return any(record["stage"] == "promotion.publish" for record in entry["stages"])
