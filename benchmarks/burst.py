"""One burst against one application: a slot that is full, and a few requests more."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.client import Client, Stream, prompt
from benchmarks.configs import Shape

# Long enough to outlive every burst; they are cut off when it is over.
FILLER_TOKENS = 100_000
# vLLM refuses to be asked for more than fits: room for the prompt.
PROMPT_ROOM = 64
BURST_TOKENS = 8
# Between the fillers' first tokens and the burst, so that their prefills are over and everybody has counted them.
SETTLE_S = 1.0
# The last place is taken this long before the burst: enough to be first in the proxy, not enough to be noticed.
LAST_S = 0.01
FILL_S = 120.0
BURST_S = 600.0

_numbers = itertools.count(int(time.time()) % 500_000)


@dataclass(frozen=True)
class Burst:
    """What the requests beyond the capacity got. Times in seconds.

    Attributes:
        sent_s: wall clock at which the burst was sent.
        first_s: from sending to each request's first token, sorted.
        invalid: why this burst says nothing about new capacity; empty if it does.
    """

    sent_s: float
    first_s: tuple[float, ...]
    invalid: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"first_token_s": list(self.first_s), "valid": not self.invalid, "invalid": self.invalid}


async def burst(url: str, shape: Shape, extra: int, *, new_slot: bool, fill: bool = True) -> Burst:
    """Fill `shape.hard` places with long streams, then send `extra` short requests at once and time those.

    The last place is taken together with the burst: a pool whose slots are full promotes without being asked.

    Args:
        new_slot: the burst must be served by a slot that serves none of the fillers; otherwise it is not valid.
        fill: False where nothing is active beforehand, so that there is nothing to fill.
    """
    async with Client(url, shape.model) as client, _fillers(client, shape, shape.hard if fill else 0) as fillers:
        sent_s = time.time()
        work = [client.stream(prompt(next(_numbers)), BURST_TOKENS) for _ in range(extra)]
        streams = await asyncio.wait_for(asyncio.gather(*work), BURST_S)
        invalid = _broken(fillers, streams) or (_mixed(fillers, streams) if new_slot else "")
    first_s = [stream.sent_s - sent_s + stream.first_s for stream in streams if stream.first_s is not None]
    return Burst(sent_s, tuple(sorted(first_s)), invalid)


@asynccontextmanager
async def _fillers(client: Client, shape: Shape, count: int) -> AsyncIterator[list[Stream]]:
    """`count` long streams, as many as one slot takes, all but the last one running; cut off at the end."""
    if not count:
        yield []
        return
    length = int(shape.engine_kwargs.get("max_model_len", FILLER_TOKENS)) - PROMPT_ROOM
    streams = [Stream() for _ in range(count)]
    work: list[asyncio.Task[Stream]] = []

    def send(stream: Stream) -> None:
        work.append(asyncio.create_task(client.stream(prompt(next(_numbers)), length, stream)))

    try:
        for stream in streams[:-1]:
            send(stream)
        await asyncio.wait_for(asyncio.gather(*(stream.first.wait() for stream in streams[:-1])), FILL_S)
        await asyncio.sleep(SETTLE_S)
        send(streams[-1])
        await asyncio.sleep(LAST_S)
        yield streams
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


def _broken(fillers: list[Stream], streams: list[Stream]) -> str:
    """A request that failed, or a filler that made room by ending."""
    failed = [stream.error for stream in streams if stream.error or stream.first_s is None]
    if failed:
        return f"{len(failed)} requests of the burst failed: {failed[0]}"
    ended = [stream for stream in fillers if stream.done or stream.error]
    return f"{len(ended)} of the long streams ended, which made room: {ended[0].error}" if ended else ""


def _mixed(fillers: list[Stream], streams: list[Stream]) -> str:
    """Where the application names its slots: a burst that an old slot has served, though it was full."""
    old = {stream.slot for stream in fillers} - {""}
    served = sorted({stream.slot for stream in streams} & old)
    return f"served by a slot that was full: {', '.join(served)}" if served else ""
