"""Waking from host memory at the speed of PCIe: the weights' copies run while the memory for the rest is mapped.

vLLM's allocator maps and copies one block after the other and waits for each copy; the KV cache is mapped after that.
Mapping is work for the CPU and the driver, copying for the copy engine. On an H200 with an 8B model (16 GB of weights,
105 GB of KV cache) that was 0.50 s + 0.21 s where the copies alone take 0.29 s (measured, vLLM 0.26); with plain
memory (`mapping.py`) both together take 0.33 s. vLLM 0.32 waits for the copies before the KV cache's turn: there the
mapping of the KV cache comes on top.

What is relied on: vLLM's module `cumem` copies through its global `libcudart` with `cudaMemcpy(destination, source,
bytes)`, in 0.26 as in 0.32. Where it does not, nothing is changed.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from serve_app.weights.timed import Copied, TimedCopies

logger = logging.getLogger(__name__)

_HOST_TO_DEVICE = 1  # cudaMemcpyKind


class OverlappedCopies:
    """The copies of one wake-up; `finish` must be called before anything reads what they bring.

    Args:
        cumem: the module `vllm.device_allocator.cumem`.
    """

    def __init__(self, cumem: Any) -> None:
        self._cumem = cumem
        self._stream = torch.cuda.Stream()
        self._timed = TimedCopies()
        self._copy_async: Any = None
        library = getattr(getattr(cumem, "libcudart", None), "lib", None)
        if library is not None and hasattr(cumem.libcudart, "cudaMemcpy"):
            self._copy_async = library.cudaMemcpyAsync
            self._copy_async.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
            ]  # fmt: skip
            self._copy_async.restype = ctypes.c_int
        else:
            logger.warning("this vLLM copies otherwise than known: weights wake up one block after the other")

    @contextmanager
    def started(self) -> Iterator[None]:
        """What vLLM copies inside is started, and not waited for.

        Its host buffers go back to torch's pool of pinned memory at once. Nothing takes them from there before
        `finish`: vLLM pins nothing as large while it wakes up.
        """
        if self._copy_async is None:
            yield
            return
        original = self._cumem.libcudart
        self._cumem.libcudart = _Asynchronous(original, self._copy)
        try:
            yield
        finally:
            self._cumem.libcudart = original
            if self._timed.size:  # what vLLM itself writes next, into buffers among the weights, comes after the copies
                torch.cuda.current_stream().wait_event(self._timed.end)

    def finish(self) -> Copied | None:
        """Wait until all is there, and say what came, by the GPU's own clock."""
        return self._timed.take()

    def _copy(self, destination: int, source: int, count: int) -> None:
        self._timed.before(self._stream)
        status = self._copy_async(destination, source, count, _HOST_TO_DEVICE, self._stream.cuda_stream)
        self._cumem.libcudart.CUDART_CHECK(status)
        self._timed.after(self._stream, count)


class _Asynchronous:
    """vLLM's binding of the CUDA runtime, but for copies."""

    def __init__(self, original: Any, copy: Callable[[int, int, int], None]) -> None:
        self._original, self.cudaMemcpy = original, copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
