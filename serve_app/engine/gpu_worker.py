"""vLLM's own GPU worker, which sleeps and wakes by itself; this one wakes faster, and tells what it does and holds."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.v1.worker import gpu_worker

from serve_app.engine import node_loader  # registers its load format
from serve_app.engine.arguments import NODE_CACHE
from serve_app.engine.mapping import plain_memory
from serve_app.engine.overlap import OverlappedCopies
from serve_app.engine.staged import StagedWorker, record_communicator, record_outside
from serve_app.gpu import numa, nvml
from serve_app.telemetry.stages import Stage
from serve_app.weights.reading import gb_per_s
from serve_app.weights.registered import DirectCopies
from serve_app.weights.timed import Copied

record_communicator(gpu_worker)


class _Sleeping(gpu_worker.Worker):
    """Level 1 in two calls, as `VllmEngine.wake` makes them: "weights" starts the copies, "kv_cache" waits for them.

    vLLM 0.32 waits for them in the first call already; there only the mapping between the weights overlaps.
    """

    device: torch.device
    vllm_config: Any
    _copies: OverlappedCopies | None = None
    _waking = False
    _direct: DirectCopies | None = None

    def init_device(self) -> None:
        """With the node's weight cache, registering it begins here, where the process has its context."""
        super().init_device()
        numa.bind_to(self._uuid)  # before memory is pinned: to the processors of its GPU's node
        load = self.vllm_config.load_config
        if load.load_format == NODE_CACHE:
            self._direct = copies = DirectCopies(self.device)
            node_loader.use_gpu(copies, load, self.vllm_config.model_config.model)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Also the weights are there only once the KV cache is, wherever they come from."""
        cumem = importlib.import_module("vllm.device_allocator.cumem")
        if self._copies is None:
            self._copies = OverlappedCopies(cumem)
        connector = self.vllm_config.kv_transfer_config is not None
        with self._copies.started(), nullcontext() if connector else plain_memory(cumem):
            super().wake_up(tags)
        self._waking = tags is not None and "kv_cache" not in tags
        if not self._waking:
            _note(self._copies.finish())
            self._note_direct()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """What comes from the node's weight cache is copied by DMA; vLLM's own loaders know their ways."""
        with self._directly():
            super().load_model(*args, **kwargs)
        self._note_direct()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As at the start; in the middle of a wake-up nobody waits for the copies yet."""
        with self._directly():
            super().reload_weights(*args, **kwargs)
        if not self._waking:
            self._note_direct()

    @contextmanager
    def _directly(self) -> Iterator[None]:
        if self._direct is None:
            yield
        else:
            with self._direct:
                yield

    def _note_direct(self) -> None:
        """Wait for what comes from the node's weight cache."""
        _note(self._direct.take() if self._direct is not None else None)

    def gpu_memory(self) -> tuple[int, int, int]:
        """Bytes of its GPU that this process holds, as the driver counts them (CUDA context and graphs included); of
        those, what PyTorch's allocator has reserved without a tensor in it; of that again, what lies between tensors.
        """
        stats = torch.cuda.memory_stats(self.device)
        cached = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
        return nvml.held_by_process(self._uuid, os.getpid()), cached, stats.get("inactive_split_bytes.all.current", 0)

    @property
    def _uuid(self) -> str:
        properties: Any = torch.cuda.get_device_properties(self.device)
        return f"GPU-{properties.uuid}"


class SleepingGPUWorker(StagedWorker, _Sleeping):
    """What `worker_cls` names on GPUs."""

    def determine_available_memory(self) -> int:
        """Record vLLM's memory profile, and the bytes that it leaves for the KV cache of this rank."""
        with self._stage(Stage.MEMORY_PROFILE) as record:
            record["bytes"] = available = int(super().determine_available_memory())
        return available

    def _place(self) -> dict[str, Any]:
        return super()._place() | {"gpu_uuid": self._uuid}


def _note(copied: Copied | None) -> None:
    """Record how fast weights came, if any did."""
    if copied is not None:
        rate = gb_per_s(copied.size, copied.duration_s)
        record_outside(
            Stage.WEIGHTS_COPY, copied.start_s, duration_s=copied.duration_s, bytes=copied.size, gb_per_s=rate
        )
