"""The load of all benchmarks: streamed completions over HTTP, timed by the client's own clock."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

# Names the slot that served a request, where the application says it.
SLOT_HEADER = "x-serve-app-slot"
# Random words would make prompts of different lengths in tokens; counting words make every prompt the same but for its
# beginning, which keeps the prefix cache out of it.
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


@dataclass
class Stream:
    """One request, while it runs and after it has ended. Times in seconds.

    Attributes:
        sent_s: wall clock. first_s, last_s: from sending to the first and the last token, None before that.
        tokens: as the server counts them. text: what it said; model: who, as it says itself.
        slot: which one served it, empty if the server does not say.
        first: set at the first token, and at the end of a stream that brings none.
    """

    sent_s: float = 0.0
    status: int = 0
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    text: str = ""
    model: str = ""
    slot: str = ""
    done: bool = False
    error: str = ""
    first: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def token_s(self) -> float | None:
        """Time per output token after the first."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


class Client:
    """Streams completions from one server.

    Args:
        url: without a path. model: the name to ask for.
    """

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # No time limits: how long a request waits is what is measured. No proxies: the servers are on this machine.
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def stream(self, prompt: str, tokens: int, stream: Stream | None = None) -> Stream:
        """Ask for exactly `tokens` tokens and read them. Errors end up in the result, not here.

        Args:
            stream: filled while the request runs, for a caller who wants to watch it.
        """
        stream = stream or Stream()
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream.sent_s, begin = time.time(), time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                stream.status, stream.slot = response.status_code, response.headers.get(SLOT_HEADER, "")
                async for line in response.aiter_lines():
                    _take(stream, line, time.perf_counter() - begin)
        except httpx.HTTPError as error:
            stream.error = repr(error)
        finally:
            stream.first.set()
        if not stream.done and not stream.error:
            stream.error = f"status {stream.status}, the stream ended before [DONE]"
        return stream


def prompt(number: int) -> str:
    """About 20 tokens, the same count for every number below 10^6, and no two begin alike."""
    return f"{number:06d}: {WORDS}"


def _take(stream: Stream, line: str, elapsed_s: float) -> None:
    """Note one line of a server-sent event stream."""
    if line == "data: [DONE]":
        stream.done = True
    elif line.startswith("data: {"):
        chunk: dict[str, Any] = json.loads(line[6:])
        if chunk.get("choices"):
            stream.first_s = stream.first_s if stream.first_s is not None else elapsed_s
            stream.last_s = elapsed_s
            stream.tokens += 1
            stream.text += chunk["choices"][0].get("text") or ""
            stream.model = chunk.get("model", "")
            stream.slot = stream.slot or _simulated_slot(chunk)
            stream.first.set()
        if chunk.get("usage"):
            stream.tokens = chunk["usage"]["completion_tokens"]  # a chunk may hold several tokens
    elif line and not stream.error:
        stream.error = line[:500]


def _simulated_slot(chunk: dict[str, Any]) -> str:
    """The simulated engine puts its process id into the response's id."""
    name = str(chunk.get("id", ""))
    return name if name.startswith("sim-") else ""
