"""Since when Serve has wanted slots that are not there yet: the beginning of a cold start, before it has a process."""

from __future__ import annotations

import time
from collections import deque

from serve_app.pool.capacity import Trouble
from serve_app.pool.messages import Wish

# What was wanted longer ago than this was given up meanwhile.
FORGET_S = 3600.0
WAITS_FOR = {Trouble.INFEASIBLE: "node", Trouble.WAITING: "resources"}


class Wanted:
    """Wall-clock times, one for each slot that is wanted; new slots take the oldest first."""

    def __init__(self) -> None:
        self._since: deque[float] = deque()
        self._trouble, self._trouble_s = "", 0.0

    def raised(self, count: int) -> None:
        """`count` more slots are wanted (fewer, if negative)."""
        for _ in range(count):
            self._since.append(time.time())
        for _ in range(min(-count, len(self._since))):
            self._since.pop()

    def missing(self, trouble: Trouble) -> None:
        """Some of them have no place now. The worst counts: a slot that waited for a node then starts on a free one."""
        worse = trouble is Trouble.INFEASIBLE or not self._trouble
        self._trouble = WAITS_FOR[trouble] if worse else self._trouble
        self._trouble_s = time.time()

    def oldest(self) -> Wish:
        """Take one; a wish without a time if none is known to be wanted."""
        while self._since:
            since = self._since.popleft()
            if time.time() - since < FORGET_S:
                waited_for = self._trouble if self._trouble_s >= since else ""
                self._trouble = self._trouble if self._since else ""
                return Wish(since, waited_for)
        return Wish()
