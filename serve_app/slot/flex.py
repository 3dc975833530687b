"""The side door of a standby: an engine that is awake anyway serves requests that may wait (`service_tier: flex`).

They come with a priority below everybody else's, so that vLLM lets others go first and takes their memory if it is
short. A promotion admits no more of them, and those inside go on; where the engine must fall asleep they are ended, and
told so. Everything here runs on the slot's event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from serve_app.engine.base import AsgiApp, Message, Receive, Send
from serve_app.pool import answering, body_model

# vLLM: lower comes first, and what says nothing has 0.
PRIORITY = 1
# As OpenAI's API says it for this tier.
STATUS, KIND = 429, "overloaded_error"


class FlexDoor:
    """An ASGI application for flex requests only.

    Args:
        most: requests inside at once. on_change: called in the same event-loop step whenever something changes.
    """

    def __init__(self, most: int, on_change: Callable[[], None]) -> None:
        self.most = most
        self.model = ""  # whose requests are admitted; empty: nobody's
        self._app: AsgiApp | None = None
        self._inside: set[asyncio.Future[None]] = set()
        self._ended: set[asyncio.Future[None]] = set()
        self._on_change = on_change

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    def open(self, app: AsgiApp, model: str) -> None:
        """Admit requests to `app`, the awake engine of `model`."""
        if self.most:
            self._app, self.model = app, model
            self._on_change()

    def shut(self) -> None:
        """Admit nobody; who is inside stays."""
        self._app, self.model = None, ""
        self._on_change()

    async def end(self) -> None:
        """Shut, end who is inside, and wait until all are gone."""
        self.shut()
        inside = list(self._inside)
        self._ended.update(inside)
        for request in inside:
            request.cancel()
        await asyncio.gather(*inside, return_exceptions=True)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._app is None or self.in_flight >= self.most:
            await _refuse(send)
            return
        sent = _Sent(send)
        request = asyncio.ensure_future(self._serve(self._app, scope, receive, sent))
        self._inside.add(request)
        self._on_change()
        try:
            await request
        except asyncio.CancelledError:
            if request not in self._ended:  # the client has gone
                raise
            await sent.cut_short()
        finally:
            self._inside.discard(request)
            self._ended.discard(request)
            self._on_change()

    async def _serve(self, app: AsgiApp, scope: Message, receive: Receive, send: Send) -> None:
        body, again = await _low_priority(receive)
        length = (b"content-length", str(len(body)).encode())
        headers = [length if name == b"content-length" else (name, value) for name, value in scope["headers"]]
        await app({**scope, "headers": headers}, again, send)


async def _refuse(send: Send) -> None:
    await answering.refuse(send, STATUS, f"{body_model.NO_STANDBY}; try again", KIND)


@dataclass
class _Sent:
    """`send`, and how far the answer has come."""

    send: Send
    begun: bool = False
    events: bool = False
    done: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self.begun, self.events = True, any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif message["type"] == "http.response.body":
            self.done = not message.get("more_body", False)
        await self.send(message)

    async def cut_short(self) -> None:
        """End the answer so that its client knows: with a status, or with an error as the stream's last event."""
        if self.done:
            return
        if not self.begun:
            await _refuse(self.send)
            return
        error = answering.error(STATUS, "the standby that served this flex request is needed; try again", KIND)
        event = f"data: {json.dumps(error)}\n\n".encode() if self.events else b""
        await self.send({"type": "http.response.body", "body": event, "more_body": False})


async def _low_priority(receive: Receive) -> tuple[bytes, Receive]:
    """The body with our priority in it, and what stands for `receive` from here on."""
    messages = await body_model.read(receive)
    body = b"".join(message.get("body", b"") for message in messages)
    try:
        parsed: Any = json.loads(body)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        body = json.dumps(cast("dict[str, Any]", parsed) | {"priority": PRIORITY}).encode()
    return body, body_model.replayed([{"type": "http.request", "body": body, "more_body": False}], receive)
