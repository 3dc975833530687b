"""A vLLM worker for CPUs whose sleep is real: memory goes back to the operating system and comes back on wake-up.

vLLM's own CPU worker ignores `sleep`. With this one the engine's sleep API, levels and tags mean on CPU what they mean
on CUDA, so that the whole pool can be run and tested without a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from serve_app.engine import node_loader  # noqa: F401  (registers its load format)
from serve_app.engine.staged import StagedWorker, record_communicator

_libc = ctypes.CDLL(None, use_errno=True)


record_communicator(cpu_worker)


class _Sleeping(CPUWorker):
    """Level 1 gives the KV cache back (weights are in host memory as it is); level 2 the weights as well.

    After level 2 the order is vLLM's: `wake_up(["weights"])`, `reload_weights()`, `wake_up(["kv_cache"])`. Addresses
    stay what they were, and memory comes back page by page as it is touched: there is nothing to do in `wake_up`.
    """

    def sleep(self, level: int = 1) -> None:
        """Give memory back; doing it twice changes nothing."""
        _give_back(_storages(_tensors(self.model_runner.kv_caches)))
        if level >= 2:
            self._give_back_weights()
        gc.collect()
        _trim_heap()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing: see the class. Weights still need a reload."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Read weights, and pack those that vLLM's reload leaves unpacked (an lm_head tied to embeddings)."""
        for module in _packed_linears(self.model_runner.get_model()):
            module.cpu_linear = None  # of the weights before, where they are replaced in an awake engine
        super().reload_weights(*args, **kwargs)
        for module in _packed_linears(self.model_runner.get_model()):
            if module.cpu_linear is None:
                module.quant_method.process_weights_after_loading(module)

    def _give_back_weights(self) -> None:
        model = self.model_runner.get_model()
        for module in _packed_linears(model):
            module.cpu_linear = None  # holds the packed copy of the weight, often the only one
        # A reload restores parameters only: what a buffer shares with one must stay.
        kept = {storage.data_ptr() for storage in _storages(model.buffers())}
        _give_back(storage for storage in _storages(model.parameters()) if storage.data_ptr() not in kept)


class SleepingCPUWorker(StagedWorker, _Sleeping):
    """What `worker_cls` names: a worker that sleeps and records its stages."""


def _packed_linears(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "cpu_linear")]


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All tensors of a KV cache list, which nests for some models."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The distinct, non-empty storages behind the tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return list({s.data_ptr(): s for s in storages if s.size()}.values())


def _give_back(storages: Iterable[torch.UntypedStorage]) -> None:
    """Return the storages' pages to the system; reading them gives zeros from then on.

    Zeros matter: stale bytes in a KV cache may be NaN, which masked attention would spread. Only whole pages can be
    returned, so what lies before the first and behind the last one is overwritten.
    """
    for storage in storages:
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.size()
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            ctypes.memset(begin, 0, end - begin)
            continue
        ctypes.memset(begin, 0, first - begin)
        ctypes.memset(last, 0, end - last)
        if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"madvise of {last - first} bytes: {os.strerror(ctypes.get_errno())}")


def _trim_heap() -> None:
    trim = getattr(_libc, "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
