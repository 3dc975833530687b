"""A request's body travels with it from the proxy to the slot, instead of being fetched from there.

Serve sends a slot the ASGI scope alone. The slot looks up the proxy's actor, calls it for the body, and calls it a
second time, which waits for the client to disconnect: half of what a request costs Serve in the slot and in the proxy
(docs/data_path.md), and the request waits for it. So the proxy puts a body that is not too large into the scope, and
the slot takes it from there. It does not need to hear of a disconnect: the proxy then cancels its call, and Serve the
request.

Serve has no interface for that; `accept` changes one private property of Ray 2.60 in the slot's process. Where that is
missing, or the proxy carries nothing, bodies are fetched as before: in the proxy they stay what `receive` gives.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from serve_app.pool import body_model

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

CARRIED = "serve_app.body"
# Scopes are pickled and sent in one message; what is larger is worth a call of its own.
MOST_BYTES = 1 << 20

Fetch = Callable[[Any], Awaitable[bytes]]


async def carry(scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
    """In the proxy: what stands for the request from here on."""
    if _length(scope) > MOST_BYTES:
        return scope, receive
    messages = await body_model.read(receive)
    if messages[-1]["type"] != "http.request":  # the client has gone
        return scope, body_model.replayed(messages, receive)
    body = b"".join(message.get("body", b"") for message in messages)
    # Another application behind this proxy knows nothing of the scope's entry.
    return {**scope, CARRIED: body}, body_model.replayed(messages, receive)


def _length(scope: Scope) -> float:
    """Of the body as declared, in bytes; infinite for one that is sent in chunks."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return float("inf")
    declared = headers.get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else float("inf")


def accept() -> None:
    """In the slot: have Serve take a carried body from the scope."""
    from ray.serve._private.common import StreamingHTTPRequest

    fetched = StreamingHTTPRequest.receive_asgi_messages
    if isinstance(fetched, property):
        StreamingHTTPRequest.receive_asgi_messages = property(_from_scope(fetched))


def _from_scope(fetched: property) -> Callable[[Any], Fetch]:
    def receive_asgi_messages(request: Any) -> Fetch:
        body: bytes | None = request.asgi_scope.pop(CARRIED, None)
        return fetched.__get__(request) if body is None else _Once(body)

    return receive_asgi_messages


class _Once:
    """In place of the call to the proxy: the body, and then nothing until Serve cancels who waits."""

    def __init__(self, body: bytes) -> None:
        self._left: bytes | None = pickle.dumps([{"type": "http.request", "body": body, "more_body": False}])

    async def __call__(self, _metadata: Any) -> bytes:
        left, self._left = self._left, None
        return left if left is not None else await asyncio.get_running_loop().create_future()
