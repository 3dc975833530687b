"""A raw ASGI client: unlike `httpx.ASGITransport` it sees each chunk when it is sent, and can hang up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from serve_app.engine.base import AsgiApp, Message


@dataclass
class Response:
    """What has come so far; `chunks` grows while the request runs."""

    status: int = 0
    chunks: list[bytes] = field(default_factory=list)
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def text(self) -> str:
        """The text of a streamed chat completion."""
        events = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: {")]
        return "".join(c["delta"].get("content") or "" for event in events for c in json.loads(event)["choices"])


async def request(app: AsgiApp, method: str, path: str, body: Any = None, response: Response | None = None) -> Response:
    """Send one request; pass `response` to watch it or hang up while it runs."""
    response = response or Response()
    payload = json.dumps(body).encode() if body is not None else b""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": payload, "more_body": False}
        await response.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
        elif message.get("body"):
            response.chunks.append(message["body"])

    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return response
