"""What `serve-app doctor` looks at on a node beyond what every slot checks before it starts: seconds, bounded."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx
import psutil

from serve_app.gpu import disk, numa, nvml
from serve_app.gpu.facts import Gpu, Holder, HttpPort, Survey

SHM = Path("/dev/shm")
_ANSWER_S = 2.0
# Of whose children a GPU's memory may be: Ray's node process, and the keeper of the forkserver that engines come from.
_OURS = ("raylet/raylet", "engine/keeper.py")


def survey(
    *,
    models: Mapping[str, tuple[str, ...] | None],
    files: list[Path],
    scratch: Path,
    caches: tuple[str, ...],
    http_port: int,
    keys_file: str,
) -> Survey:
    """Look at this node. Touches no GPU; blocks for some seconds, most of them for the disk.

    Args:
        models: what is wrong with their files, by source; None where they are not here. files: their weights.
        scratch: where a file may be written to measure the disk, if there are no weights.
        keys_file: with API keys, which proxies here are told to read; empty if there is none.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Survey(
        gpus=gpus(),
        numa_nodes=len(list((numa.SYSTEM / "devices/system/node").glob("node[0-9]*"))) or 1,
        shm_bytes=shutil.disk_usage(SHM).total if SHM.is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # Ray and vLLM raise the soft limit to it
        locked_bytes=None if limit == resource.RLIM_INFINITY else limit,
        disk=disk.measure(files, scratch),
        models=models,
        caches=caches,
        http=who_answers(http_port),
        rays_environment=rays_environment(),
        unreadable_keys="" if os.access(keys_file or "/", os.R_OK) else keys_file,
    )


def gpus() -> tuple[Gpu, ...]:
    """All GPUs that the driver shows; none where there is no driver."""
    import pynvml

    try:
        return tuple(
            Gpu(
                uuid=use.uuid,
                used=use.used,
                holders=tuple(holder(pid, held) for pid, held in use.holders.items()),
                numa=numa.node_of(nvml.pci_address(use.uuid)),
                **nvml.pcie_link(use.uuid),
            )
            for use in nvml.read(nvml.all_uuids())
        )
    except pynvml.NVMLError:
        return ()


def holder(pid: int, held: int) -> Holder:
    """A process that holds GPU memory, as far as it is visible from here."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())[:80] or process.name()
        return Holder(pid, held, command, any(_is_ours(one) for one in (process, *process.parents())))
    except psutil.Error:
        return Holder(pid, held)


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any(mark in word for word in process.cmdline() for mark in _OURS)
    except psutil.Error:
        return False


def who_answers(port: int) -> HttpPort:
    """Who is behind this node's HTTP port."""
    with socket.socket() as probe:
        probe.settimeout(_ANSWER_S)
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return HttpPort.FREE
    if _says(port, "/health/live", '"live"'):
        return HttpPort.OURS
    return HttpPort.PLAIN if _says(port, "/-/healthz", "success") else HttpPort.TAKEN


def _says(port: int, path: str, word: str) -> bool:
    try:
        return word in httpx.get(f"http://127.0.0.1:{port}{path}", timeout=_ANSWER_S, trust_env=False).text
    except httpx.HTTPError:
        return False


def rays_environment(processes: Iterable[psutil.Process] | None = None) -> dict[str, str] | None:
    """The environment with which Ray's node process was started, which all of Ray's and Serve's processes inherit.

    Args:
        processes: where to look for it; None: this process and those that started it.

    Returns:
        None where there is no such process, or where it is somebody else's.
    """
    here = psutil.Process()
    for process in processes if processes is not None else (here, *here.parents()):
        try:
            if any("raylet/raylet" in word for word in process.cmdline()[:1]):
                return process.environ()
        except psutil.Error:
            return None
    return None
