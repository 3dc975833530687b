"""Models of one architecture in one slot on one real engine: it changes weights in place, and keeps its processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks import parrot
from serve_app.config import SERVER_KEYS, ModelConfig, SlotConfig, Tier
from serve_app.engine.arguments import first_module
from serve_app.engine.base import Fingerprint
from serve_app.live import Verify
from serve_app.pool.messages import Command, Verb, Welcome
from serve_app.slot.engines import SlotEngines
from serve_app.slot.held import HeldEngine

from .asgi import request
from .engines import KWARGS

WORDS = ["red", "green"]


def command(model: str, tier: Tier) -> Command:
    return Command(epoch=1, op=1, verb=Verb.PROMOTE, model=model, tiers=dict.fromkeys(WORDS, tier))


@pytest_asyncio.fixture(loop_scope="function")
async def engines(tmp_path: Path) -> AsyncIterator[SlotEngines]:
    """Started, asleep; each of the two has a chat template and an adapter of its own."""
    models: list[ModelConfig] = []
    for word in WORDS:
        directory = parrot.make(tmp_path / word, word, WORDS, tied=True)
        (directory / "chat_template.jinja").write_text(f"{word} template {{{{ messages[0]['content'] }}}}")
        adapter = parrot.make_adapter(tmp_path / f"{word}-adapter", silence=word == "green")
        kwargs = KWARGS | {"enable_lora": True, "enable_prompt_tokens_details": True}
        kwargs |= {"lora_modules": [{"name": f"{word}-adapter", "path": str(adapter)}]}
        shared = WORDS[0] if models else ""
        models.append(ModelConfig(id=word, source=str(directory), engine_kwargs=kwargs, engine_of=shared))
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


async def post(held: HeldEngine, path: str, body: dict[str, Any]) -> Any:
    answer = await request(held.engine.app, "POST", path, {"model": held.model.id} | body)
    assert answer.status == 200, answer.body
    return answer.json()


async def said(held: HeldEngine) -> str:
    body = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    return str((await post(held, "/v1/completions", body))["choices"][0]["text"])


async def prompted(held: HeldEngine) -> str:
    """What its server makes of a chat."""
    body = {"messages": [{"role": "user", "content": "hello"}]}
    tokens = (await post(held, "/tokenize", body))["tokens"]
    return str((await post(held, "/detokenize", {"tokens": tokens}))["prompt"])


@pytest.mark.asyncio
async def test_one_engine_becomes_one_model_after_the_other(engines: SlotEngines) -> None:
    """To and fro, awake and from both tiers: right words, right template, right name, the same processes."""
    pids: set[tuple[int, ...]] = set()
    for tier in (None, Tier.HOST, Tier.DISK):
        for word in [*WORDS, *WORDS]:
            held = await engines.wake(command(word, Tier.HOST))
            assert await said(held) == f" {word}" * 3
            assert f"{word} template hello" in await prompted(held)
            await held.read_memory()
            mine, other = sorted(engines.reports(), key=lambda report: report.lent)
            assert (mine.model, mine.tier, mine.lent) == (word, Tier.READY, False)
            assert (other.tier, other.lent, other.pids, other.host_bytes) == (Tier.DISK, True, (), 0)
            pids.add(mine.pids)
            if tier is not None:
                await engines.rest(command(word, tier))
                assert {report.model: report.tier for report in engines.reports()}[word] is tier
    assert len(pids) == 1, "the engine's processes stay"


@pytest.mark.asyncio
async def test_what_one_model_has_computed_is_not_taken_for_the_other(engines: SlotEngines) -> None:
    """A prompt in the prefix cache: used by the model that computed it, not by the next one on the same engine."""
    body = {"prompt": "x" * 300, "max_tokens": 1}

    async def cached(held: HeldEngine) -> int:
        details = (await post(held, "/v1/completions", body))["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    red = await engines.wake(command("red", Tier.HOST))
    assert await cached(red) == 0
    assert await cached(red) > 0
    assert await cached(await engines.wake(command("green", Tier.HOST))) == 0


@pytest.mark.asyncio
async def test_each_model_has_its_own_adapters(engines: SlotEngines) -> None:
    """vLLM's server numbers them from 1 for each model: the engine must not take one for the other's."""
    for word in [*WORDS, *WORDS]:
        held = await engines.wake(command(word, Tier.HOST))
        body = {"model": f"{word}-adapter", "prompt": "x", "max_tokens": 3, "temperature": 0}
        text = (await post(held, "/v1/completions", body))["choices"][0]["text"]
        assert text == (" red" * 3 if word == "red" else ""), "red's adapter changes nothing, green's silences it"
        assert await said(held) == f" {word}" * 3


def test_server_keys_are_arguments_of_vllms_server_and_not_of_its_engine() -> None:
    """Else a variant's own value would be ignored: the engine has its first model's."""
    cli = first_module("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    from vllm.engine.arg_utils import AsyncEngineArgs

    server = set(cli.FrontendArgs.__dataclass_fields__)
    assert server >= SERVER_KEYS
    assert not SERVER_KEYS & set(AsyncEngineArgs.__dataclass_fields__)
