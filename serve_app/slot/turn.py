"""Slots with a part of a GPU each: one at a time starts, wakes or sleeps there.

Two wakes at once would each count on memory that the other one takes, and a start that measures what is left for its
KV cache would count a neighbour's as its own. Slots with whole GPUs have no neighbours there.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from serve_app.config import SlotConfig
from serve_app.node_folder import node_folder


@asynccontextmanager
async def gpu_turn(slot: SlotConfig) -> AsyncIterator[None]:
    """Wait for this slot's turn on its GPU, and keep it for the body."""
    if not 0 < slot.gpus < 1:
        yield
        return
    # Ray gives each slot the GPU that it shares.
    path = node_folder() / f"gpu-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.turn"
    descriptor = await asyncio.to_thread(_lock, path)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
