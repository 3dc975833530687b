"""A JSON answer over raw ASGI: for what is said before, or instead of, the engine's own server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any


def error(status: int, message: str, kind: str) -> dict[str, object]:
    """A body in OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "code": status}}


async def refuse(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]], status: int, message: str, kind: str
) -> None:
    """Answer with OpenAI's error shape."""
    await answer(send, status, error(status, message, kind))


async def answer(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    status: int,
    content: Mapping[str, object],
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Send a whole response; 429 and 503 come with `Retry-After`."""
    body = json.dumps(content).encode()
    usual = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (429, 503):
        usual.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": [*usual, *headers]})
    await send({"type": "http.response.body", "body": body})
