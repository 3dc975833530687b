"""How fast weights come to a GPU, by its own clock."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Copied(NamedTuple):
    """What one load of a model brought: `size` bytes, from `start_s` (wall clock) on, the last `duration_s` later."""

    start_s: float
    duration_s: float
    size: int


class TimedCopies:
    """Copies that are put into streams one after the other, from the first to the last since `take`.

    Attributes:
        size: their bytes. end: what happens on the GPU when the last one has arrived.
    """

    def __init__(self) -> None:
        self.size = 0
        self.end = torch.cuda.Event(enable_timing=True)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._start_s = 0.0

    def before(self, stream: torch.cuda.Stream) -> None:
        """A copy comes next in this stream."""
        if not self.size:
            self._start_s = time.time()
            self._begin.record(stream)

    def after(self, stream: torch.cuda.Stream, size: int) -> None:
        """One of so many bytes was put into it."""
        self.end.record(stream)
        self.size += size

    def take(self) -> Copied | None:
        """All since the last call, None if there were none; blocks until they have arrived."""
        size, self.size = self.size, 0
        if not size:
            return None
        self.end.synchronize()
        return Copied(self._start_s, self._begin.elapsed_time(self.end) / 1000, size)
