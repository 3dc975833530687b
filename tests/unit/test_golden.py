"""The golden check on fingerprints."""

from __future__ import annotations

import math

import pytest

from serve_app.engine.base import Fingerprint
from serve_app.errors import GoldenMismatch
from serve_app.slot.golden import check

ANCHOR = Fingerprint("logprobs", (-0.1, -0.5, -2.0))
VECTOR = Fingerprint("embedding", (3.0, 4.0))


def test_golden_equal_fingerprints_differ_by_nothing() -> None:
    """An engine that computes the same passes at any tolerance."""
    assert check(ANCHOR, ANCHOR, 0.0) == 0.0


def test_golden_logprobs_within_tolerance_pass() -> None:
    """The largest difference of a log probability counts."""
    assert check(ANCHOR, Fingerprint("logprobs", (-0.15, -0.5, -1.9)), 0.2) == pytest.approx(0.1)


def test_golden_one_logprob_beyond_tolerance_fails_with_the_numbers() -> None:
    """One token beyond the tolerance is enough; the error carries difference and tolerance."""
    with pytest.raises(GoldenMismatch, match=r"differs by 0\.5000 .* allowed 0\.2") as raised:
        check(ANCHOR, Fingerprint("logprobs", (-0.1, -1.0, -2.0)), 0.2)
    assert raised.value.difference == pytest.approx(0.5)


@pytest.mark.parametrize(
    "found",
    [
        Fingerprint("logprobs", (-0.1, math.nan, -2.0)),
        Fingerprint("logprobs", (-0.1, -math.inf, -2.0)),
        Fingerprint("logprobs", (-0.1, -0.5)),
        Fingerprint("embedding", (-0.1, -0.5, -2.0)),
        Fingerprint("logprobs", ()),
    ],
)
def test_golden_incomparable_fingerprint_fails_at_any_tolerance(found: Fingerprint) -> None:
    """No number, another length or another kind never pass."""
    with pytest.raises(GoldenMismatch):
        check(ANCHOR, found, 1e9)


def test_golden_broken_anchor_fails() -> None:
    """An anchor that is no number vouches for nothing."""
    with pytest.raises(GoldenMismatch):
        check(Fingerprint("logprobs", (math.nan,)), Fingerprint("logprobs", (-0.1,)), 1e9)


def test_golden_embeddings_are_compared_by_direction() -> None:
    """Length does not matter, direction does; a zero vector has none."""
    assert check(VECTOR, Fingerprint("embedding", (6.0, 8.0)), 1e-9) == pytest.approx(0.0)
    assert check(VECTOR, Fingerprint("embedding", (4.0, -3.0)), 1.1) == pytest.approx(1.0)
    with pytest.raises(GoldenMismatch):
        check(VECTOR, Fingerprint("embedding", (0.0, 0.0)), 1.9)
