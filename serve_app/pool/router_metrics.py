"""What a router tells Prometheus: what it holds, whom it refused, how old its view of the roles is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from serve_app.errors import Overloaded
from serve_app.telemetry import metrics

PERIOD_S = 1.0
# Words of what `Dispatch` and the router refuse with, and what it is counted as.
_REASONS = {
    "in time": "deadline",
    "already held": "queue_full",
    "this API key": "fair_share",
    "service_tier flex": "flex",
    "only just heard": "starting",
}


class RouterMetrics:
    """One per router, on its event loop."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._heard_s: dict[str, float] = {}
        self._last_s = 0.0

    def heard(self, coordinator: str) -> None:
        """The coordinator has answered."""
        self._heard_s[coordinator] = time.monotonic()

    def look(self, need: Mapping[str, tuple[int, float]], models: Iterable[str], coordinators: Iterable[str]) -> None:
        """Called often; once a second it sets the gauges.

        Args:
            need: by model, requests held and how long the oldest has been, in seconds; see `Dispatch.need`.
            coordinators: those that are followed now.
        """
        now = time.monotonic()
        if now - self._last_s < PERIOD_S:
            return
        self._last_s = now
        for model in models:
            waiting, oldest_s = need.get(model, (0, 0.0))
            metrics.HELD_REQUESTS.set(waiting, self._application, model)
            metrics.HELD_OLDEST.set(oldest_s, self._application, model)
        self._heard_s = {name: self._heard_s.get(name, now) for name in coordinators}
        if self._heard_s:
            metrics.VIEW_AGE.set(now - min(self._heard_s.values()), self._application)

    def shed(self, refused: Overloaded, model: str) -> None:
        metrics.SHED.add(1, self._application, reason_class(refused.reason), model)


def reason_class(reason: str) -> str:
    """One of a few words: a reason in full would make a series of its own each time."""
    return next((kind for word, kind in _REASONS.items() if word in reason), "other")
