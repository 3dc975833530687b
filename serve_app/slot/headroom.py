"""Memory around a slot, for Prometheus: what nobody uses of its node and of its GPUs, and the node's weight cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import psutil

from serve_app.gpu import nvml, placed
from serve_app.telemetry import metrics
from serve_app.weights.cache import bytes_on_node

log = logging.getLogger("ray.serve")

PERIOD_S = 5.0


async def watch(application: str, slot: str, *, gpus: bool, cache: bool) -> None:
    """Say it every few seconds until cancelled; what cannot be read is left out.

    Args:
        cache: whether the slot uses the node's weight cache.
    """
    node = await asyncio.to_thread(placed.own_node)
    while True:
        for kind, free in (await asyncio.to_thread(lambda: dict(_free(gpus=gpus)))).items():
            metrics.HEADROOM.set(free, application, slot, node, kind)
        if cache:
            metrics.NODE_CACHE_BYTES.set(await asyncio.to_thread(bytes_on_node), application, slot, node)
        await asyncio.sleep(PERIOD_S)


def _free(*, gpus: bool) -> Iterator[tuple[str, int]]:
    yield "host", psutil.virtual_memory().available
    if gpus:
        import pynvml

        try:
            found = nvml.read(nvml.visible())
        except pynvml.NVMLError as error:
            log.debug("GPU memory cannot be read: %s", error)
            return
        if found:
            yield "gpu", min(gpu.total - gpu.used for gpu in found)
