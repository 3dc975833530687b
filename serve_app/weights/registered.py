"""On GPUs: the copy engine reads the node's weights where they lie, in shared memory that is registered with CUDA.

Memory that CUDA does not know goes to a GPU through a small buffer of the driver's, on one processor core, and the
caller waits: 6-9 GB/s on an H200. Registered, it goes at PCIe's speed, and nobody waits. Registering pins pages that
exist, in this process: read-only 17 GB/s there, with DMA from it at 53 of 55 GB/s; filling pinned buffers of our own
came to 19-23 GB/s on 16 cores (measured on an H200 with driver 580, CUDA 13).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from typing import Any, NamedTuple

import numpy
import torch
from torch.overrides import TorchFunctionMode

from serve_app import cuda
from serve_app.weights.cache import Weights
from serve_app.weights.timed import Copied, TimedCopies

logger = logging.getLogger(__name__)

_REGISTER_READ_ONLY = 0x08  # CU_MEMHOSTREGISTER_READ_ONLY
_HOST, _DEVICE = 1, 2  # CUmemorytype


class Rows(NamedTuple):
    """One copy of `height` rows of `width` bytes; the distances between the beginnings of rows, in bytes."""

    height: int
    width: int
    source_pitch: int
    target_pitch: int


class Registered:
    """A model's weights in the cache, for this process's GPU; registering begins at once, on a thread of its own."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._image: mmap.mmap | None = None
        self._views_at = 0  # 0: there are none yet
        self._size = weights.checkpoint.image_size
        self._map = weights.mapped(mmap.ACCESS_READ)
        self._address = _begin(self._map)
        self._usable = False
        self._thread = threading.Thread(target=self._register, args=(device,), name="register-weights", daemon=True)
        self._thread.start()

    def hand_out(self, image: mmap.mmap) -> None:
        """From now on vLLM's tensors are views (`views.tensors`) of this private mapping of the same file.

        One that cannot be written would end the process of a loader that changes what it was given. It is kept until
        the next one: once it is gone, another model's may lie at the same address, and would be taken for these
        weights. Its pages cost nothing, as nobody reads them.
        """
        self._image, self._views_at = image, _begin(image)

    def find(self, tensor: torch.Tensor) -> int:
        """Where this tensor's bytes lie in registered memory; 0 if they do not, or are not those of the file any more.

        Waits until they are registered.
        """
        offset = tensor.data_ptr() - self._views_at
        # A view counts the writes to what it is a view of: after one, the private mapping has bytes of its own.
        if not self._views_at or not 0 <= offset < self._size or tensor._version:
            return 0
        self._thread.join()
        return self._address + offset if self._usable else 0

    def close(self) -> None:
        """Undo it; what was copied from there must have arrived."""
        self._thread.join()
        if self._usable:
            cuda.driver().cuMemHostUnregister(ctypes.c_void_p(self._address))
            self._usable = False

    def _register(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # makes its context that of this thread
        size, flags = ctypes.c_size_t(self._size), ctypes.c_uint(_REGISTER_READ_ONLY)
        status = cuda.driver().cuMemHostRegister_v2(ctypes.c_void_p(self._address), size, flags)
        self._usable = status == 0
        if status:
            logger.warning("CUDA does not register the node's weight cache (error %d): weights come slower", status)


class DirectCopies(TorchFunctionMode):
    """While it is active, `parameter.copy_(tensor)` from registered memory to this GPU is one asynchronous DMA.

    It is put into the current stream, as PyTorch's own copies are: what is launched after it sees its result.
    Everything else runs as it is.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._sources: list[Registered] = []
        self._timed = TimedCopies()

    def add(self, weights: Weights) -> Registered:
        """From now on these weights are copied so."""
        source = Registered(weights, self._device)
        self._sources.append(source)
        return source

    def remove(self, source: Registered) -> None:
        """Blocks until its copies have arrived."""
        torch.cuda.synchronize(self._device)
        self._sources.remove(source)
        source.close()

    def take(self) -> Copied | None:
        """What has been copied since the last call, by the GPU's own clock; blocks until it has arrived."""
        return self._timed.take()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and self._copied(*args[:2]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _copied(self, target: Any, source: Any = None) -> bool:
        """Whether it was a plain copy of ours to our GPU; what is not so simple PyTorch does."""
        if not (isinstance(source, torch.Tensor) and source.device.type == "cpu" and target.device == self._device):
            return False
        rows = as_rows(target, source)
        address = next((found for each in self._sources if (found := each.find(source))), 0) if rows else 0
        if rows and address:
            self._start(target.data_ptr(), address, rows)
        return bool(address)

    def _start(self, target: int, address: int, rows: Rows) -> None:
        stream = torch.cuda.current_stream(self._device)
        self._timed.before(stream)
        _copy(target, address, rows, stream.cuda_stream)
        self._timed.after(stream, rows.height * rows.width)


def as_rows(target: torch.Tensor, source: torch.Tensor) -> Rows | None:
    """How to copy `source` as it lies into `target` as it lies; None if that is more than rows of bytes. Pure."""
    if (target.dtype, target.shape) != (source.dtype, source.shape) or not source.numel():
        return None
    item, size = source.element_size(), source.numel() * source.element_size()
    if source.is_contiguous() and target.is_contiguous():
        return Rows(1, size, size, size)
    if source.dim() != 2 or source.stride(1) != 1 or target.stride(1) != 1:
        return None
    return Rows(source.shape[0], source.shape[1] * item, source.stride(0) * item, target.stride(0) * item)


def _begin(mapped: mmap.mmap) -> int:
    """The address at which it begins."""
    return int(numpy.frombuffer(mapped, numpy.uint8).ctypes.data)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t), ("srcY", ctypes.c_size_t), ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p), ("srcDevice", ctypes.c_uint64), ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t), ("dstY", ctypes.c_size_t), ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p), ("dstDevice", ctypes.c_uint64), ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t),
    )  # fmt: skip


def _copy(target: int, source: int, rows: Rows, stream: int) -> None:
    """Start the copy from host address `source` to device address `target`. Raises RuntimeError if CUDA refuses."""
    if rows.height == 1:
        status = cuda.driver().cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(rows.width), ctypes.c_void_p(stream)
        )
    else:
        how = _Copy2D(srcMemoryType=_HOST, srcHost=source, srcPitch=rows.source_pitch)
        how.dstMemoryType, how.dstDevice, how.dstPitch = _DEVICE, target, rows.target_pitch
        how.WidthInBytes, how.Height = rows.width, rows.height
        status = cuda.driver().cuMemcpy2DAsync_v2(ctypes.byref(how), ctypes.c_void_p(stream))
    cuda.check(status, "copying weights from the node's cache to the GPU")
