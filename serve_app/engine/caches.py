"""What an engine computes once and every later start reads: compiled code, tuned kernels, the size of the KV cache.

All of it lives in one directory, `$SERVE_APP_HOME/caches` (`~/.cache/serve_app/caches`), which can be copied to another
machine with the same GPU, driver and versions: `serve-app prepare --caches` fills it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from serve_app.config import ModelConfig
from serve_app.gpu import node
from serve_app.gpu.nvml import GpuUse
from serve_app.models import home

# Who reads which variable: vLLM (compile and AOT cache), Triton, torch's inductor, FlashInfer, DeepGEMM, CUDA's driver
# (PTX compiled for this GPU).
_DIRECTORIES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
}
# The KV cache is made this much smaller than the profile said, for what a later start finds less of.
_KV_SLACK = 256 << 20


def directory() -> Path:
    """Where all caches of this node are; it need not exist yet."""
    return home() / "caches"


def environment() -> dict[str, str]:
    """The variables that put everybody's cache below `directory()`."""
    return {name: str(directory() / folder) for name, folder in _DIRECTORIES.items()}


def note_filled() -> None:
    """Keep that an engine of the installed versions has started here, so that `serve-app doctor` knows."""
    with suppress(OSError):  # an engine that runs is no worse for it
        (directory() / "filled_by").mkdir(parents=True, exist_ok=True)
        (directory() / "filled_by" / node.software().versions).touch()


def filled_by() -> tuple[str, ...]:
    """The versions that engines on this node, or on that which the caches were copied from, have started with."""
    return tuple(sorted(file.name for file in (directory() / "filled_by").glob("*")))


def kv_key(model: ModelConfig, config: Mapping[str, Any], gpus: list[GpuUse], others_gb: float) -> str:
    """What the memory left for the KV cache depends on: model, engine settings, versions, GPUs, and who else is there.

    Args:
        config: the model's own. others_gb: what the slot's other engines may hold of a GPU asleep.
    """
    parts = {
        "engine_kwargs": model.engine_kwargs,
        "model": config,
        "others_gb": others_gb,
        "gpus": sorted((gpu.name, gpu.total) for gpu in gpus),
        "versions": [_version(name) for name in ("vllm", "torch")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def remembered_kv_bytes(key: str) -> int | None:
    """Bytes of KV cache per GPU that an earlier start measured; None if none did, or its record is damaged."""
    try:
        found = json.loads(_kv_file(key).read_text())["kv_cache_memory_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def remember_kv_bytes(key: str, measured: int) -> None:
    """Keep what was measured, less some slack. Written whole or not at all; the last of several writers wins."""
    path = _kv_file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"kv_cache_memory_bytes": measured - _KV_SLACK}))
    unfinished.replace(path)


def forget_kv_bytes(key: str) -> None:
    """The next start measures again."""
    _kv_file(key).unlink(missing_ok=True)


def _kv_file(key: str) -> Path:
    return directory() / "kv_cache" / f"{key}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
