"""One held request: how it is woken, and its span, which links to the promotion it waited for."""

from __future__ import annotations

import asyncio
import time

from serve_app.pool import proxy
from serve_app.telemetry import spans
from serve_app.telemetry.stages import REQUEST_HOLD


class Held:
    """Made in the request's own context, so that its span belongs to the client's trace.

    Attributes:
        woken: set once there is something for it to do, most often to go to the slot where it was placed.

    Args:
        arrived_s: when the request arrived, on the monotonic clock. model: which one it is for.
    """

    def __init__(self, arrived_s: float, model: str) -> None:
        self.woken = asyncio.Event()
        start_s = time.time() - max(0.0, time.monotonic() - arrived_s)
        self._span = spans.open_span(
            REQUEST_HOLD,
            {"gen_ai.request.model": model},
            parent=proxy.client_trace.get(),
            start_s=start_s,
            request=True,
        )

    @property
    def trace(self) -> str:
        return self._span.traceparent

    def end(self, slot: str, promotion: str, error: str = "") -> None:
        """The request goes to `slot`, promoted in the trace `promotion`; or it was refused."""
        if promotion:
            self._span.link(promotion)
        self._span.end({"slot": slot} if slot else None, error)
