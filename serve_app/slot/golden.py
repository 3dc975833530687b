"""The golden check: does this engine compute what the first verified one computed? Pure.

Greedy text equality would break on near-ties between tokens, so log probabilities of a fixed prompt are compared.
"""

from __future__ import annotations

import math

from serve_app.engine.base import Fingerprint
from serve_app.errors import GoldenMismatch


def check(anchor: Fingerprint, found: Fingerprint, tolerance: float) -> float:
    """The difference between two fingerprints. Raises GoldenMismatch where it exceeds `tolerance` or is no number."""
    difference = _difference(anchor, found)
    if not difference <= tolerance:  # so that NaN fails too
        raise GoldenMismatch(difference, tolerance)
    return difference


def _difference(anchor: Fingerprint, found: Fingerprint) -> float:
    """Largest difference of a log probability; for embeddings one minus the cosine."""
    if anchor.kind != found.kind or len(anchor.values) != len(found.values) or not anchor.values:
        return math.inf
    if not all(math.isfinite(value) for value in found.values):
        return math.inf
    if anchor.kind == "logprobs":
        return max(abs(a - b) for a, b in zip(anchor.values, found.values, strict=True))
    dot = sum(a * b for a, b in zip(anchor.values, found.values, strict=True))
    norms = math.hypot(*anchor.values) * math.hypot(*found.values)
    return 1 - dot / norms if norms else math.inf
