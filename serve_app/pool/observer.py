"""What the coordinator tells Prometheus, once a second; see `gauges` for what that is."""

from __future__ import annotations

import time

from serve_app.pool import gauges
from serve_app.pool.book import PoolBook
from serve_app.pool.records import Since
from serve_app.telemetry import metrics

PERIOD_S = 1.0


class Observer:
    """One per coordinator.

    Args:
        gpus: of one slot.
    """

    def __init__(self, application: str, gpus: float) -> None:
        self._application, self._gpus = application, gpus
        self._start_s = time.time()
        self._happened = gauges.Happened(application, self._start_s)
        self._pending: dict[str, Since] = {}
        self._last_s = 0.0

    def look(self, book: PoolBook, now: float) -> None:
        """Called often; `now` is the book's clock, in seconds."""
        if now - self._last_s < PERIOD_S:
            return
        self._last_s = now
        metrics.COORDINATOR_START.set(self._start_s, self._application)
        for metric, labels, value in gauges.samples(book, self._gpus, self._pending_s(book, now)):
            metric.set(value, self._application, *labels)
        self._happened.update(book, self._gpus, time.time())

    def slot_died(self) -> None:
        metrics.SLOT_DEATHS.add(1, self._application)

    def _pending_s(self, book: PoolBook, now: float) -> dict[str, float]:
        """For how long slots have had no place, by the reason of now."""
        trouble = str(book.outlook.shortage.trouble) if book.outlook.shortage else ""
        self._pending.setdefault(trouble, Since())
        return {reason: since.update(reason == trouble, now) or 0.0 for reason, since in self._pending.items()}
