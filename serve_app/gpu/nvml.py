"""GPU memory as the driver counts it, through NVML: whole GPUs, and what single processes hold of them.

A GPU is named by its UUID (`GPU-...`): indices depend on CUDA_VISIBLE_DEVICES, UUIDs do not. Sizes are bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serve_app.errors import GpuNotFree

# What the driver itself and a display may hold of a GPU that nobody computes on; an idle H200 shows 0.6e9.
IDLE_BYTES = 1_500_000_000
_POLL_S = 0.5


@dataclass(frozen=True)
class GpuUse:
    """One GPU now.

    Attributes:
        total, used: bytes.
        holders: bytes by process id; empty where the driver does not tell (some containers hide processes).
    """

    uuid: str
    name: str
    total: int
    used: int
    holders: Mapping[int, int]


def read(uuids: Sequence[str]) -> list[GpuUse]:
    """The GPUs with these UUIDs; milliseconds. Raises pynvml.NVMLError where there is no driver or no such GPU."""
    with _library() as nvml:
        return [_read(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]


def visible() -> list[str]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES lets this process see (Ray sets it in each replica).

    Raises:
        pynvml.NVMLError: no driver, or a name in CUDA_VISIBLE_DEVICES that it does not know.
    """
    with _library() as nvml:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = range(nvml.nvmlDeviceGetCount()) if chosen is None else filter(None, chosen.split(","))
        return [str(nvml.nvmlDeviceGetUUID(_handle(nvml, str(name).strip()))) for name in names]


def all_uuids() -> list[str]:
    """UUIDs of all GPUs of this machine, whatever CUDA_VISIBLE_DEVICES says. Raises pynvml.NVMLError: no driver."""
    with _library() as nvml:
        return [
            str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
            for index in range(nvml.nvmlDeviceGetCount())
        ]


def compute_capabilities() -> list[str]:
    """Those of this machine's GPUs, each once, as "9.0". Raises pynvml.NVMLError: no driver."""
    with _library() as nvml:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        found = sorted({nvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles})
        return [f"{major}.{minor}" for major, minor in found]


def pcie_link(uuid: str) -> dict[str, int]:
    """The fields of a `Gpu` that describe its PCIe link; zeros where the driver does not tell (virtual GPUs)."""
    asked = {
        "generation": "nvmlDeviceGetMaxPcieLinkGeneration",  # of GPU and machine together; the current one idles
        "width": "nvmlDeviceGetCurrPcieLinkWidth",
        "full_generation": "nvmlDeviceGetGpuMaxPcieLinkGeneration",
        "full_width": "nvmlDeviceGetMaxPcieLinkWidth",
    }
    with _library() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        try:
            return {field: int(getattr(nvml, name)(handle)) for field, name in asked.items()}
        except nvml.NVMLError:
            return dict.fromkeys(asked, 0)


def held_by_process(uuid: str, pid: int) -> int:
    """Bytes of one GPU that a process holds; all that is used there, where the driver hides processes."""
    [gpu] = read([uuid])
    return gpu.holders.get(pid, gpu.used) if gpu.holders else gpu.used


def driver() -> dict[str, Any]:
    """The driver's version, the newest CUDA it supports (major, minor), and how many GPUs it shows; milliseconds.

    Raises:
        pynvml.NVMLError: no driver.
    """
    with _library() as nvml:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return {
            "driver": str(nvml.nvmlSystemGetDriverVersion()),
            "driver_cuda": (cuda // 1000, cuda % 1000 // 10),
            "gpus": nvml.nvmlDeviceGetCount(),
        }


def pci_address(uuid: str) -> str:
    """Where the GPU is on the PCI bus, as the kernel writes it: `0000:3b:00.0`."""
    with _library() as nvml:
        found = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
        return f"{found.domain:04x}:{found.bus:02x}:{found.device:02x}.0"


def wait_until_free(uuids: Sequence[str], patience_s: float) -> None:
    """Wait until nobody holds memory of these GPUs: a slot that died gives it back within seconds. Blocks.

    Raises:
        GpuNotFree: somebody still does after `patience_s` seconds; it names processes and bytes.
    """
    deadline = time.monotonic() + patience_s
    while held := [gpu for gpu in read(uuids) if gpu.used > IDLE_BYTES]:
        if time.monotonic() > deadline:
            raise GpuNotFree(leftovers(held), patience_s)
        time.sleep(_POLL_S)


def leftovers(gpus: Sequence[GpuUse]) -> str:
    """One phrase for people: which GPUs hold how much, by which processes. Pure."""
    return "; ".join(
        f"{gpu.uuid} {gpu.used / 1e9:.1f} GB by "
        + (", ".join(f"pid {pid} ({held / 1e9:.1f} GB)" for pid, held in gpu.holders.items()) or "an unknown process")
        for gpu in gpus
    )


@contextmanager
def _library() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _read(nvml: Any, handle: Any) -> GpuUse:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    holders = {process.pid: process.usedGpuMemory for process in processes if process.usedGpuMemory}
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return GpuUse(str(uuid), str(name), memory.total, memory.used, holders)
