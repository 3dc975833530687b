"""Longer traces from shorter ones, and traces from counts. The same seed gives the same trace. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from serve_app.traces import TraceRequest


def span_s(trace: Sequence[TraceRequest]) -> float:
    """How long a trace is: to its last arrival, and one mean gap more, so that repeating it keeps the rate."""
    return trace[-1].at_s * (len(trace) + 1) / len(trace) if trace[-1].at_s else 1.0


def tiled(trace: Sequence[TraceRequest], seconds: float, seed: int) -> list[TraceRequest]:
    """So many seconds of a trace: over and over, each time rotated by a chance amount, so that its bursts move."""
    whole_s, chance = span_s(trace), Random(seed)
    found: list[TraceRequest] = []
    begin_s = 0.0
    while begin_s < seconds:
        shift_s = chance.random() * whole_s if begin_s else 0.0
        piece = [replace(one, at_s=begin_s + (one.at_s + shift_s) % whole_s) for one in trace]
        found += sorted(piece, key=lambda one: one.at_s)
        begin_s += whole_s
    return [one for one in found if one.at_s < seconds]


def spread(
    counts: Sequence[float], step_s: float, prompt_tokens: int, output_tokens: int, seed: int
) -> list[TraceRequest]:
    """Requests of so many per step, each at a chance moment of its step; parts of one are carried on."""
    chance, found, owed = Random(seed), list[TraceRequest](), 0.0
    for index, count in enumerate(counts):
        owed += count
        whole = int(owed)
        owed -= whole
        moments = sorted(index * step_s + chance.random() * step_s for _ in range(whole))
        found += [TraceRequest(moment, prompt_tokens, output_tokens) for moment in moments]
    return found
