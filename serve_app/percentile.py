"""One definition of a percentile, for everything that reports one."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile, always one of the values; None of nothing.

    Args:
        percent: 0 to 100; 0 is the smallest value. Of fewer than 100 values the 99th percentile is the largest.
    """
    ordered = sorted(values)
    return ordered[max(1, math.ceil(percent / 100 * len(ordered))) - 1] if ordered else None
