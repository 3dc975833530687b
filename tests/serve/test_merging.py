"""Merged events over HTTP, as the openai client reads them; and clients that go away under the way we reach slots."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import openai

from .pool import MODEL, Pool

TOKENS = 10
ALONE = {"slots": {"min": 1, "max": 1, "standby": 0}}
SLOW = {"token_s": 0.02, "max_num_seqs": 8}


def deploy(pool: Pool, **merge: int) -> None:
    pool.deploy(ALONE, SLOW, slot={"merge_events": merge, "max_ongoing_requests": 8})


def client(pool: Pool) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0)


async def texts(pool: Pool, count: int) -> list[list[str]]:
    """The text of every event of `count` streams that run together; usage is checked on the way."""

    async def one(chat: Any) -> list[str]:
        found = []
        request = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": TOKENS}
        async for chunk in await chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        ):
            if chunk.choices:
                found.append(chunk.choices[0].delta.content)
            else:
                assert chunk.usage.completion_tokens == TOKENS
        return found

    async with client(pool) as http:
        return await asyncio.gather(*(one(http.chat) for _ in range(count)))


def test_merged_streams_say_the_same(pool: Pool) -> None:
    """With and without merging the same text arrives; only the streams beyond the bound have fewer events."""
    deploy(pool, from_streams=3, tokens=4)
    merged = asyncio.run(texts(pool, 4))
    alone = asyncio.run(texts(pool, 1))
    deploy(pool, from_streams=3, tokens=1)
    unmerged = asyncio.run(texts(pool, 4))
    assert {"".join(stream) for stream in merged + alone + unmerged} == {"".join(f"token{i} " for i in range(TOKENS))}
    assert sorted(map(len, merged)) == [6, 6, TOKENS, TOKENS]
    assert list(map(len, alone + unmerged)) == [TOKENS] * 5


def test_merged_stream_that_its_client_leaves_ends_in_the_slot(pool: Pool) -> None:
    """A disconnect reaches the slot between two events: nothing stays in flight."""
    deploy(pool, from_streams=2, tokens=4)

    async def leave() -> None:
        async with client(pool) as http:
            create = http.completions.create
            streams = [await create(model=MODEL, prompt="x", max_tokens=5000, stream=True) for _ in range(3)]
            for stream in streams:
                async for _ in stream:
                    break
            assert await asyncio.to_thread(in_flight, pool) == 3
            for stream in streams:
                with contextlib.suppress(openai.OpenAIError):
                    await stream.close()

    asyncio.run(leave())
    pool.wait(lambda status: all(slot["in_flight"] == 0 for slot in status["slots"]), "the streams have ended")


def in_flight(pool: Pool) -> int:
    """What the slots say once their next report has come."""
    status = pool.wait(lambda status: sum(slot["in_flight"] for slot in status["slots"]) == 3, "three streams run")
    return sum(slot["in_flight"] for slot in status["slots"])
