"""Merging tokens to one event under load: the decision, and what the simulated engine makes of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.config import MergeEvents, ModelConfig, SlotConfig, parse_app
from serve_app.engine.merging import tokens_per_event
from serve_app.engine.simulated import SimulatedEngine
from serve_app.errors import ConfigError

MERGE = MergeEvents(from_streams=3, tokens=4)
TOKENS = 10


@pytest.mark.parametrize(("running", "tokens"), [(0, 1), (1, 1), (2, 2), (4, 2), (5, 3), (8, 4), (500, 4)])
def test_tokens_per_event_grow_with_the_streams(running: int, tokens: int) -> None:
    """The third stream is the first that merges where `from_streams` is 3; each third one adds a token, up to four."""
    assert tokens_per_event(running, MERGE) == tokens


def test_tokens_per_event_default_leaves_few_streams_alone() -> None:
    """Up to 15 streams nothing changes; 256 make 32 events a step of the engine."""
    assert {tokens_per_event(running, MergeEvents()) for running in range(15)} == {1}
    assert tokens_per_event(15, MergeEvents()) == 2
    assert tokens_per_event(255, MergeEvents()) == 8


@pytest.mark.parametrize(("key", "value"), [("from_streams", 1), ("tokens", 0), ("tokens", 65)])
def test_merge_events_bounds(key: str, value: int) -> None:
    """One stream alone can never be merged, and nobody waits for more than 64 tokens."""
    with pytest.raises(ConfigError, match=f"slot.merge_events.{key}"):
        parse_app({"slot": {"merge_events": {key: value}}})


class Reader:
    """One streaming request, and the text of each of its events."""

    def __init__(self, engine: SimulatedEngine, *, stream: bool = True) -> None:
        self.texts: list[str] = []
        self.bodies: list[bytes] = []
        self._body = json.dumps({"model": "m", "max_tokens": TOKENS, "stream": stream}).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        self.task: asyncio.Task[Any] = asyncio.ensure_future(engine.app(scope, self._receive, self.send))

    async def _receive(self) -> Any:
        body, self._body = self._body, b""
        if not body:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body}

    async def send(self, message: Any) -> None:
        body = message.get("body", b"")
        self.bodies += [body] if body else []
        if body.startswith(b"data: {"):
            self.texts.append(json.loads(body.removeprefix(b"data: "))["choices"][0]["text"])


async def engine(token_s: float = 0.0) -> SimulatedEngine:
    kwargs = {"start_s": 0, "first_token_s": 0.001, "token_s": token_s}
    made = SimulatedEngine(
        ModelConfig(id="m", engine="simulated", engine_kwargs=kwargs), SlotConfig(merge_events=MERGE)
    )
    await made.start()
    return made


class FirstEvent(Reader):
    """Tells when its first event has come."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.came = asyncio.Event()
        super().__init__(engine)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.texts:
            self.came.set()


@pytest.mark.asyncio
async def test_simulated_merges_only_streams_that_come_under_load() -> None:
    """First and last tokens at once, two to an event between; every token once and in order, for all of them."""
    made = await engine()
    readers = [Reader(made) for _ in range(4)]
    await asyncio.gather(*(reader.task for reader in readers))
    sizes = [[text.count("token") for text in reader.texts] for reader in readers]
    assert sizes == [[1] * 10, [1] * 10, [1, 2, 2, 2, 2, 1], [1, 2, 2, 2, 2, 1]]
    assert {"".join(reader.texts) for reader in readers} == {"".join(f"token{index} " for index in range(TOKENS))}
    assert all(reader.bodies[-1] == b"data: [DONE]\n\n" for reader in readers)


@pytest.mark.asyncio
async def test_simulated_merging_leaves_an_answer_without_stream_alone() -> None:
    """One object with the whole text, also under load."""
    made = await engine()
    streams = [Reader(made) for _ in range(3)]
    whole = Reader(made, stream=False)
    await asyncio.gather(whole.task, *(reader.task for reader in streams))
    assert len(whole.bodies) == 1
    assert json.loads(whole.bodies[0])["choices"][0]["text"].split() == [f"token{index}" for index in range(TOKENS)]


@pytest.mark.asyncio
async def test_simulated_merged_stream_that_is_cancelled_counts_no_more() -> None:
    """A client that goes away between two merged events makes room, and the next stream alone is not merged."""
    made = await engine(token_s=0.001)
    readers = [FirstEvent(made) for _ in range(3)]
    await readers[2].came.wait()
    for reader in readers:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
    assert made.load().running == 0
    alone = Reader(made)
    await alone.task
    assert len(alone.texts) == TOKENS
