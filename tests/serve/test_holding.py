"""Requests that no slot can take yet: held within bounds, then told clearly when to come back."""

from __future__ import annotations

import asyncio
import time

import httpx
import openai
import pytest

from .pool import MODEL, Pool, served


def only_one_slot(**hold: float) -> dict[str, object]:
    """Live settings for a pool that cannot grow."""
    return {"slots": {"min": 1, "max": 1, "standby": 0}, "hold": hold}


@pytest.fixture
def one_slot(pool: Pool) -> Pool:
    pool.deploy(only_one_slot())
    pool.settled(active=1, standby=0)
    return pool


def test_requests_beyond_the_held_bound_get_503_with_retry_after(pool: Pool) -> None:
    """Of twelve requests, four run, three are held and five are refused in OpenAI's shape; none is lost."""
    pool.deploy(only_one_slot(max_held_requests=3))
    pool.settled(active=1, standby=0)
    answers = pool.burst(12, tokens=30)
    refused = [answer for answer in answers if answer.status == 503]
    assert len(served(answers, 30)) == 7
    assert len(refused) == 5
    assert all(int(answer.retry_after) >= 1 and '"overloaded_error"' in answer.body for answer in refused)


def test_openai_client_understands_the_refusal(one_slot: Pool) -> None:
    """The `openai` client raises its own typed error with status, message and body."""
    one_slot.deploy(only_one_slot(max_held_requests=0))

    async def run() -> openai.InternalServerError:
        async with httpx.AsyncClient(timeout=60) as http:
            running = [asyncio.create_task(one_slot.stream(http, 100)) for _ in range(4)]
            await asyncio.sleep(0.5)
            client = openai.AsyncOpenAI(base_url=f"{one_slot.url}/v1", api_key="none", max_retries=0)
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model=MODEL, messages=[])
            assert len(served(await asyncio.gather(*running), 100)) == 4
            return caught.value

    error = asyncio.run(run())
    assert error.status_code == 503
    assert isinstance(error.body, dict) and error.body["type"] == "overloaded_error"


def test_openai_client_retries_and_is_served(one_slot: Pool) -> None:
    """With its usual retries the client comes back after Retry-After and gets its answer."""
    one_slot.deploy(only_one_slot(max_held_requests=0))

    async def run() -> str | None:
        async with httpx.AsyncClient(timeout=60) as http:
            running = [asyncio.create_task(one_slot.stream(http, 60)) for _ in range(4)]
            await asyncio.sleep(0.3)
            client = openai.AsyncOpenAI(base_url=f"{one_slot.url}/v1", api_key="none", max_retries=3)
            answer = await client.chat.completions.create(model=MODEL, messages=[], max_tokens=2)
            await asyncio.gather(*running)
            return answer.choices[0].message.content

    assert asyncio.run(run()) == "token0 token1 "


@pytest.mark.parametrize("header", ["x-request-timeout-s", "x-stainless-read-timeout"])
def test_client_timeout_shorter_than_max_hold_goes_first(one_slot: Pool, header: str) -> None:
    """A request whose client waits one second is refused after about that, not after max_hold_s."""
    one_slot.deploy(only_one_slot(max_hold_s=60))

    async def run() -> float:
        async with httpx.AsyncClient(timeout=60) as http:
            running = [asyncio.create_task(one_slot.stream(http, 200)) for _ in range(4)]
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            refused = await one_slot.stream(http, 1, headers={header: "1"})
            waited = time.monotonic() - begin
            assert refused.status == 503 and refused.retry_after
            assert len(served(await asyncio.gather(*running), 200)) == 4
            return waited

    assert 0.9 <= asyncio.run(run()) < 60


def test_max_hold_ends_the_wait(one_slot: Pool) -> None:
    """Beyond max_hold_s a held request gets 503, and its place in the queue is free again."""
    one_slot.deploy(only_one_slot(max_hold_s=0.5, max_held_requests=1))

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            running = [asyncio.create_task(one_slot.stream(http, 120)) for _ in range(4)]
            await asyncio.sleep(0.3)
            for _ in range(2):
                refused = await one_slot.stream(http, 1)
                assert refused.status == 503 and "in time" in refused.body
            assert len(served(await asyncio.gather(*running), 120)) == 4

    asyncio.run(run())


def test_client_that_leaves_while_held_takes_its_need_along(one_slot: Pool) -> None:
    """A held request whose client disconnects is forgotten: nothing stays held, later requests are served."""
    one_slot.deploy(only_one_slot())

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            running = [asyncio.create_task(one_slot.stream(http, 100)) for _ in range(4)]
            await asyncio.sleep(0.3)
            leaving = [asyncio.create_task(one_slot.stream(http, 1)) for _ in range(3)]
            await asyncio.sleep(0.5)
            assert (await asyncio.to_thread(one_slot.status))["held"] == 3
            for task in leaving:
                task.cancel()
            await asyncio.to_thread(one_slot.wait, lambda status: status["held"] == 0, "nothing is held")
            assert len(served(await asyncio.gather(*running), 100)) == 4
            assert len(served([await one_slot.stream(http, 3)], 3)) == 1

    asyncio.run(run())


def test_health_is_answered_at_once_under_full_load(one_slot: Pool) -> None:
    """With the slot full and requests held, the health routes still answer, each from the proxy itself."""
    one_slot.deploy(only_one_slot())

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            running = [asyncio.create_task(one_slot.stream(http, 60)) for _ in range(12)]
            await asyncio.sleep(0.5)
            for route in ("live", "ready", "startup"):
                answer = await http.get(f"{one_slot.url}/health/{route}", timeout=5)
                assert answer.status_code == 200, answer.text
            assert not any(task.done() for task in running[8:])
            assert len(served(await asyncio.gather(*running), 60)) == 12

    asyncio.run(run())
