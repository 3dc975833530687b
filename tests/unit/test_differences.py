"""Differences of measured times, against distributions whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serve_app import differences as module
from serve_app.differences import (
    Sample,
    Verdict,
    differences,
    enough,
    independent,
    needed,
)
from serve_app.percentile import percentile

ERROR = 0.05


def verdict(before: Sample, after: Sample, percent: float | None = 50, seed: int = 0) -> Verdict:
    [found] = differences(before, after, [percent], ERROR, seed)
    return found.verdict


def lognormal(generator: np.random.Generator, count: int, scale: float = 1.0, spread: float = 0.3) -> Sample:
    """Times as they are: never negative, some much longer than most. Their median is `scale`."""
    return independent((scale * generator.lognormal(0, spread, count)).tolist())


def bursts(generator: np.random.Generator, count: int, size: int) -> Sample:
    """Bursts that are slow or fast as a whole, as they wait for one promotion; requests differ little within one."""
    values = [m * generator.lognormal(0, 0.02) for m in generator.lognormal(0, 0.5, count) for _ in range(size)]
    return Sample(tuple(values), tuple(burst for burst in range(count) for _ in range(size)))


@pytest.mark.parametrize(("percent", "count"), [(50, 30), (90, 100), (None, 30)])
def test_interval_holds_the_true_difference_as_often_as_promised(percent: float | None, count: int) -> None:
    """Of 200 experiments with a true difference about 5 % miss it; 10 % would be three standard deviations off."""
    generator = np.random.default_rng(7)
    spread = 0.3
    z90 = 1.2815515655446004
    one = math.exp(spread**2 / 2) if percent is None else math.exp(spread * (z90 if percent == 90 else 0))
    truth, missed = 1.2 * one - one, 0
    for seed in range(200):
        before, after = lognormal(generator, count), lognormal(generator, count, 1.2)
        [found] = differences(before, after, [percent], ERROR, seed)
        assert found.low is not None and found.high is not None
        missed += not found.low <= truth <= found.high
    assert missed <= 20


def test_same_distribution_seldom_differs() -> None:
    """Nothing has changed: at most the promised share of wrong verdicts, both ways together."""
    generator = np.random.default_rng(1)
    wrong = [verdict(lognormal(generator, 20), lognormal(generator, 20), seed=n) for n in range(200)]
    assert sum(found is not Verdict.SAME for found in wrong) <= 20


@pytest.mark.parametrize(("scale", "expected"), [(1.2, Verdict.WORSE), (0.8, Verdict.BETTER)])
def test_change_by_a_fifth_is_found(scale: float, expected: Verdict) -> None:
    """With 50 measurements that scatter by 10 %, always."""
    generator = np.random.default_rng(2)
    for seed in range(20):
        before, after = lognormal(generator, 50, spread=0.1), lognormal(generator, 50, scale, spread=0.1)
        assert verdict(before, after, seed=seed) is expected


def test_requests_of_one_burst_do_not_count_as_many() -> None:
    """15 bursts of 20 are 15 measurements: taken for 300, half of the comparisons would find what is not there."""
    generator = np.random.default_rng(3)
    pairs = [(bursts(generator, 15, 20), bursts(generator, 15, 20)) for _ in range(50)]
    grouped = sum(verdict(a, b) is not Verdict.SAME for a, b in pairs)
    apart = sum(verdict(independent(a.values), independent(b.values)) is not Verdict.SAME for a, b in pairs)
    assert grouped <= 7 < 20 < apart


def test_seed_decides_and_nothing_else() -> None:
    """The same call gives the same interval, another seed nearly the same."""
    generator = np.random.default_rng(4)
    before, after = lognormal(generator, 40), lognormal(generator, 40)
    [once], [again], [other] = (differences(before, after, [50], ERROR, seed) for seed in (0, 0, 1))
    assert once == again != other
    assert once.low == pytest.approx(other.low, abs=0.05)


def test_several_percentiles_at_once_are_those_of_one_at_a_time() -> None:
    """They share the resamples."""
    generator = np.random.default_rng(5)
    before, after = lognormal(generator, 100), lognormal(generator, 100, 1.1)
    both = differences(before, after, [50, 95], ERROR)
    assert both == [differences(before, after, [percent], ERROR)[0] for percent in (50, 95)]
    assert both[0].relative == pytest.approx(both[0].change / both[0].before)


@pytest.mark.parametrize(
    ("percent", "error", "count"), [(50, 0.05, 6), (95, 0.05, 72), (5, 0.05, 72), (99, 0.05, 368), (50, 0.001, 11)]
)
def test_how_many_values_an_interval_needs(percent: float, error: float, count: int) -> None:
    """The chance that all lie on one side of the percentile: 2 x 0.5^6 = 3.1 % with six values and a median."""
    assert needed(percent, error) == count
    rarest = max(percent, 100 - percent) / 100
    assert 2 * rarest**count <= error < 2 * rarest ** (count - 1)


def test_too_few_values_or_groups_are_no_verdict() -> None:
    """Also not where all of one set are larger than all of the other."""
    [found] = differences(independent([1.0] * 5), independent([9.0] * 5), [50], ERROR)
    assert (found.verdict, found.low, found.needed) == (Verdict.TOO_FEW, None, 6)
    two_bursts = Sample((1.0,) * 100, (0,) * 50 + (1,) * 50)
    assert enough(two_bursts, 50, ERROR) == 6
    assert enough(independent([1.0] * 50), 95, ERROR) == 72
    assert enough(independent([1.0] * 72), 95, ERROR) == 0


def test_constant_values_differ_only_if_they_do() -> None:
    """No scatter, no doubt; and nothing divided by nothing."""
    assert verdict(independent([0.0] * 10), independent([0.0] * 10)) is Verdict.SAME
    [found] = differences(independent([0.0] * 10), independent([0.1] * 10), [50], ERROR)
    assert found.verdict is Verdict.WORSE and found.relative is None


def test_resample_is_what_drawing_whole_groups_gives() -> None:
    """The bisection over counts finds what sorting each resample's own values would."""
    generator = np.random.default_rng(6)
    values, groups = generator.normal(size=60), np.sort(generator.integers(0, 8, 60))
    order = np.argsort(values)
    up_to = np.cumsum(groups[order] == np.arange(8)[:, None], axis=1)
    drawn = module._drawn(8, 50, generator)
    assert (drawn.sum(axis=1) == 8).all()
    for percent in (1, 50, 95, 100):
        rank = np.maximum(1, np.ceil(percent / 100 * (drawn @ up_to[:, -1])))
        found = values[order][module._position(drawn, up_to, rank)]
        assert found.tolist() == [percentile(np.repeat(values, times[groups]), percent) for times in drawn]
