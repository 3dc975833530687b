"""How many slots a burst has lately needed at once: the standbys that `slots.standby: auto` keeps. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

# What was longer ago says nothing about the next burst.
MEMORY_S = 3600.0


@dataclass
class Peaks:
    """Remembers how many slots were busy (active, or about to be), as a list of changes.

    Attributes:
        _found: the last answer and the span it is for, as long as nothing has changed: it is asked for with every view.
    """

    _changes: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    _found: tuple[float, int] | None = None

    def update(self, busy: int, now: float) -> None:
        """`now` in seconds of a monotonic clock."""
        if not self._changes or self._changes[-1][1] != busy:
            self._changes.append((now, busy))
            self._found = None
        while len(self._changes) > 1 and self._changes[1][0] < now - MEMORY_S:
            self._changes.popleft()
            self._found = None

    def largest_rise(self, span_s: float) -> int:
        """By how many slots the need has risen at most within `span_s`: in that time no standby could be replaced."""
        if self._found is None or self._found[0] != span_s:
            self._found = (span_s, self._find_rise(span_s))
        return self._found[1]

    def _find_rise(self, span_s: float) -> int:
        lows: deque[tuple[float, int]] = deque()  # (until when it held, level), rising: a sliding minimum
        largest, changes = 0, list(self._changes)
        ends = [*(at for at, _ in changes[1:]), float("inf")]
        for (begin, busy), end in zip(changes, ends, strict=False):
            while lows and lows[0][0] < begin - span_s:
                lows.popleft()
            largest = max(largest, busy - min(busy, lows[0][1] if lows else busy))
            while lows and lows[-1][1] >= busy:
                lows.pop()
            lows.append((end, busy))
        return largest
