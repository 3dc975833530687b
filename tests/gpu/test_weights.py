"""Loading from the node's weight cache on a real GPU, by DMA from shared memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.config import ModelConfig, NodeCacheConfig, SlotConfig, Tier
from serve_app.engine.vllm import VllmEngine

from .test_tiers import KWARGS


def test_copies_from_registered_memory_arrive() -> None:
    """Whole tensors and a rank's parts of them; one that was written to is not taken from the cache."""
    subprocess.run([sys.executable, "-m", "tests.gpu.copies"], check=True)


@pytest.mark.timeout(900)
def test_the_model_is_that_of_vllms_own_loader(home: Path, tiny_llama: Path) -> None:
    """To the last bit, after the start and after tier `disk`."""

    async def values(cached: bool) -> list[tuple[float, ...]]:
        model = ModelConfig(id="tiny", source=str(tiny_llama), engine_kwargs=KWARGS)
        cache = NodeCacheConfig(enabled=cached, keep_s=1)
        engine = VllmEngine(model, SlotConfig(gpus=1, cpus=2, node_cache=cache))
        try:
            await engine.start()
            found = [(await engine.fingerprint()).values]
            await engine.sleep(Tier.DISK)
            await engine.wake()
            return [*found, (await engine.fingerprint()).values]
        finally:
            await engine.shutdown()

    own = asyncio.run(values(cached=False))
    assert asyncio.run(values(cached=True)) == [own[0]] * 2
