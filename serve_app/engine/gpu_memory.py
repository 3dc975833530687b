"""One engine's memory on its GPUs: free before it starts, remembered for its KV cache, given back when it sleeps."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.engine import caches
from serve_app.engine.base import Unused
from serve_app.errors import MemoryNotReturned
from serve_app.gpu import nvml
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord

if TYPE_CHECKING:
    from serve_app.config import ModelConfig, SlotConfig
    from serve_app.engine.base import Siblings

# How long a slot that died on the same GPU may take to give its memory back, in seconds.
PATIENCE_S = 30.0


class GpuMemory:
    """Does nothing for slots on CPU, and leaves to others what a slot with a part of a GPU cannot know.

    Attributes:
        held: bytes of its GPU that each rank held when it was asked last; empty on CPU. unused: what of them its
            allocator kept for nothing.
    """

    def __init__(self, model: ModelConfig, slot: SlotConfig, siblings: Siblings) -> None:
        self._model = model
        self._slot = slot
        self._siblings = siblings
        self._key = ""  # of the KV cache's record; empty where it is not ours to say
        self._remembered = False
        self.held: tuple[int, ...] = ()
        self.unused: tuple[Unused, ...] = ()

    def prepare(self) -> None:
        """Wait until the GPUs that Ray gave to this slot are free. Blocks. Raises GpuNotFree.

        Over several nodes Ray gives them to the workers: this process has none, and sees those of other slots too. The
        slot's own engines that have started before hold some, asleep.
        """
        if self._slot.gpus >= 1 and self._slot.nodes == 1 and not self._siblings.started:
            nvml.wait_until_free(nvml.visible(), PATIENCE_S)

    def fix_kv_cache(self, args: Namespace, source: str) -> None:
        """Set the KV cache to the size that an earlier start measured, if any did: this one need not measure again."""
        if self._slot.gpus < 1 or args.kv_cache_memory_bytes is not None:
            return
        config = _configuration(Path(source))
        gpus = nvml.read(nvml.visible()[: int(self._slot.gpus)])
        self._leave_room(args, min(gpu.total for gpu in gpus))
        others = self._siblings.count * self._slot.asleep_gpu_gb
        self._key = caches.kv_key(self._model, config, gpus, others)
        args.kv_cache_memory_bytes = caches.remembered_kv_bytes(self._key)
        self._remembered = args.kv_cache_memory_bytes is not None

    def _leave_room(self, args: Namespace, total: int) -> None:
        """Of what vLLM may use, leave to each other engine of the slot what it may hold asleep."""
        if "gpu_memory_utilization" not in self._model.engine_kwargs:
            args.gpu_memory_utilization -= self._siblings.count * self._slot.asleep_gpu_gb * 1e9 / total

    def forget_kv_cache(self) -> None:
        """After a failed start: what was remembered may have been too much."""
        if self._remembered:
            caches.forget_kv_bytes(self._key)

    def learn(self, records: Iterable[StageRecord]) -> None:
        """Remember what the ranks have measured; the smallest counts."""
        measured = [int(r.attributes["bytes"]) for r in records if r.stage == Stage.MEMORY_PROFILE]
        if self._key and measured and not self._remembered:
            caches.remember_kv_bytes(self._key, min(measured))
            self._remembered = True

    def note(self, ranks: Iterable[Sequence[int]]) -> None:
        """Take down what each rank says of itself: see the worker's `gpu_memory`."""
        said = list(ranks)
        self.held = tuple(held for held, _, _ in said)
        self.unused = tuple(Unused(cached, fragmented) for _, cached, fragmented in said)

    def check_asleep(self) -> None:
        """Raise MemoryNotReturned where a rank of an engine that sleeps holds too much."""
        allowed = self._slot.asleep_gpu_gb * 1e9
        for rank, held_bytes in enumerate(self.held):
            if held_bytes > allowed:
                raise MemoryNotReturned(rank, held_bytes, allowed)


def _configuration(directory: Path) -> dict[str, Any]:
    """The model's, as Hugging Face or Mistral keep it; empty if neither does."""
    found = [directory / name for name in ("config.json", "params.json") if (directory / name).is_file()]
    return dict(json.loads(found[0].read_text())) if found else {}
