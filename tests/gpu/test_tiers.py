"""Engines on a real GPU: what each tier gives back, what comes back, and who else is on the GPU."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine import caches
from serve_app.engine.vllm import VllmEngine
from serve_app.errors import EngineError, GpuNotFree, MemoryNotReturned, OutOfMemory
from serve_app.gpu import nvml
from serve_app.slot import golden

KWARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.3,
    "skip_tokenizer_init": True,
}
WEIGHT_BYTES = 0.5e9


def with_engine(model: Path, work: Callable[[VllmEngine], Awaitable[None]], **slot: Any) -> None:
    """Run `work` on a started engine."""

    async def run() -> None:
        config = ModelConfig(id="tiny", source=str(model), engine_kwargs=KWARGS)
        engine = VllmEngine(config, SlotConfig(gpus=1, cpus=2, **slot))
        try:
            await engine.start()
            await engine.warm_up()
            await work(engine)
        finally:
            await engine.shutdown()

    asyncio.run(run())


@contextmanager
def holding(size: int) -> Iterator[int]:
    """Another process that holds so many bytes of the GPU; yields its pid."""
    hold = f"import torch; x = torch.zeros({size}, dtype=torch.uint8, device='cuda'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        try:
            yield other.pid
        finally:
            other.communicate("\n")


@pytest.mark.timeout(600)
def test_tiers_give_back_memory_and_bring_back_the_same_model(home: Path, tiny_llama: Path) -> None:
    """By NVML: asleep an engine holds a small part; awake again it computes what it did; nothing grows."""

    async def work(engine: VllmEngine) -> None:
        anchor = await engine.fingerprint()
        records = await engine.worker_stages()
        await engine.read_gpus()
        [awake], [unused] = engine.memory().device_bytes, engine.memory().unused
        assert 0 <= unused.fragmented <= unused.cached < awake
        held: dict[Tier, list[int]] = {Tier.HOST: [], Tier.DISK: []}
        for tier in (Tier.HOST, Tier.DISK) * 3:
            await engine.sleep(tier)
            held[tier].append(engine.memory().device_bytes[0])
            await engine.wake()
            golden.check(anchor, await engine.fingerprint(), 0.2)
        assert {"weights.load", "memory.profile", "kv_cache.allocate", "graph.capture"} <= {r.stage for r in records}
        for tier in held:
            assert held[tier][0] < awake - WEIGHT_BYTES
            assert held[tier][-1] - held[tier][0] < 64e6, f"{tier} holds more and more: {held[tier]}"
        assert any((caches.directory() / "kv_cache").iterdir()), "the KV cache's size was not kept"

    with_engine(tiny_llama, work)
    assert all(gpu.used < nvml.IDLE_BYTES for gpu in nvml.read(nvml.visible()[:1])), "memory left after shutdown"


@pytest.mark.timeout(600)
def test_memory_that_does_not_come_back_is_an_error_with_the_figure(home: Path, tiny_llama: Path) -> None:
    """A budget smaller than a CUDA context cannot be met."""

    async def work(engine: VllmEngine) -> None:
        with pytest.raises(MemoryNotReturned, match=r"rank 0 holds \d\.\d+ GB of its GPU asleep, allowed 0.1 GB"):
            await engine.sleep(Tier.HOST)

    with_engine(tiny_llama, work, asleep_gpu_gb=0.1)


@pytest.mark.timeout(600)
def test_a_wake_that_finds_the_gpu_taken_says_that_memory_is_short(home: Path, tiny_llama: Path) -> None:
    """Not merely that something failed: the slot gives up this engine then, and keeps the others."""
    free = nvml.read(nvml.visible()[:1])[0].total

    async def work(engine: VllmEngine) -> None:
        await engine.sleep(Tier.HOST)
        with holding(int(free * 0.9)), pytest.raises(OutOfMemory, match="out of memory"):
            await engine.wake()

    with_engine(tiny_llama, work)


def test_a_gpu_that_others_use_is_refused_by_pid(home: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot does not start beside a leftover; the error names it."""
    monkeypatch.setattr("serve_app.engine.gpu_memory.PATIENCE_S", 1.0)
    with holding(3 << 30) as other:

        async def never(engine: VllmEngine) -> None:
            raise AssertionError("it started")

        with pytest.raises((GpuNotFree, EngineError), match=rf"pid {other} \(\d\.\d GB\)"):
            with_engine(tiny_llama, never)
