"""The simulated engine that is shipped: honest about being asleep, and shaped like OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine.simulated import SimulatedEngine
from serve_app.errors import ConfigError, EngineError
from serve_app.telemetry.tracing import recording

INSTANT = dict.fromkeys(
    ["start_s", "first_sleep_s", "sleep_s", "wake_host_s", "wake_disk_s", "verify_s", "first_token_s", "token_s"], 0
)


def engine(**kwargs: Any) -> SimulatedEngine:
    return SimulatedEngine(ModelConfig(id="m", engine="simulated", engine_kwargs=INSTANT | kwargs), SlotConfig())


async def started(**kwargs: Any) -> SimulatedEngine:
    made = engine(**kwargs)
    await made.start()
    return made


async def post(made: SimulatedEngine, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(made.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slot") as client:
        return await client.post(path, json={"model": "m", "max_tokens": 3} | body)


@pytest.mark.asyncio
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_simulated_asleep_answers_500(tier: Tier) -> None:
    """A request that reaches an engine which is not awake is an error of ours, and loud."""
    made = await started()
    await made.sleep(tier)
    answer = await post(made)
    assert answer.status_code == 500
    assert f"not awake ({tier})" in answer.json()["error"]["message"]


@pytest.mark.asyncio
async def test_simulated_before_start_answers_500() -> None:
    """An engine that was never started is not awake either."""
    assert (await post(engine())).status_code == 500


@pytest.mark.asyncio
@pytest.mark.parametrize("tier", list(Tier))
async def test_simulated_wake_brings_it_back_from_every_tier(tier: Tier) -> None:
    """After sleep and wake it serves again; waking twice does no harm."""
    made = await started()
    await made.sleep(tier)
    await made.wake()
    await made.wake()
    assert (await post(made)).status_code == 200


@pytest.mark.asyncio
async def test_simulated_wrong_model_is_404() -> None:
    """As in vLLM's server, the model's name has to be right."""
    answer = await post(await started(), model="other")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.asyncio
async def test_simulated_chat_answers_one_completion() -> None:
    """Without `stream`: one object with the tokens, and the process that made them."""
    answer = (await post(await started())).json()
    assert (answer["object"], answer["id"]) == ("chat.completion", f"sim-{os.getpid()}")
    assert answer["choices"][0]["message"]["content"] == "token0 token1 token2 "
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", "delta"), ("/v1/completions", "text")])
async def test_simulated_stream_is_server_sent_events_and_done(path: str, kind: str) -> None:
    """With `stream`: one event per token, one ASGI message each, and `[DONE]` at the end."""
    made = await started()
    sent: list[Any] = []
    coming = [{"type": "http.request", "body": json.dumps({"model": "m", "max_tokens": 2, "stream": True}).encode()}]

    async def receive() -> Any:
        if coming:
            return coming.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await made.app(scope, receive, send)
    assert sent[0]["status"] == 200
    assert dict(sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    events = [message["body"].decode() for message in sent[1:] if message["body"]]
    assert len(events) == 3
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    assert events[-1] == "data: [DONE]\n\n"
    assert kind in json.loads(events[0].removeprefix("data: "))["choices"][0]
    assert made.load().running == 0


@pytest.mark.asyncio
async def test_simulated_falling_asleep_under_a_request_is_an_error() -> None:
    """A demotion that cuts a request must not look like success."""
    made = await started()
    tokens = made._tokens(5, 0)
    assert await anext(tokens) == "token0 "
    await made.sleep(Tier.HOST)
    with pytest.raises(EngineError, match="asleep under a running request"):
        await anext(tokens)
    assert made.load().running == 0


@pytest.mark.asyncio
async def test_simulated_fingerprint_drifts_when_scripted(tmp_path: Path) -> None:
    """Two engines compute the same, unless the script says that this process does not."""
    script = tmp_path / "script.json"
    sound, drifting = await started(), await started(script=str(script))
    assert await sound.fingerprint() == await drifting.fingerprint()
    script.write_text(json.dumps({f"golden@{os.getpid()}": "drift", "golden@0": "ignored"}))
    assert await sound.fingerprint() != await drifting.fingerprint()


@pytest.mark.asyncio
async def test_simulated_script_fails_the_step_it_names(tmp_path: Path) -> None:
    """A failing wake and a dead core, as the script says at that moment."""
    script = tmp_path / "script.json"
    made = await started(script=str(script))
    await made.sleep(Tier.HOST)
    script.write_text(json.dumps({"wake": "fail", "core": "dead"}))
    with pytest.raises(EngineError, match="wake failed"):
        await made.wake()
    with pytest.raises(EngineError, match="died"):
        await made.check_health()


@pytest.mark.asyncio
async def test_simulated_memory_follows_the_tier() -> None:
    """Awake: weights and KV cache; host: weights; disk: nothing."""
    made = await started(weights_bytes=100, kv_cache_bytes=10)
    sizes = []
    for tier in (Tier.READY, Tier.HOST, Tier.DISK):
        await made.sleep(tier)
        sizes.append(made.memory().host_bytes)
    assert sizes == [110, 100, 0]


@pytest.mark.asyncio
async def test_simulated_wake_records_its_stages() -> None:
    """Weights and KV cache are stages of their own, with the tier they came from."""
    made = await started()
    await made.sleep(Tier.DISK)
    with recording() as records:
        await made.wake()
    assert [str(record.stage) for record in records] == ["engine.wake.weights", "engine.wake.kv_cache"]
    assert records[0].attributes == {"tier": "disk"}


def test_simulated_unknown_setting_names_the_key() -> None:
    """Its timings are strict settings too."""
    with pytest.raises(ConfigError, match=r"models\.m\.engine_kwargs(.|\n)*wake_hots_s"):
        engine(wake_hots_s=1)
