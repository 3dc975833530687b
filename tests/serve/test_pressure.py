"""Soft capacity beyond counting requests: long prompts, a full KV cache; and the command that measures the rate."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import httpx
import pytest

from .pool import MODEL, Pool

RATE = 20_000
ENGINE = {"prefill_tokens_per_s": RATE, "kv_fills": True}
SLOTS = {"min": 2, "max": 2, "standby": 1, "demote_after_s": 1}


async def ask(pool: Pool, client: httpx.AsyncClient, words: int, tokens: int = 2) -> int:
    body = {"model": MODEL, "prompt": "word " * words, "max_tokens": tokens}
    return (await client.post(f"{pool.url}/v1/completions", json=body)).status_code


def many(pool: Pool, count: int, words: int, tokens: int = 2) -> list[int]:
    async def run() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(ask(pool, client, words, tokens) for _ in range(count)))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("when", "count", "words", "tokens", "reason"),
    [
        ({"predicted_ttft_s": 0.5, "prefill_tokens_per_s": RATE}, 2, 30_000, 2, "a first token would take"),
        ({"kv_use": 0.2}, 2, 1, 150, "of the KV cache are in use"),
    ],
)
def test_two_requests_of_four_promote_a_standby(
    pool: Pool, when: dict[str, float], count: int, words: int, tokens: int, reason: str
) -> None:
    """Though the slot would take more: counted alone they would be no reason."""
    pool.deploy({"slots": SLOTS, "promote_when": when}, engine=ENGINE)
    before = len(pool.promotions())
    assert many(pool, count, words, tokens) == [200] * count
    promotions = pool.promotions()[before:]
    assert [reason in entry["reason"] for entry in promotions] == [True], promotions
    pool.settled(active=1, standby=1)


def test_calibrate_measures_the_rate_of_a_slot(pool: Pool) -> None:
    """As figures; and in words, with the setting to use."""
    pool.deploy({"slots": SLOTS}, engine=ENGINE)
    command = [sys.executable, "-m", "serve_app.cli", "calibrate", "--url", pool.url, "--longest", "2048"]
    said = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=True).stdout
    measured = json.loads(said)
    assert list(measured["first_token_s"]) == ["256", "512", "1024", "2048"]
    assert measured["tokens_per_s"] > 0
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=dict(os.environ)
    ).stdout
    assert "prefill_tokens_per_s: " in shown
