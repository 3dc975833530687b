"""Mapping a wake-up's memory as plain memory of this GPU.

vLLM's allocator asks for memory that other nodes can map too (CU_MEM_HANDLE_TYPE_FABRIC), where the driver has such:
a KV connector needs it to move KV caches over multi-node NVLink. Nobody else does, and it is slow to map: 105 GB of KV
cache take 222 ms, plain memory 13-35 ms, and copies that run meanwhile come at half of PCIe's rate (measured on an
H200, driver 580, vLLM 0.26). So what is mapped at a wake-up is plain, unless the engine has a KV connector.

A wake-up with 16 GB of weights took 0.59 s and takes 0.33 s, 1.13 times what PCIe needs for the weights
(`benchmarks/results/gpu_promotion_fabric.json` and `gpu_promotion.json`). In the second after a sleep it is 0.52 s:
the driver still clears what was given back.

What is relied on: vLLM's module `cumem` maps through its global `create_and_map(handle)`, where `handle` is (device,
bytes, address, address of the driver's handle), in 0.26 as in 0.32. Where it is not, vLLM maps itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

from serve_app import cuda

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CUmemAllocationType, CUmemLocationType, CUmemAccess_flags
_RDMA_SUPPORTED = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED


class _Location(ctypes.Structure):
    """CUmemLocation of cuda.h."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@contextmanager
def plain_memory(cumem: Any) -> Iterator[None]:
    """What vLLM maps inside is plain memory.

    Args:
        cumem: the module `vllm.device_allocator.cumem`.
    """
    original = cumem.create_and_map

    def create_and_map(handle: Any) -> None:
        if _is_known(handle):
            _create_and_map(*handle)
        else:
            original(handle)

    cumem.create_and_map = create_and_map
    try:
        yield
    finally:
        cumem.create_and_map = original


def _is_known(handle: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(handle, tuple) and len(handle) == 4 and all(isinstance(value, int) for value in handle)


def _create_and_map(device: int, size: int, address: int, handle_at: int) -> None:
    """Raises RuntimeError; what was made until then ends with the engine's process, which nobody can use any more."""
    driver, where = cuda.driver(), _Location(_DEVICE, device)
    rdma = ctypes.c_int()
    cuda.check(driver.cuDeviceGetAttribute(ctypes.byref(rdma), _RDMA_SUPPORTED, device), "cuDeviceGetAttribute")
    properties = _Properties(type=_PINNED, location=where, rdma=bool(rdma.value))
    handle = ctypes.c_uint64.from_address(handle_at)
    bytes_, at, none = ctypes.c_size_t(size), ctypes.c_uint64(address), ctypes.c_uint64(0)
    cuda.check(driver.cuMemCreate(ctypes.byref(handle), bytes_, ctypes.byref(properties), none), "cuMemCreate")
    cuda.check(driver.cuMemMap(at, bytes_, ctypes.c_size_t(0), handle, none), "cuMemMap")
    access = _Access(where, _READ_WRITE)
    cuda.check(driver.cuMemSetAccess(at, bytes_, ctypes.byref(access), ctypes.c_size_t(1)), "cuMemSetAccess")
