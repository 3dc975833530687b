"""Two real engines in one slot's process: one awake at a time, each with its own weights, tokenizer and memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks import parrot
from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine.base import Fingerprint
from serve_app.live import Verify
from serve_app.pool.messages import Command, Verb, Welcome
from serve_app.slot.engines import SlotEngines
from serve_app.slot.held import HeldEngine

from .asgi import request
from .engines import KWARGS

WORDS = ["red", "green"]


def promote(model: str) -> Command:
    return Command(epoch=1, op=1, verb=Verb.PROMOTE, model=model, tiers=dict.fromkeys(WORDS, Tier.HOST))


@pytest_asyncio.fixture(loop_scope="function")
async def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlotEngines]:
    """Started, both asleep."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # other tests have one engine a process
    models = [
        ModelConfig(id=word, source=str(parrot.make(tmp_path / word, word)), engine_kwargs=KWARGS) for word in WORDS
    ]
    made = SlotEngines(models, SlotConfig())

    async def introduce(model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        return Welcome(fingerprint, Verify.ENFORCE, 0.2, Tier.HOST)

    async def started(held: HeldEngine) -> None:
        pass

    try:
        await made.start(introduce, started)
        yield made
    finally:
        await made.shutdown()


async def said(held: HeldEngine) -> str:
    body = {"model": held.model.id, "prompt": "x", "max_tokens": 3, "temperature": 0}
    answer = await request(held.engine.app, "POST", "/v1/completions", body)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.asyncio
async def test_engines_of_one_slot_take_turns(engines: SlotEngines) -> None:
    """To and fro: the one that is woken answers in its own words, the other one has given its memory back."""
    for word in [*WORDS, *WORDS]:
        held = await engines.wake(promote(word))
        assert await said(held) == f" {word}" * 3
        tiers = {report.model: report.tier for report in engines.reports()}
        assert tiers == {other: Tier.READY if other == word else Tier.HOST for other in WORDS}
    await engines.rest(promote(WORDS[0]))
    reports = engines.reports()
    assert [report.tier for report in reports] == [Tier.HOST, Tier.HOST]
    assert all(report.host_bytes > 0 and report.pids for report in reports)
    assert not set(reports[0].pids) & set(reports[1].pids)
