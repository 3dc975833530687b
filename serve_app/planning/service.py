"""How fast one simulated engine is: prompts one after the other, then all streams together, the slower the more.

Every stream of an engine advances by one token a step, and a step's duration depends on how many there are. So the
engine keeps one count, tokens since it began, by which all its streams end in the order of count + length: an arrival
or an end costs a heap operation, whatever the number of streams.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping

from serve_app.planning.requests import Request


def pace(token_s: Mapping[int, float], most: int) -> list[float]:
    """Seconds per token for 0 to `most` streams: linear between measured points, and beyond the last as before it.

    Args:
        token_s: streams -> seconds; at least one.
    """
    points = sorted(token_s.items())
    if len(points) == 1:
        return [points[0][1]] * (most + 1)
    found = []
    for streams in range(most + 1):
        index = min(max(1, bisect_left(points, (streams, 0.0))), len(points) - 1)
        (low, low_s), (high, high_s) = points[index - 1 : index + 1]
        share = max(0.0, (streams - low) / (high - low))
        found.append(low_s + share * (high_s - low_s))
    return found


class Engine:
    """The streams of one engine. Times are `now` in seconds, never less than before."""

    def __init__(self, step_s: list[float], prefill_token_s: float, prefill_request_s: float) -> None:
        self._step_s = step_s
        self._prefill_token_s, self._prefill_request_s = prefill_token_s, prefill_request_s
        self._prompts_end_s = 0.0
        self._count = 0.0
        self._counted_s = 0.0
        self._streams: list[tuple[float, int, Request]] = []

    @property
    def streams(self) -> int:
        return len(self._streams)

    @property
    def step_s(self) -> float:
        """Seconds from one token of each stream to its next, now."""
        return self._step_s[len(self._streams)]

    def prompt_ends(self, request: Request, now: float) -> float:
        """When the prompt of a request that comes now has been taken, behind those that came before it."""
        begin = max(now, self._prompts_end_s)
        self._prompts_end_s = begin + self._prefill_request_s + request.prompt_tokens * self._prefill_token_s
        return self._prompts_end_s

    def begin(self, request: Request, now: float) -> None:
        """The prompt is done: tokens come out."""
        self._advance(now)
        heapq.heappush(self._streams, (self._count + request.output_tokens, request.number, request))

    def next_end(self) -> float:
        """When the next stream ends if none begins before; infinite without streams."""
        if not self._streams:
            return float("inf")
        return self._counted_s + max(0.0, self._streams[0][0] - self._count) * self._step_s[len(self._streams)]

    def end(self, now: float) -> Request:
        """Take out the stream that ends now."""
        self._advance(now)
        return heapq.heappop(self._streams)[2]

    def clear(self) -> None:
        self._streams.clear()
        self._prompts_end_s = 0.0

    def _advance(self, now: float) -> None:
        if self._streams:
            self._count += (now - self._counted_s) / self._step_s[len(self._streams)]
        self._counted_s = now
