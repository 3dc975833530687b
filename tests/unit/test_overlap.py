"""What a wake-up's copies are replaced by; that they arrive needs a GPU (tests/gpu/test_tiers.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve_app.engine.overlap import OverlappedCopies


class Gpu:
    """Notes what it is told, in order; a copy takes as many milliseconds as it has bytes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.now_ms = 0.0
        patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        patch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=7))
        patch.setattr(
            torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=lambda _: self.told.append("wait"))
        )

    def copy(self, destination: int, source: int, count: int, kind: int, stream: int) -> int:
        assert (kind, stream) == (1, 7)
        self.told.append(f"copy {source} to {destination}")
        self.now_ms += count
        return 0


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at_ms = gpu, 0.0

    def record(self, _: Any) -> None:
        self.at_ms = self.gpu.now_ms

    def synchronize(self) -> None:
        self.gpu.told.append("synchronize")

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_copies_are_started_in_one_stream_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's next kernels come after them; they took from the begin of the first one to the end of the last."""
    gpu = Gpu(monkeypatch)
    runtime = SimpleNamespace(
        lib=SimpleNamespace(cudaMemcpyAsync=lambda *how: gpu.copy(*how)), cudaMemcpy=print, CUDART_CHECK=bool
    )
    cumem = SimpleNamespace(libcudart=runtime)
    copies = OverlappedCopies(cumem)
    with copies.started():
        cumem.libcudart.cudaMemcpy(1, 2, 300)
        cumem.libcudart.cudaMemcpy(3, 4, 200)
    assert cumem.libcudart is runtime
    assert gpu.told == ["copy 2 to 1", "copy 4 to 3", "wait"]
    copied = copies.finish()
    assert copied is not None and (copied.duration_s, copied.size) == (0.5, 500)
    assert gpu.told[-1] == "synchronize"
    with copies.started():  # the KV cache brings nothing
        pass
    assert copies.finish() is None and gpu.told.count("wait") == 1
