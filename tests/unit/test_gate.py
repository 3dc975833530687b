"""The gate in front of an engine, as a raw ASGI application on one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.pool.body_model import MODEL_HEADER
from serve_app.slot.gate import Gate, is_public

PATH = "/v1/chat/completions"
ONE = {"m": ("m",)}
TWO = {"m": ("m", "m-lora"), "n": ("n",)}


class Engine:
    """An ASGI application that answers when it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.let_go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Client:
    """One request through the gate, as a task; what it was sent."""

    def __init__(self, gate: Gate, path: str = PATH) -> None:
        self.messages: list[Any] = []
        self.task = asyncio.create_task(gate({"type": "http", "path": path}, self._receive, self._send))

    async def _receive(self) -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.messages[1]["body"])["error"]
        return error


async def until(true: Callable[[], bool]) -> None:
    """Let other tasks run until something is true; a bounded number of steps, no clock."""
    for _ in range(100):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("did not become true")


def counts(gate: Gate) -> tuple[int, int]:
    return gate.in_flight, gate.at_gate


@pytest.mark.asyncio
async def test_gate_open_counts_requests_inside() -> None:
    """Requests inside are counted until they end; every change is told in the same step."""
    seen: list[tuple[int, int]] = []
    gate = Gate(lambda: seen.append(counts(gate)), ONE)
    engine = Engine()
    gate.open(engine, "m")
    clients = [Client(gate), Client(gate)]
    await until(lambda: engine.calls == 2)
    assert counts(gate) == (2, 0)
    assert repr(gate) == "<Gate open, 2 in flight, 0 waiting>"
    engine.let_go.set()
    await asyncio.gather(*(client.task for client in clients))
    assert [client.status for client in clients] == [200, 200]
    assert seen == [(1, 0), (2, 0), (1, 0), (0, 0)]


@pytest.mark.asyncio
async def test_gate_try_shut_with_requests_inside_stays_open() -> None:
    """The gate never shuts on somebody: False, and newcomers still get in."""
    gate, engine = Gate(lambda: None, ONE), Engine()
    gate.open(engine, "m")
    Client(gate)
    await until(lambda: gate.in_flight == 1)
    assert not gate.try_shut()
    assert gate.is_open
    Client(gate)
    await until(lambda: engine.calls == 2)
    engine.let_go.set()
    await until(lambda: gate.in_flight == 0)
    assert gate.try_shut()
    assert not gate.is_open


@pytest.mark.asyncio
async def test_gate_shut_from_on_change_leaves_nobody_inside() -> None:
    """Shutting in the step in which the last request ends is how a slot does it; a waiting newcomer stays outside."""
    gate, engine = Gate(lambda: changed(), ONE), Engine()
    shut: list[bool] = []

    def changed() -> None:
        if gate.is_open and gate.try_shut():
            shut.append(True)
            assert gate.in_flight == 0

    gate.open(engine, "m")
    client = Client(gate)
    await until(lambda: engine.calls == 1)
    engine.let_go.set()
    await client.task
    late = Client(gate)
    await until(lambda: gate.at_gate == 1)
    assert shut == [True]
    assert engine.calls == 1
    gate.open(engine, "m")  # the waiting one leaves the outside, which is a change with nothing in flight: shut again
    await until(lambda: len(shut) == 2)
    await until(lambda: counts(gate) == (0, 1))
    assert engine.calls == 1
    late.task.cancel()


@pytest.mark.asyncio
async def test_gate_late_arrival_waits_and_is_served_after_open() -> None:
    """What comes to a shut gate waits outside, counts as need, and is served once the engine is awake."""
    gate, engine = Gate(lambda: None, ONE), Engine()
    engine.let_go.set()
    client = Client(gate)
    await until(lambda: gate.at_gate == 1)
    assert counts(gate) == (0, 1)
    gate.open(engine, "m")
    await client.task
    assert (client.status, counts(gate)) == (200, (0, 0))


@pytest.mark.asyncio
async def test_gate_waiting_too_long_ends_in_503_with_openai_error() -> None:
    """Beyond max_wait_s: 503, Retry-After, OpenAI's error JSON, and the counts are as before."""
    gate = Gate(lambda: None, ONE)
    gate.max_wait_s = 0.0
    client = Client(gate)
    await client.task
    assert client.status == 503
    assert client.headers[b"retry-after"] == b"1"
    assert client.headers[b"content-type"] == b"application/json"
    assert int(client.headers[b"content-length"]) == len(client.messages[1]["body"])
    assert client.error == {"message": "this slot is asleep; try again", "type": "overloaded_error", "code": 503}
    assert counts(gate) == (0, 0)


@pytest.mark.asyncio
async def test_gate_broken_tells_those_who_wait_and_those_who_come() -> None:
    """A slot that failed for good answers 503 with the reason, at once, and never reaches the engine."""
    gate = Gate(lambda: None, ONE)
    waiting = Client(gate)
    await until(lambda: gate.at_gate == 1)
    gate.break_down("slot s failed")
    late = Client(gate)
    await asyncio.gather(waiting.task, late.task)
    assert [client.status for client in (waiting, late)] == [503, 503]
    assert late.error["message"] == "slot s failed"
    assert counts(gate) == (0, 0)


@pytest.mark.asyncio
async def test_gate_cancelled_while_waiting_leaves_counts_right() -> None:
    """A client that goes away outside is not counted any more, nor served later."""
    gate, engine = Gate(lambda: None, ONE), Engine()
    client = Client(gate)
    await until(lambda: gate.at_gate == 1)
    client.task.cancel()
    await until(client.task.done)
    assert counts(gate) == (0, 0)
    gate.open(engine, "m")
    await asyncio.sleep(0)
    assert engine.calls == 0


@pytest.mark.asyncio
async def test_gate_cancelled_inside_leaves_counts_right() -> None:
    """A client that goes away inside no longer keeps the slot from shutting."""
    gate, engine = Gate(lambda: None, ONE), Engine()
    gate.open(engine, "m")
    client = Client(gate)
    await until(lambda: gate.in_flight == 1)
    client.task.cancel()
    await until(client.task.done)
    assert counts(gate) == (0, 0)
    assert gate.try_shut()


@pytest.mark.asyncio
async def test_gate_engine_that_raises_leaves_counts_right() -> None:
    """An exception of the engine's application goes through and is counted out."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("boom")

    gate = Gate(lambda: None, ONE)
    gate.open(broken, "m")
    client = Client(gate)
    with pytest.raises(RuntimeError, match="boom"):
        await client.task
    assert counts(gate) == (0, 0)


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/server_info",
        "/abort_requests",
        "/metrics",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/",
        "",
    ],
)
@pytest.mark.asyncio
async def test_gate_admin_and_developer_routes_are_404(path: str) -> None:
    """What is not on the list of public routes answers 404 without waiting, also while the gate is shut."""
    gate = Gate(lambda: None, ONE)
    client = Client(gate, path)
    await client.task
    assert client.status == 404
    assert client.error["type"] == "not_found_error"
    assert b"retry-after" not in client.headers


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/messages", "/v2/rerank", "/tokenize", "/docs", "/health", "/score"]
)
def test_is_public_openai_and_pooling_routes(path: str) -> None:
    """The routes that clients use are public."""
    assert is_public(path)


@pytest.mark.parametrize("path", ["/tokenizer_info", "/tokenize_other", "/scores", "/v1", "/docsearch"])
def test_is_public_names_not_prefixes(path: str) -> None:
    """A route whose name only begins like a public one is not public."""
    assert not is_public(path)


@pytest.mark.asyncio
async def test_gate_lifespan_is_answered_before_there_is_an_engine() -> None:
    """Serve starts its ingress first: start-up and shutdown complete without the engine."""
    sent: list[str] = []
    coming = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Any:
        return {"type": next(coming)}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    answered: Awaitable[None] = Gate(lambda: None, ONE)({"type": "lifespan"}, receive, send)
    await answered
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.asyncio
async def test_gate_turns_a_websocket_away_in_its_own_protocol() -> None:
    """A WebSocket that may not or cannot be served is closed with a code; HTTP messages would break it."""
    gate = Gate(lambda: None, ONE)
    gate.break_down("gone")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for path in ("/sleep", "/v1/realtime"):
        await gate({"type": "websocket", "path": path}, Engine(), send)
    assert [(message["type"], message["code"]) for message in sent] == [
        ("websocket.close", 1008),
        ("websocket.close", 1013),
    ]


@pytest.mark.asyncio
async def test_gate_health_route_that_reaches_it_says_what_is_missing() -> None:
    """Where the proxies lack the callback, a probe's 404 names the variable to set."""
    client = Client(Gate(lambda: None, ONE), "/health/ready")
    await client.task
    assert client.status == 404
    assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in client.error["message"]


# Several models behind one gate.


class AsksFor(Client):
    """A request that was routed here for a model."""

    def __init__(self, gate: Gate, name: str, path: str = PATH) -> None:
        self.messages = []
        scope = {"type": "http", "path": path, "headers": [(MODEL_HEADER, name.encode())]}
        self.task = asyncio.create_task(gate(scope, self._receive, self._send))


@pytest.mark.asyncio
async def test_gate_lets_in_only_who_asks_for_the_model_that_serves() -> None:
    """Somebody who was routed here for another model waits until the slot serves that one again."""
    gate, m, n = Gate(lambda: None, TWO), Engine(), Engine()
    gate.open(n, "n")
    late, adapter, right, any_of_them = (AsksFor(gate, name) for name in ("m", "m-lora", "n", ""))
    await until(lambda: counts(gate) == (2, 2))
    assert (n.calls, gate.gate_model) == (2, "m")
    n.let_go.set()
    await until(lambda: gate.in_flight == 0)
    assert gate.try_shut()
    gate.open(m, "m")
    await until(lambda: m.calls == 2)
    m.let_go.set()
    await asyncio.gather(*(client.task for client in (late, adapter, right, any_of_them)))
    assert {client.status for client in (late, adapter, right, any_of_them)} == {200}


@pytest.mark.asyncio
async def test_gate_lists_all_models_whichever_serves() -> None:
    """The engine's own server knows only its own; none need be awake for this."""
    client = AsksFor(Gate(lambda: None, TWO), "", "/v1/models")
    await client.task
    assert [entry["id"] for entry in json.loads(client.messages[1]["body"])["data"]] == ["m", "m-lora", "n"]
