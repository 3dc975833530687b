"""Virtual time: what is due next happens next. Events at the same moment happen in the order in which they were set."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    """Attributes: now: seconds since the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._set = 0

    def at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        """`call(*args)` at that time; at once, if it is past or now."""
        self._set += 1
        heapq.heappush(self._due, (max(when_s, self.now), self._set, call, args))

    def run(self, until_s: float) -> None:
        """Everything that is due before or at a time; then it is that time."""
        due = self._due
        while due and due[0][0] <= until_s:
            self.now, _, call, args = heapq.heappop(due)
            call(*args)
        self.now = until_s
