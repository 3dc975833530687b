"""The side door of a standby, as a raw ASGI application on one event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.config import parse_app
from serve_app.engine.base import Message, Receive, Send
from serve_app.errors import ConfigError
from serve_app.pool.body_model import FLEX_HEADER
from serve_app.slot.flex import FlexDoor
from serve_app.slot.gate import Gate

from .test_gate import until

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
BODY = {"model": "m", "service_tier": "flex", "priority": -5}


class Engine:
    """Begins an answer (`begin`) and ends it when it is told to; keeps what it was asked."""

    def __init__(self, begin: bool = True) -> None:
        self.asked: list[dict[str, Any]] = []
        self.lengths: list[bytes] = []
        self.let_go = asyncio.Event()
        self._begin = begin

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.asked.append(json.loads(body))
        self.lengths.append(dict(scope["headers"])[b"content-length"])
        assert self.lengths[-1] == str(len(body)).encode()
        if self._begin:
            await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await self.let_go.wait()
        if not self._begin:
            await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class Client:
    """One flex request, as a task; what it was sent."""

    def __init__(self, door: FlexDoor | Gate) -> None:
        self.sent: list[Any] = []
        body = json.dumps(BODY).encode()
        parts = [body[:10], body[10:]]
        messages = [{"type": "http.request", "body": part, "more_body": part is parts[0]} for part in parts]
        headers = [(b"content-length", str(len(body)).encode()), (FLEX_HEADER, b"1")]
        scope = {"type": "http", "path": "/v1/chat/completions", "headers": headers}

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            self.sent.append(message)

        self.task = asyncio.ensure_future(door(scope, receive, send))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent[1:]).decode()


async def test_it_admits_as_many_as_it_may_with_the_lowest_priority() -> None:
    """The next one is told to come back; a place that has become free is given again."""
    changes: list[int] = []
    door = FlexDoor(1, lambda: changes.append(door.in_flight))
    engine = Engine()
    door.open(engine, "m")
    first, second = Client(door), Client(door)
    await second.task
    assert second.status == 429 and dict(second.sent[0]["headers"])[b"retry-after"]
    await until(lambda: len(engine.asked) == 1)
    assert engine.asked == [{**BODY, "priority": 1}]
    engine.let_go.set()
    await first.task
    assert first.text.endswith("[DONE]\n\n") and door.in_flight == 0 and changes[-1] == 0
    third = Client(door)
    await third.task
    assert third.status == 200


async def test_shut_it_admits_nobody_and_who_is_inside_stays() -> None:
    door = FlexDoor(4, lambda: None)
    engine = Engine()
    door.open(engine, "m")
    inside = Client(door)
    await until(lambda: len(engine.asked) == 1)
    door.shut()
    late = Client(door)
    await late.task
    assert late.status == 429 and (door.model, door.in_flight) == ("", 1)
    engine.let_go.set()
    await inside.task
    assert inside.text.endswith("[DONE]\n\n")


@pytest.mark.parametrize("begun", [True, False])
async def test_whoever_is_ended_is_told_so(begun: bool) -> None:
    """With an error as the stream's last event, or with a status where nothing has been sent."""
    door = FlexDoor(4, lambda: None)
    engine = Engine(begun)
    door.open(engine, "m")
    client = Client(door)
    await until(lambda: len(engine.asked) == 1 and len(client.sent) == (2 if begun else 0))
    await door.end()
    await client.task
    assert door.in_flight == 0
    assert client.status == (200 if begun else 429)
    last = client.text.rpartition("data: ")[2] if begun else client.text
    assert json.loads(last)["error"]["code"] == 429
    assert not client.sent[-1].get("more_body")


async def test_a_client_that_goes_away_ends_its_request() -> None:
    door = FlexDoor(4, lambda: None)
    engine = Engine()
    door.open(engine, "m")
    client = Client(door)
    await until(lambda: len(client.sent) == 2)
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert door.in_flight == 0 and len(client.sent) == 2


async def test_flex_requests_keep_no_gate_open() -> None:
    """They count apart: they are no load that others would be kept away for, and none that a demotion waits for."""
    gate = Gate(lambda: None, {"m": ("m",)}, flex=2)
    engine = Engine()
    gate.flex.open(engine, "m")
    client = Client(gate)
    await until(lambda: len(engine.asked) == 1)
    assert (gate.in_flight, gate.flex.in_flight) == (0, 1) and gate.try_shut()
    engine.let_go.set()
    await client.task
    assert client.text.endswith("[DONE]\n\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"pool": False, "slot": {"flex_requests": 1}}, "slot.flex_requests is 1, but pool is off"),
        (
            {
                "slot": {"flex_requests": 8},
                "models": [{"id": "m", "engine": "simulated", "engine_kwargs": {"max_num_seqs": 8}}],
            },
            "models.m.engine_kwargs.max_num_seqs is 8",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_app(args)
