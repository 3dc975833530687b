"""Whether one set of measured times differs from another: percentiles, intervals, verdicts. Pure statistics.

The interval of a difference comes from a bootstrap: both sets are drawn again with replacement, thousands of times,
and the middle of the differences that this gives is the interval. What shares its fate is drawn together: requests of
one burst wait for the same promotion, and drawn one by one they would count as if each had been a burst of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from serve_app.percentile import percentile

# Of the resamples, so many lie beyond each end of an interval: fewer make the ends a matter of luck.
BEYOND = 20
MIN_RESAMPLES = 4000
# Numbers held in memory at a time.
CHUNK = 4_000_000

Array = Any


class Verdict(StrEnum):
    """Of B against A, where less is better."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference shown"
    TOO_FEW = "too few to tell"


@dataclass(frozen=True)
class Sample:
    """What was measured once or often.

    Attributes:
        values: at least one.
        groups: for each value, which group it belongs to; values of one group are not independent of each other.
    """

    values: tuple[float, ...]
    groups: tuple[int, ...]

    @property
    def group_count(self) -> int:
        return len(set(self.groups))


@dataclass(frozen=True)
class Difference:
    """B less A, of one percentile or, with `percent` None, of the mean.

    Attributes:
        low, high: the interval of the difference; None where there was too little to tell.
        needed: how many values of each set it would have taken; 0 where there were enough.
    """

    percent: float | None
    before: float
    after: float
    low: float | None
    high: float | None
    verdict: Verdict
    needed: int = 0

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def relative(self) -> float | None:
        """The change as a part of what it was before; None if that was nothing."""
        return self.change / self.before if self.before else None


def independent(values: Sequence[float]) -> Sample:
    """Values each of which was measured by itself."""
    return Sample(tuple(values), tuple(range(len(values))))


def needed(percent: float, error: float) -> int:
    """How many values it takes for their own range to hold the percentile but with a chance of `error`.

    No interval made from fewer values can promise more. 6 for a median and 72 for a 95th percentile, at 0.05.
    """
    rarest = max(percent, 100 - percent) / 100
    return math.ceil(math.log(error / 2) / math.log(rarest))


def enough(sample: Sample, percent: float | None, error: float) -> int:
    """0 if there are enough values, in enough groups, else how many values, or groups, are needed."""
    groups = needed(50, error)
    if sample.group_count < groups:
        return groups
    values = groups if percent is None else needed(percent, error)
    return values if len(sample.values) < values else 0


def differences(
    before: Sample, after: Sample, percents: Sequence[float | None], error: float, seed: int = 0
) -> list[Difference]:
    """One for each of the percentiles, None for the mean.

    Args:
        error: the chance, from 0 to 1, that an interval does not hold the true difference. Who looks at several
            intervals divides it among them.
        seed: the same gives the same intervals.
    """
    resamples = max(MIN_RESAMPLES, math.ceil(2 * BEYOND / error))
    generators = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2)]
    drawn = [
        _resampled(sample, percents, resamples, generator)
        for sample, generator in zip((before, after), generators, strict=True)
    ]
    found: list[Difference] = []
    for index, percent in enumerate(percents):
        a, b = _statistic(before.values, percent), _statistic(after.values, percent)
        missing = max(enough(before, percent, error), enough(after, percent, error))
        if missing:
            found.append(Difference(percent, a, b, None, None, Verdict.TOO_FEW, missing))
            continue
        low, high = np.quantile(drawn[1][index] - drawn[0][index], (error / 2, 1 - error / 2))
        verdict = Verdict.WORSE if low > 0 else Verdict.BETTER if high < 0 else Verdict.SAME
        found.append(Difference(percent, a, b, float(low), float(high), verdict))
    return found


def _statistic(values: Sequence[float], percent: float | None) -> float:
    return math.fsum(values) / len(values) if percent is None else _percentile(values, percent)


def _percentile(values: Sequence[float], percent: float) -> float:
    found = percentile(values, percent)
    assert found is not None, "a sample has at least one value"
    return found


def _resampled(sample: Sample, percents: Sequence[float | None], resamples: int, generator: Any) -> Array:
    """Every statistic of every resample: a row a statistic."""
    names, group_of = np.unique(np.asarray(sample.groups), return_inverse=True)
    order = np.argsort(sample.values, kind="stable")
    ordered, group_of = np.asarray(sample.values, dtype=float)[order], group_of[order]
    # Of each group, how many of its values are among the first 1, 2, 3 ... of all.
    up_to = np.cumsum(group_of == np.arange(len(names))[:, None], axis=1, dtype=np.int32)
    rows = max(1, CHUNK // len(names))
    parts = []
    for begin in range(0, resamples, rows):
        drawn = _drawn(len(names), min(rows, resamples - begin), generator)
        total = drawn @ up_to[:, -1]
        sums = np.bincount(group_of, weights=ordered, minlength=len(names))
        parts.append(
            [
                drawn @ sums / total
                if percent is None
                else ordered[_position(drawn, up_to, np.maximum(1, np.ceil(percent / 100 * total)))]
                for percent in percents
            ]
        )
    return np.concatenate(parts, axis=1)


def _drawn(groups: int, count: int, generator: Any) -> Array:
    """How often each group is in a resample of as many groups; `count` resamples, a row each."""
    picked = generator.integers(0, groups, (count, groups)) + np.arange(count)[:, None] * groups
    return np.bincount(picked.ravel(), minlength=count * groups).reshape(count, groups)


def _position(drawn: Array, up_to: Array, rank: Array) -> Array:
    """Where, among all values in order, each resample has its value of this rank; by bisection."""
    low, high = np.zeros(len(drawn), dtype=int), np.full(len(drawn), up_to.shape[1] - 1)
    while (low < high).any():
        middle = (low + high) // 2
        reached = np.einsum("rg,gr->r", drawn, up_to[:, middle]) >= rank
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low
