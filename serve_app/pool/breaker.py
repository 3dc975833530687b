"""The golden breaker: where so much different hardware fails the golden check, the check is the likelier culprit. Pure.

Serve starts a new slot, under a new name, on the GPUs of one that has failed its start; so not slots are counted but
what they compute on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.pool.messages import SlotReport

# A failure that nobody has reported for this long was one of its own, not part of what happens now.
FORGET_S = 3600.0


@dataclass
class Breaker:
    """`now` is in seconds of one monotonic clock."""

    _failed: dict[frozenset[str], float] = field(default_factory=dict[frozenset[str], float])

    def on_report(self, report: SlotReport, now: float) -> None:
        """A slot that differs and serves all the same (`verify: warn`) says so for as long as it does."""
        if report.golden_failed:
            self._failed[_hardware(report)] = now

    def count(self, now: float) -> int:
        """How many have failed lately that share nothing."""
        self._failed = {where: at for where, at in self._failed.items() if now - at <= FORGET_S}
        counted: set[str] = set()
        count = 0
        for where in sorted(self._failed, key=len):
            count += counted.isdisjoint(where)
            counted |= where
        return count


def _hardware(report: SlotReport) -> frozenset[str]:
    """GPUs; the nodes of a slot that spans several, as only its workers know their GPUs; without either the slot."""
    nodes = frozenset(report.ranks)
    return frozenset(report.gpus) or (nodes if len(nodes) > 1 else frozenset({report.slot}))
