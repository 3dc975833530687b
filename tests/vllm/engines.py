"""Engines as these tests want them: small, and gone afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from serve_app.config import ModelConfig, NodeCacheConfig, SlotConfig
from serve_app.engine.vllm import VllmEngine

KWARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
}


def make(model: Path, fork: bool = True, cached: bool = False, **kwargs: Any) -> VllmEngine:
    config = ModelConfig(id="tiny", source=str(model), engine_kwargs=KWARGS | kwargs)
    return VllmEngine(config, SlotConfig(forkserver=fork, node_cache=NodeCacheConfig(enabled=cached, keep_s=5)))


@asynccontextmanager
async def running(model: Path, fork: bool = True, cached: bool = False, **kwargs: Any) -> AsyncIterator[VllmEngine]:
    """A started engine, shut down in the end; `cached`: its weights come from the node's weight cache."""
    engine = make(model, fork, cached, **kwargs)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.shutdown()
