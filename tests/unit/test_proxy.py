"""What runs in every proxy around routing: health, the client's own deadline, and where a request went."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from serve_app.pool import proxy


class Router:
    """What `health` reads of a router."""

    def __init__(self, *, ready: bool, has_been_ready: bool, stages: dict[str, str] | None = None) -> None:
        self.ready, self.has_been_ready, self.stages = ready, has_been_ready, stages or {}


ACTIVE = Router(ready=True, has_been_ready=True)
WAKING = Router(ready=False, has_been_ready=False, stages={"b": "promoting: engine.wake.weights"})
ALL_ASLEEP = Router(ready=False, has_been_ready=True, stages={"b": "standby"})


@pytest.mark.parametrize(
    ("path", "known", "status"),
    [
        ("/health/live", [], 200),
        ("/health/live", [WAKING], 200),
        ("/health/ready", [WAKING], 503),
        ("/health/ready", [ALL_ASLEEP], 503),
        ("/health/ready", [ACTIVE], 200),
        ("/health/ready", [WAKING, ACTIVE], 200),
        ("/health/startup", [WAKING], 503),
        ("/health/startup", [ALL_ASLEEP], 200),
        ("/health/startup", [ACTIVE], 200),
    ],
)
def test_health_status_per_situation(
    monkeypatch: pytest.MonkeyPatch, path: str, known: list[Router], status: int
) -> None:
    """Live: the proxy answers. Ready: some slot is active. Startup: some slot has ever been."""
    monkeypatch.setattr(proxy, "routers", known)
    answer = proxy.health(path)
    assert answer is not None
    assert answer[0] == status


def test_health_not_ready_says_what_slots_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe's output tells an operator how far the slots are."""
    monkeypatch.setattr(proxy, "routers", [WAKING])
    answer = proxy.health("/health/ready")
    assert answer == (503, {"status": "no active slot", "slots": {"b": "promoting: engine.wake.weights"}})
    monkeypatch.setattr(proxy, "routers", [Router(ready=False, has_been_ready=False)])
    answer = proxy.health("/health/ready")
    assert answer == (503, {"status": "no active slot", "slots": "none known yet"})


@pytest.mark.parametrize("path", ["/", "/health", "/health/other", "/v1/models"])
def test_health_other_paths_are_routed(path: str) -> None:
    """Only the three health routes are answered in the proxy."""
    assert proxy.health(path) is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], math.inf),
        ([(b"x-request-timeout-s", b"2.5")], 2.5),
        ([(b"x-stainless-read-timeout", b"600")], 600),
        ([(b"x-stainless-read-timeout", b"600"), (b"x-request-timeout-s", b"3")], 3),
        ([(b"x-request-timeout-s", b"soon")], math.inf),
        ([(b"x-request-timeout-s", b"0")], math.inf),
        ([(b"x-request-timeout-s", b"-1")], math.inf),
        ([(b"x-request-timeout-s", b"nan")], math.inf),
        ([(b"x-request-timeout-s", b"\xff")], math.inf),
        ([(b"timeout", b"1")], math.inf),
    ],
)
def test_timeout_is_the_shortest_positive_number(headers: list[tuple[bytes, bytes]], seconds: float) -> None:
    """Clients may name a timeout in either header; what is no positive number is no timeout."""
    assert proxy._timeout(headers) == seconds


async def call(path: str, headers: list[tuple[bytes, bytes]]) -> tuple[list[Any], list[float]]:
    sent: list[Any] = []
    seen: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(proxy.client_timeout_s.get())

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    await proxy.PoolMiddleware(app)({"type": "http", "method": "GET", "path": path, "headers": headers}, receive, send)
    return sent, seen


@pytest.mark.asyncio
async def test_middleware_hands_the_timeout_to_the_router() -> None:
    """The client's timeout is in the request's own context while it is routed."""
    assert await call("/v1/models", [(b"x-request-timeout-s", b"2")]) == ([], [2.0])


@pytest.mark.asyncio
async def test_middleware_answers_health_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A health route never reaches the application; not ready comes with Retry-After."""
    monkeypatch.setattr(proxy, "routers", [WAKING])
    sent, seen = await call("/health/ready", [])
    assert seen == []
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    assert json.loads(sent[1]["body"])["status"] == "no active slot"


@pytest.mark.asyncio
async def test_middleware_without_a_pool_asks_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `pool: off` readiness is the engine server's own health, and no router may hold the question."""
    monkeypatch.setattr(proxy, "routers", [])
    sent, seen = await call("/health/ready", [])
    assert (sent, seen) == ([], [proxy.NOT_HELD_S])


@pytest.mark.asyncio
async def test_middleware_says_where_the_request_went() -> None:
    """What the router finds out in a copy of the request's context becomes headers; other messages pass unchanged."""
    start = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}
    body = {"type": "http.response.body", "body": b"z"}

    async def router() -> None:
        routed = proxy.routed.get()
        assert routed is not None
        routed.slot, routed.held_s = "aaaa", 0.21

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.create_task(router())
        await send(start)
        await send(body)

    assert await sent_by(app) == [
        start | {"headers": [(b"x", b"y"), (b"x-serve-app-slot", b"aaaa"), (b"x-serve-app-held-s", b"0.2100")]},
        body,
    ]


@pytest.mark.asyncio
async def test_middleware_adds_nothing_to_another_applications_answer() -> None:
    """A request that no router of ours has seen went to a slot of nobody's."""
    start = {"type": "http.response.start", "status": 200, "headers": []}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)

    assert await sent_by(app) == [start]


async def sent_by(app: Any) -> list[Any]:
    """What a client gets of `app` through the middleware."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    await proxy.PoolMiddleware(app)(
        {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}, receive, send
    )
    return sent


class Listed:
    """What is read of a router for the list of models."""

    def __init__(self, deployment: str, models: dict[str, tuple[str, ...]], has_replicas: bool = True) -> None:
        self.deployment, self.models, self.has_replicas = deployment, models, has_replicas
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


TWO = {"x": ("x",), "y": ("y", "y-lora")}


@pytest.mark.parametrize(
    ("known", "listed"),
    [
        ([Listed("a", TWO)], True),
        ([Listed("a", TWO), Listed("gone", TWO, has_replicas=False)], True),
        ([Listed("a", TWO), Listed("b", TWO)], False),  # whose? A slot of the right one answers
        ([Listed("a", {"x": ("x",)})], False),  # vLLM says more of it
        ([], False),
    ],
)
def test_models_are_listed_by_the_proxy_where_it_is_clear_whose(
    monkeypatch: pytest.MonkeyPatch, known: list[Listed], listed: bool
) -> None:
    """Wakes nobody; an application that has been deleted does not count, though its router is still there."""
    monkeypatch.setattr(proxy, "routers", known)
    answer = proxy._models({"method": "GET", "path": "/v1/models"})
    assert (answer is not None) is listed
    assert proxy._models({"method": "POST", "path": "/v1/models"}) is None


def test_an_application_that_is_deployed_anew_has_one_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve makes another one and does not say that the first one is done."""
    monkeypatch.setattr(proxy, "routers", [])
    old, other, new = Listed("a", TWO), Listed("b", TWO), Listed("a", TWO)
    for router in (old, other, new):
        proxy.add_router(router)  # type: ignore[arg-type]
    assert proxy.routers == [other, new]
    assert [known.stopped for known in (old, other, new)] == [True, False, False]
