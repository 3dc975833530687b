"""When a good answer's first bytes leave the proxy: the time to first token, as near to the client as we are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from serve_app.telemetry import metrics

if TYPE_CHECKING:
    from starlette.types import Message

    from serve_app.pool.proxy import Routed


class FirstBytes:
    """Sees one request's response go by; made when the request arrives."""

    def __init__(self, routed: Routed) -> None:
        self._routed, self._arrived_s = routed, time.monotonic()
        self._open = False

    def see(self, message: Message) -> None:
        """Observe the time, once, if one of our routers placed the request."""
        if message["type"] == "http.response.start":
            self._open = message["status"] < 400 and bool(self._routed.application)
        elif self._open and message.get("body"):
            self._open = False
            found = self._routed
            metrics.TTFT.observe(time.monotonic() - self._arrived_s, found.application, found.path, found.model)
