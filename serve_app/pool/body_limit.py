"""How large a request may be: beyond it 413, in the proxy, before the rest of it has been read.

    SERVE_APP_MAX_REQUEST_BYTES   of the body; 64 MiB unless set, which leaves room for images in base64

Serve's proxies read no configuration but their environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from serve_app.errors import ConfigError
from serve_app.pool.answering import answer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BYTES = "SERVE_APP_MAX_REQUEST_BYTES"
DEFAULT_BYTES = 64 << 20


def limit_from(environment: Mapping[str, str]) -> int:
    """The limit in bytes. Raises ConfigError where the variable is not a whole number above 0."""
    given = environment.get(MAX_BYTES, "")
    if not given:
        return DEFAULT_BYTES
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{MAX_BYTES}: a whole number of bytes above 0 is wanted, found {given!r}")
    return int(given)


class BodyLimit:
    """Pure ASGI middleware. Raises ConfigError when it is made with a wrong limit, so that the proxy does not start."""

    def __init__(self, app: ASGIApp, environment: Mapping[str, str] = os.environ) -> None:
        self.app, self._most = app, limit_from(environment)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _declared(scope) > self._most:
            await _too_large(send, self._most)
        else:
            counted = _Counted(receive, send, self._most)
            await self.app(scope, counted.receive, counted.send)


class _Counted:
    """One request whose length is known only once it has been read: sent in chunks, or longer than it said."""

    def __init__(self, receive: Receive, send: Send, most: int) -> None:
        self._receive, self._send, self._most = receive, send, most
        self._read, self._answered, self._refused = 0, False, False

    async def receive(self) -> Message:
        """What the application gets: beyond the limit it looks as if the client had gone."""
        message = await self._receive()
        self._read += len(message.get("body", b"")) if message["type"] == "http.request" else 0
        if self._read <= self._most:
            return message
        if not self._answered and not self._refused:
            self._refused = True
            await _too_large(self._send, self._most)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """After a refusal the application has nothing to say any more."""
        if not self._refused:
            self._answered = True
            await self._send(message)


def _declared(scope: Scope) -> int:
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(value) if value.isdigit() else 0


async def _too_large(send: Send, most: int) -> None:
    message = f"the request is larger than {most} bytes ({MAX_BYTES})"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "request_too_large"}
    await answer(send, 413, {"error": error}, [(b"connection", b"close")])
