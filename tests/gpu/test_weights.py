"""Loading from the node's weight cache on a real GPU, through pinned buffers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from serve_app.config import ModelConfig, NodeCacheConfig, SlotConfig, Tier
from serve_app.engine.vllm import VllmEngine
from serve_app.weights.staging import BUFFER_BYTES, staged_copies

from .test_tiers import KWARGS


@pytest.mark.parametrize("rows", [1, 1000, BUFFER_BYTES // 4096 * 3])
def test_staged_copies_arrive(rows: int) -> None:
    """Smaller and larger than both buffers; a column slice too; and what is launched next sees them."""
    host = torch.randn(rows, 2048)
    device = torch.device("cuda:0")
    target, doubled = torch.zeros(rows, 1024, device=device), torch.zeros(rows, 1024, device=device)
    with staged_copies(device):
        target.copy_(host.narrow(1, 1024, 1024))
        doubled += target * 2
    assert target.cpu().equal(host[:, 1024:])
    assert doubled.cpu().equal(host[:, 1024:] * 2)


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
