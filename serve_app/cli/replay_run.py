"""Sending the requests of a trace: open loop, each when it is due, whatever became of the earlier ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.cli import burst_client
from serve_app.cli.burst_client import Answer
from serve_app.traces import TraceRequest

# Each is one token with the space before it (looked up in the vocabulary of SmolLM2).
COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man"
)
WORDS = COMMON.split()


@dataclass
class Sent:
    """One request and its answer while it runs; sent_s: when it went out, since the replay began; None before that."""

    index: int
    request: TraceRequest
    sent_s: float | None = None
    answer: Answer = field(default_factory=Answer)


def plan(requests: Sequence[TraceRequest]) -> list[Sent]:
    return [Sent(index, request) for index, request in enumerate(requests)]


async def send_all(
    url: str, work: Sequence[Sent], began_s: float, *, exact: bool, ended: Callable[[Sent], None]
) -> None:
    """Send everything when it is due, and wait until all of it has ended.

    Args:
        began_s: the replay's beginning on the monotonic clock.
        exact: ask for the output's length as it is, not for at most so many tokens.
        ended: called at each request's end.
    """

    async def one(sent: Sent) -> None:
        await burst_client.send(client, body(sent.index, sent.request, exact=exact), sent.answer)
        ended(sent)

    async with burst_client.connections(url) as client, asyncio.TaskGroup() as running:
        for sent in work:
            await asyncio.sleep(began_s + sent.request.at_s - time.monotonic())
            sent.sent_s = time.monotonic() - began_s
            running.create_task(one(sent))


def body(index: int, request: TraceRequest, *, exact: bool) -> dict[str, Any]:
    """What is sent for one request; `ignore_eos` is not OpenAI's, but vLLM's and its relatives'."""
    messages = [{"role": "user", "content": prompt(index, request.prompt_tokens)}]
    asked = {"model": request.model, "messages": messages, "max_tokens": request.output_tokens, "stream": True}
    return asked | {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if exact else {})


def prompt(index: int, tokens: int) -> str:
    """About so many tokens, no two alike from the first word on, so that a prefix cache makes nothing faster."""
    words = random.Random(index).choices(WORDS, k=max(0, tokens - 1))
    return " ".join([str(index), *words])
