"""One simulated day: a trace's requests against a pool, or against the cold baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.percentile import percentile
from serve_app.planning.autoscaled import Autoscaled
from serve_app.planning.fleet import Fleet, Level, Setup
from serve_app.planning.loop import Loop
from serve_app.planning.pooled import Pooled
from serve_app.planning.requests import Outcome, Request
from serve_app.planning.traffic import Traffic
from serve_app.traces import TraceRequest

# After the last arrival, so that everything under way ends.
AFTER_S = 3600.0


@dataclass(frozen=True)
class Result:
    """What a simulated run came to.

    Attributes:
        first_s: sorted times to the first token of the requests served, seconds.
        refused: requests answered by 503. held: those that found no room at once.
        slot_s: seconds of all slots within the trace's span. levels: slots by state over time.
        promotions: standbys woken. starts: slots started from scratch.
        firsts: (arrival, time to first token or None) of every request, for plots.
    """

    span_s: float
    first_s: Sequence[float]
    refused: int
    held: int
    slot_s: float
    levels: Sequence[Level]
    promotions: int
    starts: int
    firsts: Sequence[tuple[float, float | None]]

    def percentile(self, percent: float) -> float | None:
        """Of the time to the first token of those served, seconds."""
        return percentile(self.first_s, percent)

    def violations(self, slo_s: float) -> int:
        """Requests whose first token came later than `slo_s`, or never."""
        return self.refused + sum(1 for first_s in self.first_s if first_s > slo_s)


def pooled(setup: Setup, trace: Sequence[TraceRequest], span_s: float) -> Result:
    """The pool as `setup.live` says, with all slots of `slots.min` there from the beginning."""
    loop = Loop()
    fleet = Fleet(loop, setup)
    traffic = Traffic(loop, fleet)
    pool = Pooled(loop, fleet, traffic)
    pool.begin(setup.live.slots.min)
    loop.run(0.0)
    _settle(pool, loop)
    return _result(loop, fleet, traffic, pool, trace, span_s)


def _settle(pool: Pooled, loop: Loop) -> None:
    """Promote what must always be active before the first request comes: the trace is a piece of a long day."""
    settle_s = 60.0 + max(pool.times.promotion_s.values(), default=0.0)
    loop.run(settle_s)


def autoscaled(
    setup: Setup, trace: Sequence[TraceRequest], span_s: float, least: int, most: int, ongoing: int
) -> Result:
    """Serve's autoscaler between `least` and `most` replicas, each for `ongoing` requests."""
    loop = Loop()
    fleet = Fleet(loop, setup)
    traffic = Traffic(loop, fleet)
    cold = Autoscaled(loop, fleet, traffic, least, most, ongoing)
    cold.begin()
    return _result(loop, fleet, traffic, cold, trace, span_s)


def _result(
    loop: Loop,
    fleet: Fleet,
    traffic: Traffic,
    decider: Pooled | Autoscaled,
    trace: Sequence[TraceRequest],
    span_s: float,
) -> Result:
    begin_s, paid_s = loop.now, fleet.closed()
    promoted = decider.promotions
    model = next(iter(fleet.setup.models))
    requests = [
        Request(number, begin_s + one.at_s, one.model or model, one.prompt_tokens, one.output_tokens)
        for number, one in enumerate(trace)
    ]
    for request in requests:
        loop.run(request.arrived_s)
        traffic.arrive(request)
    loop.run(max(begin_s + span_s, loop.now))
    slot_s = fleet.closed() - paid_s
    loop.run(loop.now + AFTER_S)
    served = [request for request in requests if request.outcome is Outcome.SERVED]
    return Result(
        span_s=span_s,
        first_s=sorted(request.first_s - request.arrived_s for request in served if request.first_s is not None),
        refused=sum(1 for request in requests if request.outcome is Outcome.REFUSED),
        held=sum(1 for request in requests if request.held),
        slot_s=slot_s,
        levels=_levels(fleet.levels, begin_s, span_s),
        promotions=decider.promotions - promoted,
        starts=fleet.starts,
        firsts=[
            (request.arrived_s - begin_s, None if request.first_s is None else request.first_s - request.arrived_s)
            for request in requests
        ],
    )


def _levels(levels: Sequence[Level], begin_s: float, span_s: float) -> list[Level]:
    """Those within the trace, their times counted from its beginning."""
    before = [level for level in levels if level.at_s <= begin_s]
    within = [Level(level.at_s - begin_s, level.slots) for level in levels if begin_s < level.at_s <= begin_s + span_s]
    return [Level(0.0, before[-1].slots), *within] if before else within
