"""The vLLM engine on CPU, for real: one engine for most tests, more where processes are started or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine import forkserver, processes
from serve_app.engine.arguments import server_arguments
from serve_app.engine.base import EngineLoad
from serve_app.engine.vllm import VllmEngine, check_engine_kwargs
from serve_app.errors import ConfigError, EngineError
from serve_app.slot.golden import check
from serve_app.telemetry.tracing import recording

from .asgi import Response, request
from .engines import make, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
KV_BYTES = 128 << 20
WEIGHT_BYTES = 80 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_llama: Path) -> AsyncIterator[VllmEngine]:
    async with running(tiny_llama) as engine:
        await engine.warm_up()
        yield engine


async def greedy_text(engine: VllmEngine) -> str:
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    response = await request(engine.app, "POST", CHAT, body | {"messages": [{"role": "user", "content": "Hello"}]})
    assert response.status == 200
    return response.text()


async def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110  (other processes set no event)
        await asyncio.sleep(0.02)
    return condition()


async def test_it_streams_a_chat_completion(engine: VllmEngine) -> None:
    """Chunks arrive one by one while tokens are generated, not all at the end."""
    arrivals: list[int] = []
    response = Response()
    body = {"model": "tiny", "max_tokens": 24, "ignore_eos": True, "stream": True}
    call = request(engine.app, "POST", CHAT, body | {"messages": [{"role": "user", "content": "Hi"}]}, response)
    running_call = asyncio.ensure_future(call)
    while not running_call.done():
        arrivals.append(len(response.chunks))
        await asyncio.sleep(0.005)
    assert (await running_call).status == 200
    assert response.body.rstrip().endswith(b"data: [DONE]")
    assert len(set(arrivals)) > 5


async def test_vllm_does_not_change_which_forkserver_a_process_uses(engine: VllmEngine) -> None:
    """It adds to the environment as it is imported; a slot that finds it imported must find the same server."""
    assert forkserver.address_of_server() == forkserver._address


async def test_it_serves_under_the_models_id(engine: VllmEngine) -> None:
    """`/v1/models` names the configured id, not the path of the files."""
    response = await request(engine.app, "GET", "/v1/models")
    assert [model["id"] for model in response.json()["data"]] == ["tiny"]


async def test_vllm_metrics_stay_and_development_routes_do_not_exist(engine: VllmEngine) -> None:
    """Our own stat logger does not replace vLLM's Prometheus metrics; nobody can put the engine to sleep by HTTP."""
    assert b"vllm:num_requests_running" in (await request(engine.app, "GET", "/metrics")).body
    assert (await request(engine.app, "POST", "/sleep")).status == 404


# After `host` has given the KV cache back, hardly any of it is touched again: what `disk` then frees are weights.
@pytest.mark.parametrize(("tier", "freed"), [(Tier.HOST, KV_BYTES), (Tier.DISK, WEIGHT_BYTES)])
async def test_sleep_frees_memory_and_wake_restores_the_same_model(engine: VllmEngine, tier: Tier, freed: int) -> None:
    """Memory goes back to the operating system; afterwards log probabilities and greedy text are what they were."""
    fingerprint, text = await engine.fingerprint(), await greedy_text(engine)
    awake = engine.memory().host_bytes  # later less of it is touched: it comes back page by page
    for _ in range(2):
        await engine.sleep(tier)
        await engine.sleep(tier)
        assert awake - engine.memory().host_bytes > 0.8 * freed
        with recording() as records:
            await engine.wake()
        await engine.wake()
        assert [record.stage for record in records] == ["engine.wake.weights", "engine.wake.kv_cache"]
        check(fingerprint, await engine.fingerprint(), 0.01)
        assert await greedy_text(engine) == text


async def test_a_change_of_tier_wakes_in_between(engine: VllmEngine) -> None:
    """From `host` to `disk` the weights are freed as well, though vLLM itself ignores a second sleep."""
    fingerprint = await engine.fingerprint()
    await engine.sleep(Tier.HOST)
    asleep = engine.memory().host_bytes
    await engine.sleep(Tier.DISK)
    assert asleep - engine.memory().host_bytes > 0.8 * WEIGHT_BYTES
    await engine.wake()
    check(fingerprint, await engine.fingerprint(), 0.01)


async def test_tier_ready_stays_awake(engine: VllmEngine) -> None:
    """`ready` frees nothing and still answers."""
    await engine.sleep(Tier.READY)
    assert await greedy_text(engine)


async def test_a_disconnect_aborts_the_request(engine: VllmEngine) -> None:
    """Within a second after the client hung up nothing is unfinished, and the load says so."""
    response = Response()
    body = {"model": "tiny", "max_tokens": 900, "ignore_eos": True, "stream": True}
    call = request(engine.app, "POST", CHAT, body | {"messages": [{"role": "user", "content": "Hi"}]}, response)
    running_call = asyncio.ensure_future(call)
    assert await eventually(lambda: len(response.chunks) > 3, within_s=20)
    assert engine.load().running == 1
    response.hang_up.set()
    assert await eventually(lambda: engine.load() == EngineLoad(), within_s=1)
    await running_call


async def test_unknown_engine_kwargs_are_named() -> None:
    """The error names the key, where it stands and what was probably meant; nothing is started."""
    with pytest.raises(ConfigError, match=r"models\.m\.engine_kwargs\.max_model_length: .*did you mean max_model_len"):
        check_engine_kwargs(ModelConfig(id="m", engine_kwargs={"max_model_length": 1}), SlotConfig())
    with pytest.raises(ConfigError, match=r"engine_kwargs\.served_model_name: set by serve_app; use models\.m\.id"):
        check_engine_kwargs(ModelConfig(id="m", engine_kwargs={"served_model_name": "x"}), SlotConfig())
    check_engine_kwargs(ModelConfig(id="m", engine_kwargs={"max_model_len": 1}), SlotConfig())


@pytest.mark.parametrize(
    ("slot", "backend"),
    [
        (SlotConfig(), None),
        (SlotConfig(gpus=1), None),
        (SlotConfig(gpus=2), "mp"),
        (SlotConfig(gpus=4, nodes=2), "ray"),
    ],
)
async def test_executor_backend_follows_the_slots_shape(slot: SlotConfig, backend: str | None) -> None:
    """Inside a placement group vLLM would take Ray's workers by itself, also on one node."""
    model = ModelConfig(id="m", engine_kwargs={"pipeline_parallel_size": max(1, slot.gpus)})
    assert server_arguments(model, slot, "m").distributed_executor_backend == backend


async def test_an_engine_without_forkserver_has_the_same_fingerprint(engine: VllmEngine, tiny_llama: Path) -> None:
    """Two engines live in one process; how their processes were started does not change what they compute."""
    async with running(tiny_llama, fork=False) as other:
        check(await engine.fingerprint(), await other.fingerprint(), 0.01)
        groups = other._groups
        assert processes.members(groups)
    assert processes.members(groups) == []
    await other.shutdown()
    await engine.check_health()


async def test_a_killed_engine_core_is_a_failed_health_check(engine: VllmEngine, tiny_llama: Path) -> None:
    """After SIGKILL of EngineCore `check_health` raises, and shutdown still works."""
    async with running(tiny_llama) as other:
        await other.check_health()
        os.kill(other._groups[0], signal.SIGKILL)

        async def dead() -> bool:
            try:
                await other.check_health()
            except EngineError:
                return True
            return False

        deadline = time.monotonic() + 5
        while not await dead():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_a_pooling_model_has_its_embedding_as_fingerprint(engine: VllmEngine, tiny_llama: Path) -> None:
    """An embedding engine warms up, and its fingerprint survives a sleep."""
    async with running(tiny_llama, runner="pooling", convert="embed") as other:
        await other.warm_up()
        before = await other.fingerprint()
        assert (before.kind, len(before.values)) == ("embedding", 768)
        await other.sleep(Tier.DISK)
        await other.wake()
        check(before, await other.fingerprint(), 1e-4)


async def test_a_failed_start_says_why_and_leaves_no_process(engine: VllmEngine, tiny_llama: Path) -> None:
    """A setting that only the engine's own process finds wrong is an EngineError with the stage's name."""
    other = make(tiny_llama, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(EngineError, match=r"model tiny: engine\.core: "):
        await other.start()
    await other.shutdown()
    assert processes.members(other._groups) == []


async def test_a_cancelled_start_leaves_no_process(engine: VllmEngine, tiny_llama: Path) -> None:
    """Cancelled while EngineCore starts, shutdown ends that process and the thread that waits for it."""
    other = make(tiny_llama)
    start = asyncio.ensure_future(other.start())
    assert await eventually(lambda: bool(other._groups), within_s=30)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await other.shutdown()
    assert processes.members(other._groups) == []
