"""Which pools a plan compares, and what it says of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from serve_app.config import Tier
from serve_app.live import Deadlines, LiveModel, LiveSettings, PromoteWhen, SlotCounts
from serve_app.planning import simulate
from serve_app.planning.fleet import Setup
from serve_app.planning.simulate import Result
from serve_app.planning.times import Times
from serve_app.traces import TraceRequest

POOL, ALL_ACTIVE, COLD = "pool", "all active", "cold"
MODEL = "model"


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        hard: requests that a slot may be given at once. soft: from so many on another slot is promoted or started.
        most: slots that may exist. existing: of them, those that nodes which are there can hold; 0: those that a
            candidate begins with. node_lead_s: how long a further node takes to come.
        active, standby, tiers, demote_after_s: the values to try. shrink_after_s: of surplus before a slot goes.
        refill_delay_s: for which a standby must be missing before a slot is started.
        gpus: of one slot. gpu_price: of one GPU for an hour. slo_s: for the 99th percentile of the first token.
    """

    times: Times
    hard: int
    soft: int
    most: int
    existing: int
    node_lead_s: float
    active: Sequence[int]
    standby: Sequence[int]
    tiers: Sequence[Tier]
    demote_after_s: Sequence[float]
    shrink_after_s: float
    refill_delay_s: float
    gpus: float
    gpu_price: float
    slo_s: float


@dataclass(frozen=True)
class Candidate:
    """One pool; `kind` is `pool`, `all active` or `cold`. `active`: slots (replicas) that are always active."""

    kind: str
    active: int
    standby: int = 0
    tier: Tier | None = None
    demote_after_s: float | None = None


@dataclass(frozen=True)
class Answer:
    """What one candidate comes to. gpu_h: GPU-hours over the trace; cost: of these."""

    candidate: Candidate
    result: Result
    gpu_h: float
    cost: float
    violations: int

    @property
    def p99_s(self) -> float:
        """Of the time to the first token, seconds; infinite where more than one in a hundred was refused."""
        asked = len(self.result.firsts)
        if self.result.refused * 100 > asked:
            return float("inf")
        return self.result.percentile(99) or 0.0

    def meets(self, slo_s: float) -> bool:
        return self.p99_s <= slo_s


@dataclass(frozen=True)
class Step:
    """What the k-th standby buys beside k - 1, all else being equal.

    Attributes:
        avoided: violations of the SLO that it avoids. gpu_h: GPU-hours that it costs.
    """

    active: int
    standby: int
    avoided: int
    gpu_h: float

    @property
    def per_gpu_h(self) -> float | None:
        """Violations avoided per GPU-hour; None if it costs none."""
        return self.avoided / self.gpu_h if self.gpu_h > 0 else None


def candidates(asked: Question) -> list[Candidate]:
    """All that are to be tried: first the two bounds, then pools."""
    bounds = [Candidate(ALL_ACTIVE, count) for count in range(1, asked.most + 1)]
    bounds += [Candidate(COLD, active) for active in asked.active if active > 0]
    return [*bounds, *_pools(asked)]


def _pools(asked: Question) -> Iterator[Candidate]:
    for tier in asked.tiers:
        for demote_after_s in asked.demote_after_s:
            for active in asked.active:
                for standby in asked.standby:
                    if 1 <= active + standby <= asked.most and standby:
                        yield Candidate(POOL, active, standby, tier, demote_after_s)


def answer(asked: Question, candidate: Candidate, trace: Sequence[TraceRequest], span_s: float) -> Answer:
    """Simulate one candidate. The same question and trace give the same answer."""
    existing = asked.existing or candidate.active + candidate.standby
    setup = Setup({MODEL: (MODEL,)}, _live(asked, candidate), asked.times, asked.hard, existing)
    setup = replace(setup, node_lead_s=asked.node_lead_s)
    trace = [replace(request, model=MODEL) for request in trace]
    if candidate.kind == COLD:
        result = simulate.autoscaled(setup, trace, span_s, candidate.active, asked.most, asked.soft)
    else:
        result = simulate.pooled(setup, trace, span_s)
    gpu_h = result.slot_s * asked.gpus / 3600
    return Answer(candidate, result, gpu_h, gpu_h * asked.gpu_price, result.violations(asked.slo_s))


def _live(asked: Question, candidate: Candidate) -> LiveSettings:
    """A pool's live settings; that of `all active` never changes."""
    grows = candidate.kind != ALL_ACTIVE
    slots = SlotCounts(
        min=candidate.active + candidate.standby,
        max=asked.most if grows else candidate.active,
        standby=candidate.standby,
        refill="buy",
        refill_delay_s=asked.refill_delay_s,
        demote_after_s=candidate.demote_after_s or 0.0,
        shrink_after_s=asked.shrink_after_s,
    )
    return LiveSettings(
        slots=slots,
        models={MODEL: LiveModel(min_active=candidate.active, tier=candidate.tier or Tier.HOST)},
        promote_when=PromoteWhen(in_flight=asked.soft),
        deadlines=Deadlines(),
    )


def frontier(found: Sequence[Answer]) -> list[Answer]:
    """Those that no other beats in both GPU-hours and p99, the cheapest first."""
    best: list[Answer] = []
    for one in sorted(found, key=lambda one: (one.gpu_h, one.p99_s)):
        if not best or one.p99_s < best[-1].p99_s:
            best.append(one)
    return best


def cheapest(found: Sequence[Answer], slo_s: float, *kinds: str) -> Answer | None:
    """The one with the fewest GPU-hours that meets the SLO, among those of some kinds (of all, if none is named)."""
    good = [one for one in found if one.meets(slo_s) and (not kinds or one.candidate.kind in kinds)]
    return min(good, key=lambda one: (one.gpu_h, one.p99_s), default=None)


def steps(found: Sequence[Answer], tier: Tier, demote_after_s: float) -> list[Step]:
    """What each further standby buys; the first is compared with the cold baseline of as many active slots."""
    by_count = {
        (one.candidate.active, one.candidate.standby): one
        for one in found
        if (one.candidate.kind, one.candidate.tier, one.candidate.demote_after_s) == (POOL, tier, demote_after_s)
    }
    by_count |= {(one.candidate.active, 0): one for one in found if one.candidate.kind == COLD}
    return [
        Step(active, standby, before.violations - one.violations, one.gpu_h - before.gpu_h)
        for (active, standby), one in sorted(by_count.items())
        if standby and (before := by_count.get((active, standby - 1))) is not None
    ]
