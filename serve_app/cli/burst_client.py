"""Streamed chat completions, and what each of them met; a burst of them at once. HTTP only."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_app.errors import NotRunning
from serve_app.pool.proxy import HELD_HEADER, SLOT_HEADER

# A health route answers at once, or something is wrong with the address.
LOOK_S = 5.0
# Requests may be held for minutes, so only a stream that has long been silent is given up.
SILENT_S = 300.0
CUT_OFF = "the stream ended before [DONE]"


@dataclass
class Answer:
    """One request; all times in seconds.

    Attributes:
        status: HTTP status, 0 before and without an answer.
        slot: which slot answered; empty if nobody said.
        held_s: for how long the pool held it, 0 if not at all, None if nobody said.
        first_token_s: from sending to the first token; total_s: from sending to the end, whatever end it was.
        error: what went wrong, empty if nothing.
        chunk_s: from sending to each event that brought text; a server may put several tokens into one.
        prompt_tokens, output_tokens: as the server counts them; None if it was not asked or does not say.
    """

    status: int = 0
    slot: str = ""
    held_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    chunks: int = 0
    error: str = ""
    chunk_s: list[float] = field(default_factory=list, repr=False)
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def outcome(self) -> str:
        """`running`, `served`, `refused` (503: come back later) or `failed`."""
        if self.total_s is None:
            return "running"
        if self.status == 503:
            return "refused"
        return "failed" if self.error else "served"


def served_model(url: str) -> str:
    """The first model that the application serves; empty while no slot is active, as asking would wake one.

    Raises NotRunning if nothing answers.
    """
    return next(iter(served_models(url)), "")


def served_models(url: str) -> dict[str, int]:
    """The models that are served, each with its context in tokens, 0 where the server does not say; none if no slot is
    active, as asking would wake one. Raises NotRunning if nothing answers, or the key is not known there.
    """
    try:
        if httpx.get(f"{url}/health/ready", timeout=LOOK_S).status_code == 503:
            return {}
        answer = httpx.get(f"{url}/v1/models", timeout=LOOK_S, headers=key())
        if answer.status_code in (401, 403):
            raise NotRunning(
                f"{url} answered {answer.status_code}: {answer.text[:300]}; give the key as OPENAI_API_KEY"
            )
        cards = answer.json()["data"] if answer.status_code == 200 else []
        return {str(card["id"]): int(card.get("max_model_len") or 0) for card in cards}
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise NotRunning(f"nothing answers at {url} ({error}); give the address with --url") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise NotRunning(f"what answers at {url} is no OpenAI server; give the address with --url") from None


def key() -> dict[str, str]:
    """The header for servers that want a key; the OpenAI SDKs read the same variable."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def connections(url: str) -> httpx.AsyncClient:
    """A client for any number of streams, each on a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=httpx.Timeout(SILENT_S, pool=None), headers=key())


async def send_all(url: str, model: str, max_tokens: int, answers: list[Answer]) -> None:
    """Send one request for each of `answers` at once and fill them in while they run."""
    async with connections(url) as client:
        await asyncio.gather(*(send(client, _body(model, max_tokens, i), answer) for i, answer in enumerate(answers)))


def _body(model: str, max_tokens: int, index: int) -> dict[str, Any]:
    # Each its own prompt, so that a prefix cache makes nothing look faster than it is.
    prompt = f"Burst request {index}: write one paragraph about the number {index}."
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True}


async def send(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
    """Send one streamed chat completion and fill in its answer; what goes wrong stands there too."""
    begin = time.monotonic()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            take_headers(answer, response.status_code, response.headers)
            if answer.status == 200:
                answer.error = CUT_OFF  # until it has not been
                async for line in response.aiter_lines():
                    take_line(answer, line, time.monotonic() - begin)
            else:
                answer.error = f"HTTP {answer.status}: {message(await response.aread())}"
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__} {error}".strip()
    answer.total_s = time.monotonic() - begin


def take_headers(answer: Answer, status: int, headers: httpx.Headers) -> None:
    """Note where the request went, and whether it was held."""
    answer.status, answer.slot = status, headers.get(SLOT_HEADER, "")
    answer.held_s = float(headers[HELD_HEADER]) if HELD_HEADER in headers else None


def take_line(answer: Answer, line: str, since_sent_s: float) -> None:
    """Note what one line of an event stream says."""
    if line == "data: [DONE]":
        if answer.error == CUT_OFF:
            answer.error = ""
    elif line.startswith("data: {"):
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            answer.error = f"in the stream: {chunk['error']}"
        elif _has_text(chunk):
            answer.chunks += 1
            answer.chunk_s.append(since_sent_s)
            answer.first_token_s = answer.first_token_s or since_sent_s
        if chunk.get("usage"):
            answer.prompt_tokens = chunk["usage"].get("prompt_tokens")
            answer.output_tokens = chunk["usage"].get("completion_tokens")


def _has_text(chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries a token; the first one of a chat only says the role."""
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices", ())]
    return any(value for delta in deltas for key, value in delta.items() if key != "role")


def message(body: bytes) -> str:
    """What an error says, in OpenAI's shape or any other."""
    text = body.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split())[:200]
