"""A busy standby: awake anyway, it serves requests of `service_tier: flex`, and is there for others when needed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from .pool import MODEL, Answer, Pool, served

READY = {"slots": {"min": 2, "max": 2, "demote_after_s": 1}, "models": {MODEL: {"tier": "ready"}}}
LONG = 150  # tokens, 20 ms each


@dataclass
class Flex:
    """What a flex client got: status, the slot that answered, tokens, and an error as the stream's last event."""

    status: int
    slot: str
    tokens: int
    error: dict[str, Any] | None
    retry_after: str


async def flex(client: httpx.AsyncClient, pool: Pool, tokens: int) -> Flex:
    body = {"model": MODEL, "messages": [], "max_tokens": tokens, "stream": True, "service_tier": "flex"}
    async with client.stream("POST", f"{pool.url}/v1/chat/completions", json=body) as response:
        lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    errors = [event["error"] for event in events if "error" in event]
    slot = response.headers.get("x-serve-app-slot", "")
    retry_after = response.headers.get("retry-after", "")
    return Flex(response.status_code, slot, len(events) - len(errors), errors[0] if errors else None, retry_after)


async def patient(client: httpx.AsyncClient, pool: Pool, tokens: int) -> Flex:
    """Try again as its users do: a pool that has just settled tells its routers a moment later who may be busy."""
    answer = await flex(client, pool, tokens)
    for _ in range(50):
        if answer.status != 429:
            break
        await asyncio.sleep(0.1)
        answer = await flex(client, pool, tokens)
    return answer


async def begun(client: httpx.AsyncClient, pool: Pool, count: int, tokens: int) -> list[asyncio.Task[Flex]]:
    """Flex requests that a standby serves by now."""
    tasks = [asyncio.create_task(patient(client, pool, tokens)) for _ in range(count)]
    await asyncio.to_thread(
        pool.wait, lambda status: sum(slot["flex_in_flight"] for slot in status["slots"]) == count, "flex runs"
    )
    return tasks


@pytest.fixture
def busy(pool: Pool) -> Pool:
    pool.deploy(READY, slot={"flex_requests": 2})
    pool.settled(active=1, standby=1)
    return pool


def test_a_standby_serves_them_up_to_its_bound_and_stays_standby(busy: Pool) -> None:
    """Nobody is promoted for them; the third one gets OpenAI's 429, which its client understands."""
    [standby] = busy.slots("standby")
    before = len(busy.promotions())

    async def run() -> list[Flex]:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = await begun(client, busy, 2, LONG)
            third = await flex(client, busy, 5)
            assert (third.status, third.slot) == (429, "") and int(third.retry_after) >= 1
            asked = openai.AsyncOpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=0)
            with pytest.raises(openai.RateLimitError, match="service_tier flex"):
                await asked.chat.completions.create(model=MODEL, messages=[], service_tier="flex")
            return list(await asyncio.gather(*tasks))

    answers = asyncio.run(run())
    assert [(answer.status, answer.slot, answer.tokens) for answer in answers] == [(200, standby["slot"], LONG)] * 2
    assert len(busy.promotions()) == before and busy.slots("standby")[0]["slot"] == standby["slot"]


def test_a_promotion_needs_no_wake_and_takes_nothing_from_anybody(busy: Pool) -> None:
    """The burst gets all of both slots, the flex requests inside go on, and no new ones are admitted."""
    [standby] = busy.slots("standby")

    async def run() -> tuple[list[Flex], list[Any]]:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = await begun(client, busy, 2, LONG)
            burst = asyncio.create_task(busy.burst_async(8, 60))
            await asyncio.to_thread(
                busy.wait,
                lambda status: (
                    [(slot["in_flight"], slot["flex_in_flight"]) for slot in status["slots"]]
                    in ([(4, 0), (4, 2)], [(4, 2), (4, 0)])
                ),
                "both slots are full, one of them with flex requests beside",
            )
            assert (await flex(client, busy, 5)).status == 429
            return list(await asyncio.gather(*tasks)), await burst

    answers, burst = asyncio.run(run())
    assert [(answer.slot, answer.tokens, answer.error) for answer in answers] == [(standby["slot"], LONG, None)] * 2
    assert len(served(burst, 60)) == 8
    [promotion] = [entry for entry in busy.promotions() if entry["slot"] == standby["slot"]][-1:]
    assert not {"engine.wake.weights", "engine.sleep"} & {stage["stage"] for stage in promotion["stages"]}


def test_a_demotion_neither_waits_for_them_nor_ends_them(busy: Pool) -> None:
    """Its engine stays awake, so the slot is standby again while they go on."""
    [standby] = busy.slots("standby")

    def is_back(status: dict[str, Any]) -> bool:
        [slot] = [slot for slot in status["slots"] if slot["slot"] == standby["slot"]]
        return (slot["state"], slot["flex_in_flight"]) == ("standby", 1)

    async def run() -> Flex:
        async with httpx.AsyncClient(timeout=60) as client:
            [task] = await begun(client, busy, 1, 750)
            assert len(served(await busy.burst_async(8, 30), 30)) == 8
            assert standby["slot"] in {entry["slot"] for entry in busy.promotions()}
            await asyncio.to_thread(busy.wait, is_back, "it is standby again, with the flex request inside", 12)
            return await task

    answer = asyncio.run(run())
    assert (answer.slot, answer.tokens, answer.error) == (standby["slot"], 750, None)


def test_a_slot_is_taken_over_by_another_model_though_they_are_inside(pool: Pool) -> None:
    """It has been promoted with them inside; they are told to come back, and nobody waits for them."""
    slots = {"min": 1, "max": 1, "standby": 1, "demote_after_s": 0.3, "keep_model_s": 0.3}
    live = {"slots": slots, "models": {MODEL: {"tier": "ready", "min_active": 0}}}
    pool.deploy(live, slot={"flex_requests": 2}, ids=[MODEL, "other"])

    async def run() -> tuple[Answer, Answer, Flex]:
        async with httpx.AsyncClient(timeout=60) as client:
            [task] = await begun(client, pool, 1, 2500)
            first = asyncio.create_task(pool.stream(client, 100))
            await asyncio.to_thread(pool.wait, lambda status: pool.slots("active"), "it is promoted")
            other = await pool.stream(client, 5, {"x-request-timeout-s": "20"}, "other")
            return await first, other, await task

    first, other, cut = asyncio.run(run())
    assert (first.status, first.done) == (200, True)
    assert (other.status, other.model, other.done) == (200, "other", True)
    assert cut.error is not None and cut.error["code"] == 429 and cut.tokens < 2500


def test_where_its_engine_must_sleep_they_are_told_so(busy: Pool) -> None:
    """A stream ends with an error event, not just somewhere; after that the standby takes none."""

    async def run() -> list[Flex]:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = await begun(client, busy, 1, 3000)
            asleep = {**READY, "models": {MODEL: {"tier": "host"}}}
            await asyncio.to_thread(busy.deploy, asleep, slot={"flex_requests": 2})
            return list(await asyncio.gather(*tasks)) + [await flex(client, busy, 5)]

    cut, late = asyncio.run(run())
    assert cut.status == 200 and 0 < cut.tokens < 3000
    assert cut.error is not None and cut.error["code"] == 429
    assert late.status == 429


def test_without_the_setting_they_are_requests_like_others(pool: Pool) -> None:
    """As vLLM does, which knows no tiers."""
    pool.deploy(READY)
    pool.settled(active=1, standby=1)
    [active] = pool.slots("active")

    async def run() -> Flex:
        async with httpx.AsyncClient(timeout=60) as client:
            return await flex(client, pool, 5)

    answer = asyncio.run(run())
    assert (answer.status, answer.slot, answer.tokens) == (200, active["slot"], 5)
