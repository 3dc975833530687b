"""Open-loop traffic against one application: a step or a piece of a trace, and what it cost in slots meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.application import Application
from serve_app.cli import replay_rows, replay_run
from serve_app.cli.replay_pool import Level, PoolRecord, Recorder, slot_seconds
from serve_app.cli.replay_rows import Row
from serve_app.cli.replay_run import Sent
from serve_app.percentile import percentile
from serve_app.pool.lifecycle import State
from serve_app.traces import TraceRequest

# What building the client may take, so that the first request is not late.
LEAD_S = 0.5
COUNT_EVERY_S = 1.0
# Between the base load and the step: its prefills are over, and everybody has counted it.
STEP_AFTER_S = 5.0
PROMPT_TOKENS = 32
REPLICAS = "replicas"


@dataclass(frozen=True)
class Traffic:
    """What came of it.

    Attributes:
        rows: one for each request. sent_s: wall clock at the beginning.
        pool: what was seen of the pool; nothing without one.
        slot_s: seconds of slots that existed, asleep or not: what is reserved. awake_slot_s: of those not asleep.
    """

    rows: Sequence[Row]
    sent_s: float
    pool: PoolRecord
    slot_s: float
    awake_slot_s: float

    @property
    def failures(self) -> int:
        """Requests that were not served in full."""
        return sum(1 for row in self.rows if row.outcome != "served")

    def as_dict(self, counted: Sequence[Row]) -> dict[str, Any]:
        """For the result file, with the times of the rows that count."""
        first_s = sorted(replay_rows.first_tokens(counted))
        return {
            "requests": len(self.rows),
            **replay_rows.outcomes(self.rows),
            "held": sum(1 for row in counted if row.path in (replay_rows.HELD, replay_rows.COLD)),
            **{f"p{percent}_s": percentile(first_s, percent) for percent in replay_rows.PERCENTS},
            "first_token_s": first_s,
            "slot_s": self.slot_s,
            "awake_slot_s": self.awake_slot_s,
            "late_p99_s": percentile([row.late_s for row in self.rows], 99),
            "errors": sorted({row.error for row in self.rows if row.error}),
        }


def step(model: str, base: int, more: int, tokens: int) -> list[TraceRequest]:
    """`base` streams at once, and some seconds later `more` of them, all of the same length in tokens."""
    begins = [0.0] * base + [STEP_AFTER_S] * more
    return [TraceRequest(at_s, PROMPT_TOKENS, tokens, model) for at_s in begins]


def send(application: Application, requests: Sequence[TraceRequest], *, pool: bool) -> Traffic:
    """Send everything when it is due, wait until all has ended, and look at the slots meanwhile."""
    application.replica_starts()  # connects to its Ray before anything is timed
    recorder = Recorder("default") if pool else None
    work, rows = replay_run.plan(requests), list[Row]()
    began_s, sent_s = time.monotonic() + LEAD_S, time.time() + LEAD_S
    counter = _Counter(application, began_s)
    if recorder is not None:
        recorder.start(began_s)

    def ended(sent: Sent) -> None:
        usable = recorder.usable if recorder else None
        rows.append(replay_rows.row(sent.index, sent.request, sent.sent_s or 0.0, sent.answer, usable))

    try:
        asyncio.run(replay_run.send_all(application.url, work, began_s, exact=True, ended=ended))
    finally:  # before anybody disconnects from Ray, to which their threads would connect again
        slot_s = counter.stop()
        seen = recorder.stop() if recorder else PoolRecord("no pool")
    asleep_s = seen.slot_seconds().get(State.STANDBY, 0.0)
    return Traffic(sorted(rows, key=lambda row: row.index), sent_s, seen, slot_s, slot_s - asleep_s)


class _Counter:
    """Counts the replicas that Serve has, from a thread of its own."""

    def __init__(self, application: Application, began_s: float) -> None:
        self._application, self._began_s = application, began_s
        self._levels = [self._level()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slot-counter", daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Seconds of all replicas together since the beginning."""
        self._stop.set()
        self._thread.join()
        return slot_seconds(self._levels, 0.0, time.monotonic() - self._began_s)[REPLICAS]

    def _run(self) -> None:
        while not self._stop.wait(COUNT_EVERY_S):
            with suppress(OSError, RuntimeError):  # the dashboard is busy: the next look will do
                self._levels.append(self._level())

    def _level(self) -> Level:
        return Level(time.monotonic() - self._began_s, {REPLICAS: len(self._application.replica_starts())})
