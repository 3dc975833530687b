"""How a router refuses a request: Serve's exception for that, with the body that OpenAI's clients understand."""

from __future__ import annotations

import json

from ray.serve.exceptions import BackPressureError

from serve_app.pool import answering


class PoolBackPressure(BackPressureError):
    """Becomes a 503, or 429, with `Retry-After` at the proxy; its message, OpenAI's error JSON, is the body."""

    def __init__(self, message: str, retry_after_s: float, status: int = 503) -> None:
        super().__init__(0, 0, status, retry_after_s)
        self.args = (message, retry_after_s, status)  # what pickling hands to __init__
        self._message = json.dumps(answering.error(status, message, "overloaded_error"))
