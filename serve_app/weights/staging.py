"""On GPUs: parameters are filled through pinned buffers, on several processor cores, while the last piece still copies.

PyTorch copies from ordinary memory to a GPU through a small buffer of the driver's, on one core, and waits for the end:
6-9 GB/s on an H200, where PCIe gives 55 (measured, shared notes). Here a piece is copied into a pinned buffer by all
threads that PyTorch may use, and is sent from there while the next piece is copied into the other buffer. What a rank
does not take of a tensor is never touched.

Not measured yet: this code has not run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

BUFFER_BYTES = 64 << 20
# Beyond this many, copying within host memory gains little: 16 threads reached 42 GB/s on that machine.
_MOST_THREADS = 16


@contextmanager
def staged_copies(device: torch.device) -> Iterator[None]:
    """Inside, `parameter.copy_(tensor)` from host memory to `device` goes through pinned buffers.

    The copies are put into the current stream, as PyTorch's own are: what is launched after them sees their result. On
    return all are done and the buffers are free.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    try:
        with StagedCopies(device):
            yield
        torch.cuda.synchronize(device)
    finally:
        torch.set_num_threads(threads)


class StagedCopies(TorchFunctionMode):
    """Takes over `copy_` while it is active; everything else runs as it is."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._buffers = cycle([_Buffer(device), _Buffer(device)])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and self._is_ours(*args[:2]):
            for target, source in pieces(args[0].detach(), args[1], BUFFER_BYTES):
                next(self._buffers).send(target, source)
            return args[0]
        return func(*args, **(kwargs or {}))

    def _is_ours(self, target: Any, source: Any = None) -> bool:
        """Plain copies to our GPU; where types or shapes differ, PyTorch knows better what to do."""
        return (
            isinstance(source, torch.Tensor)
            and target.device == self._device
            and source.device.type == "cpu"
            and (target.dtype, target.shape) == (source.dtype, source.shape)
            and not source.is_pinned()
        )


class _Buffer:
    """Pinned memory, and whether what was sent from it has arrived."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._sent = torch.cuda.Event()
        self._device = device

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._sent.synchronize()  # returns at once before the first use
        size = source.numel() * source.element_size()
        staged = self._memory[:size].view(source.dtype).view(source.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))


def pieces(target: torch.Tensor, source: torch.Tensor, most_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views that together are the whole tensors, none of them larger than `most_bytes` unless one element is.

    Cut along the first dimension, whose rows follow each other in memory; a row that is too large along the next.
    """
    size = source.numel() * source.element_size()
    if size <= most_bytes or source.dim() == 0:
        if size:
            yield target, source
        return
    row_bytes = size // source.shape[0]
    if row_bytes > most_bytes:
        for into, row in zip(target, source, strict=True):
            yield from pieces(into, row, most_bytes)
        return
    rows = most_bytes // row_bytes
    yield from zip(target.split(rows), source.split(rows), strict=True)
