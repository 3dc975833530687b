"""The slot's state machine: every state, event and legal move stands in this file and nowhere else.

The slot itself is the only writer of its state. The coordinator sends commands and believes reports; it never holds a
second copy of the machine. An illegal event raises with the slot's history and changes nothing.
"""

from __future__ import annotations

import time
from enum import StrEnum

from serve_app.errors import IllegalTransition


class State(StrEnum):
    """What is physically true of a slot."""

    STARTING = "starting"
    """Its engine is being built; Serve does not route to it yet."""
    STANDBY = "standby"
    """Fully started, gate shut, engine as warm as its tier says."""
    PROMOTING = "promoting"
    """The engine is waking; gate shut."""
    ACTIVE = "active"
    """Engine awake and verified, gate open."""
    DRAINING = "draining"
    """Still serves what arrives late; routers have been told to send no more."""
    PARKING = "parking"
    """Gate shut with nothing in flight; engines are falling asleep (or changing their tiers)."""
    RETIRING = "retiring"
    """Told to leave; fails its health check so that Serve removes it."""
    FAILED = "failed"
    """Broken for good; fails its health check so that Serve replaces it."""


class Event(StrEnum):
    """What happens to a slot."""

    STARTED = "started"
    PROMOTE = "promote"
    PROMOTED = "promoted"
    GIVE_UP = "give_up"
    DRAIN = "drain"
    KEEP = "keep"
    SHUT = "shut"
    RETIER = "retier"
    ASLEEP = "asleep"
    RETIRE = "retire"
    FAIL = "fail"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.STARTING: {
        # warm-up served, golden check passed, first sleep paid
        Event.STARTED: State.STANDBY,
        Event.FAIL: State.FAILED,
    },
    State.STANDBY: {
        Event.PROMOTE: State.PROMOTING,
        # the tier setting changed: wake and sleep again at the new tier
        Event.RETIER: State.PARKING,
        Event.RETIRE: State.RETIRING,
        Event.FAIL: State.FAILED,
    },
    State.PROMOTING: {
        # engine awake in full, golden check passed
        Event.PROMOTED: State.ACTIVE,
        # too little memory to wake this model's engine, which is lost; the slot's others can still serve
        Event.GIVE_UP: State.PARKING,
        Event.FAIL: State.FAILED,
    },
    State.ACTIVE: {
        Event.DRAIN: State.DRAINING,
        Event.FAIL: State.FAILED,
    },
    State.DRAINING: {
        # wanted again, or the drain deadline passed: the demotion is given up, not the stream
        Event.KEEP: State.ACTIVE,
        # every leased router has seen the drain, and nothing is in flight: decided in one event-loop step
        Event.SHUT: State.PARKING,
        Event.FAIL: State.FAILED,
    },
    State.PARKING: {
        Event.ASLEEP: State.STANDBY,
        Event.FAIL: State.FAILED,
    },
    # irrevocable: Serve has been told
    State.RETIRING: {
        Event.FAIL: State.FAILED,
    },
    State.FAILED: {},
}

# A slot's gate lets requests through in these states only.
GATE_OPEN = frozenset({State.ACTIVE, State.DRAINING})

# History kept per slot; enough to tell a story in an error, bounded because slots live for weeks.
HISTORY_LENGTH = 32


class Lifecycle:
    """One slot's state, with the moves that led to it.

    Attributes:
        state: where the slot is now.
        since_s: when it got there, seconds since the Unix epoch.
    """

    def __init__(self, slot: str, now_s: float | None = None) -> None:
        self.slot = slot
        self.state = State.STARTING
        self.since_s = time.time() if now_s is None else now_s
        self._history: list[tuple[float, str]] = [(self.since_s, State.STARTING.value)]

    def apply(self, event: Event, now_s: float | None = None) -> State:
        """Move along `event`. Raises IllegalTransition, with nothing changed, where the table has no such move."""
        target = TRANSITIONS[self.state].get(event)
        if target is None:
            raise IllegalTransition(self.slot, self.state, event, self.history())
        self.state = target
        self.since_s = time.time() if now_s is None else now_s
        self._history = [*self._history[-HISTORY_LENGTH + 1 :], (self.since_s, f"{event}>{target}")]
        return target

    def allows(self, event: Event) -> bool:
        return event in TRANSITIONS[self.state]

    def history(self) -> str:
        """The moves so far, each with its seconds before the last one."""
        last = self._history[-1][0]
        return " ".join(f"{step}@{at - last:+.1f}s" for at, step in self._history)

    def __repr__(self) -> str:
        return f"<Lifecycle {self.slot} {self.state}>"
