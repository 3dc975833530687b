"""When new capacity is to be expected: what `Retry-After` says. Pure.

Counted from the measured durations of earlier promotions and cold starts, and rounded up to a few steps: the value goes
to every router, and must not change all the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Transition
from serve_app.pool.view import SlotView
from serve_app.telemetry.stages import Stage

# Where nothing is under way, or nothing has been measured yet.
UNKNOWN_S = 5.0
STEPS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
# As many of the last ones count.
RECENT = 10


def typical_s(ledger: Iterable[Transition]) -> dict[str, float]:
    """Median seconds of the last transitions of each kind that went well; `ledger` has the oldest first."""
    by_kind: dict[str, list[float]] = {}
    for transition in ledger:
        if not transition.error:
            by_kind.setdefault(transition.kind, []).append(transition.duration_s)
    return {kind: statistics.median(seconds[-RECENT:]) for kind, seconds in by_kind.items()}


def retry_after_s(slots: Iterable[SlotView], typical: Mapping[str, float]) -> float:
    """Seconds until the first slot under way is expected to serve, rounded up to a step."""
    expected = [seconds for slot in slots if (seconds := _expected_s(slot, typical)) is not None]
    soonest = min(expected, default=UNKNOWN_S)
    return next((step for step in STEPS_S if step >= soonest), STEPS_S[-1])


def _expected_s(slot: SlotView, typical: Mapping[str, float]) -> float | None:
    """None if the slot is not on its way, or nobody knows how long that takes."""
    promotion = typical.get(Stage.PROMOTION, 0.0)
    if slot.is_coming and promotion:
        return promotion - slot.stayed_s if slot.state is State.PROMOTING else promotion
    if slot.state is State.STARTING and not slot.leaving and Stage.COLD_START in typical:
        return typical[Stage.COLD_START] - slot.stayed_s + promotion
    return None
