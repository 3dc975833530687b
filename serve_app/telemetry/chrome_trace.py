"""The ledger's transitions in Chrome's trace event format, as Perfetto (ui.perfetto.dev) and chrome://tracing open it.

A slot is a process there; the slot itself and each of its worker ranks are its threads. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.telemetry.ledger import SLACK_S, Interval, Transition, intervals

SLACK_US = round(SLACK_S * 1e6)
# Perfetto knows threads by their number alone: no two may share one, and a process's first has the process's own.
THREADS = 10_000

Event = dict[str, Any]
Slices = list[tuple[int, int, Event]]


def dumps(transitions: Iterable[Transition]) -> str:
    """One JSON object. Times in microseconds since the Unix epoch."""
    by_slot: dict[tuple[str, str], list[Transition]] = {}
    for transition in sorted(transitions, key=lambda one: one["start_s"]):
        by_slot.setdefault((transition.get("application", ""), transition["slot"]), []).append(transition)
    events: list[Event] = []
    for number, ((application, slot), of_slot) in enumerate(by_slot.items(), start=1):
        pid = number * THREADS
        name = f"slot {slot}" + (f" ({application})" if application else "")
        events.append(_meta("process_name", pid, pid, name=name))
        events.append(_meta("process_sort_index", pid, pid, sort_index=pid))
        events += _threads(pid, of_slot)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _threads(pid: int, transitions: list[Transition]) -> list[Event]:
    """One thread a rank, and another one where stages overlap: a thread's slices have to lie within each other."""
    by_rank: dict[int, Slices] = {}
    for transition in transitions:
        end_s = transition["start_s"] + transition["duration_s"]
        whole = {name: transition[name] for name in ("slot", "model", "reason", "error")}
        by_rank.setdefault(-1, []).append(_slice(transition["kind"], transition["start_s"], end_s, whole))
        for one in intervals(transition):
            by_rank.setdefault(one.rank, []).append(_slice(one.name, one.start_s, one.end_s, _arguments(one)))
    events: list[Event] = []
    tid = pid
    for rank, slices in sorted(by_rank.items()):
        for number, lane in enumerate(_lanes(slices)):
            name = ("slot" if rank < 0 else f"rank {rank}") + (f" ({number + 1})" if number else "")
            events += [_meta("thread_name", pid, tid, name=name), _meta("thread_sort_index", pid, tid, sort_index=tid)]
            events += [event | {"pid": pid, "tid": tid} for event in lane]
            tid += 1
    return events


def _slice(name: str, start_s: float, end_s: float, arguments: Mapping[str, Any]) -> tuple[int, int, Event]:
    start_us, end_us = round(start_s * 1e6), round(end_s * 1e6)
    shown = {key: value for key, value in arguments.items() if value != ""}
    return start_us, end_us, {"ph": "X", "cat": "serve_app", "name": str(name), "args": shown}


def _arguments(one: Interval) -> dict[str, Any]:
    return dict(one.attributes) | {"error": one.error}


def _lanes(slices: Slices) -> list[list[Event]]:
    """Slices in as few lanes as it takes for each to lie within, or beside, the others of its lane.

    What overlaps by less than clocks are good for is clipped instead.
    """
    lanes: list[_Lane] = []
    for start_us, end_us, event in sorted(slices, key=lambda one: (one[0], -one[1])):
        lane = next((lane for lane in lanes if lane.fits(start_us, end_us)), None)
        if lane is None:
            lanes.append(lane := _Lane())
        lane.add(start_us, end_us, event)
    return [lane.events for lane in lanes]


class _Lane:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ends: list[int] = []  # of the slices around the current one
        self._free_us = 0

    def fits(self, start_us: int, end_us: int) -> bool:
        while self._ends and self._ends[-1] - SLACK_US <= start_us:
            self._free_us = max(self._free_us, self._ends.pop())
        return not self._ends or end_us <= self._ends[-1] + SLACK_US

    def add(self, start_us: int, end_us: int, event: Event) -> None:
        end_us = min(end_us, *self._ends) if self._ends else end_us
        start_us = min(max(start_us, self._free_us), end_us)
        self._ends.append(end_us)
        self.events.append(event | {"ts": start_us, "dur": end_us - start_us})


def _meta(kind: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}
