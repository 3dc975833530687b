"""Requests' bodies through the real proxy: those that travel with the request, and those that a slot fetches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve
from starlette.requests import Request

from serve_app.pool.carried_body import MOST_BYTES

from .pool import MODEL, Pool

ALONE = {"slots": {"min": 1, "max": 1, "standby": 0}}


@pytest.fixture(scope="module")
def deployed(pool: Pool) -> Pool:
    pool.deploy(ALONE, {"token_s": 0.001, "first_token_s": 0.001})
    return pool


def request(padding: int = 0) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x" * padding, "max_tokens": 2}


@pytest.mark.parametrize("padding", [0, MOST_BYTES - 200, 2 * MOST_BYTES])
def test_bodies_of_any_size_arrive(deployed: Pool, padding: int) -> None:
    """Sent in one piece, or in chunks that say no length."""

    def chunks() -> Iterator[bytes]:
        body = json.dumps(request(padding)).encode()
        for begin in range(0, len(body), 100_000):
            yield body[begin : begin + 100_000]

    with httpx.Client(base_url=deployed.url, timeout=60) as http:
        whole = http.post("/v1/completions", json=request(padding))
        piecemeal = http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert (whole.status_code, piecemeal.status_code) == (200, 200)
    assert whole.json()["choices"] == piecemeal.json()["choices"]


def test_an_application_beside_the_pool_reads_its_bodies_as_ever(deployed: Pool) -> None:
    """All applications of a node share one proxy, and only our slots know what it puts into the scope."""

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Echo:
        async def __call__(self, request: Request) -> bytes:
            return await request.body()

    serve.run(Echo.bind(), name="echo", route_prefix="/echo")
    try:
        answer = httpx.post(f"{deployed.url}/echo", content=b"as it was", timeout=60)
    finally:
        serve.delete("echo")
    assert (answer.status_code, answer.content) == (200, b"as it was")


def test_a_client_that_hangs_up_ends_a_request_that_is_not_streamed(pool: Pool) -> None:
    """Nothing is sent to it until the end, so that only Serve's cancellation can tell the slot."""
    pool.deploy(ALONE, {"token_s": 0.05})

    async def hang_up() -> None:
        async with httpx.AsyncClient(base_url=pool.url, timeout=60) as http:
            call = asyncio.create_task(http.post("/v1/completions", json=request() | {"max_tokens": 5000}))
            await asyncio.to_thread(pool.wait, lambda status: in_flight(status) == 1, "it runs")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(hang_up())
    pool.wait(lambda status: in_flight(status) == 0, "it has ended")


def in_flight(status: dict[str, Any]) -> int:
    return sum(slot["in_flight"] for slot in status["slots"])
