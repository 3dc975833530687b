"""How a model is spread over GPUs, as shapes of a slot; and what the machine itself can do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.configs import Shape

# (tensor parallel, pipeline parallel)
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}

# Bytes over seconds of copies from pinned host memory, in a process of its own: CUDA must not stay initialised here.
_BANDWIDTH = """
import time, torch
size = 4 << 30
host, gpu = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")
rates = []
for _ in range(4):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    gpu.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    rates.append(size / (time.perf_counter() - begin))
print(max(rates))
"""


def shape(model: Path, layout: str, hard: int, **engine_kwargs: Any) -> Shape:
    """A slot that serves the model in `model` on as many whole GPUs as the layout needs."""
    tensor, pipeline = LAYOUTS[layout]
    kwargs: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(hard, 64), "gpu_memory_utilization": 0.85}
    if tensor > 1:
        # Else FlashInfer compiles an all-reduce at the first start: minutes on a machine without its caches.
        kwargs |= {"tensor_parallel_size": tensor, "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
    if pipeline > 1:
        kwargs |= {"pipeline_parallel_size": pipeline}
    return Shape(
        model=model.name,
        source=str(model),
        engine_kwargs=kwargs | engine_kwargs,
        hard=hard,
        cpus=2,
        gpus=tensor * pipeline,
    )


def pinned_bytes_per_s() -> float:
    """What PCIe gives from pinned host memory to one GPU; the best of four copies of 4 GiB."""
    done = subprocess.run([sys.executable, "-c", _BANDWIDTH], capture_output=True, text=True, check=True)
    return float(done.stdout)
