"""A plan's answers, for a terminal and as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.text import age, counted, seconds
from serve_app.planning.candidates import ALL_ACTIVE, COLD, POOL, Answer, Candidate, Question, cheapest, frontier, steps
from serve_app.planning.candidates import Step as Standby
from serve_app.traces import TraceRequest


@dataclass(frozen=True)
class Told:
    """All there is to tell of one plan. `span_s`: how long the trace is."""

    name: str
    asked: Question
    span_s: float
    requests: Sequence[TraceRequest]
    answers: Sequence[Answer] = ()

    @property
    def best(self) -> Answer | None:
        """The cheapest candidate that meets the SLO."""
        return cheapest(self.answers, self.asked.slo_s)

    @property
    def best_pool(self) -> Answer | None:
        """The cheapest pool that meets it; if none does, the one with the lowest 99th percentile."""
        pools = [one for one in self.answers if one.candidate.kind == POOL]
        closest = min(pools, key=lambda one: (one.p99_s, one.gpu_h), default=None)
        return cheapest(self.answers, self.asked.slo_s, POOL) or closest

    def standbys(self) -> list[Standby]:
        """What each standby buys, at the tier and delay of the best pool."""
        best = self.best_pool
        if best is None or best.candidate.tier is None or best.candidate.demote_after_s is None:
            return []
        return steps(self.answers, best.candidate.tier, best.candidate.demote_after_s)


def named(candidate: Candidate) -> str:
    """`1 active + 2 standby, host, demoted after 10 s`."""
    if candidate.kind == ALL_ACTIVE:
        return f"{candidate.active} all active"
    if candidate.kind == COLD:
        return f"no pool, from {counted(candidate.active, 'replica')} up"
    return (
        f"{candidate.active} active + {candidate.standby} standby, {candidate.tier}, "
        f"demoted after {candidate.demote_after_s:g} s"
    )


def opening(told: Told) -> str:
    """One sentence about the trace."""
    rate = len(told.requests) / told.span_s
    return f"{counted(len(told.requests), 'request')} of {told.name} in {age(told.span_s)}, {rate:.3g} a second"


def verdict(told: Told) -> list[str]:
    """What to do, in sentences."""
    slo = f"99 % of first tokens within {seconds(told.asked.slo_s)}"
    best = told.best
    if best is None:
        return [f"No candidate keeps {slo}: allow more slots, or a larger --hard."]
    said = [f"The cheapest that keeps {slo}: {named(best.candidate)}, {price(told, best)}."]
    for kind, name in ((POOL, "pool"), (ALL_ACTIVE, "all-active set"), (COLD, "cold autoscaler")):
        if kind == best.candidate.kind:
            continue
        other = cheapest(told.answers, told.asked.slo_s, kind)
        if other is None:
            said.append(f"No {name} tried keeps it.")
        else:
            said.append(f"The cheapest {name} that does: {named(other.candidate)}, {price(told, other)}.")
    return said


def price(told: Told, one: Answer) -> str:
    cost = f" = {one.cost:.2f}" if told.asked.gpu_price else ""
    return f"{one.gpu_h:.1f} GPU-hours{cost}"


def late(value_s: float) -> str:
    return "refused" if math.isinf(value_s) else seconds(value_s)


def render(told: Told, page: Path | None) -> RenderableType:
    """Everything, for a terminal."""
    parts: list[RenderableType] = [Text(opening(told), style="bold"), Text(), _table(told), Text()]
    parts += [Text(sentence) for sentence in verdict(told)]
    standbys = told.standbys()
    if standbys:
        parts += [Text(), Text("What each standby buys", style="bold"), _standbys(standbys)]
    if page is not None:
        parts.append(Text(f"page: {page}", style="dim"))
    return Group(*parts)


def _table(told: Told) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("slots", no_wrap=True)
    for name in ("p50", "p99", "late", "refused", "GPU-hours", "cost", "promoted", "started"):
        table.add_column(name, justify="right", no_wrap=True)
    best = frontier(told.answers)
    for one in told.answers:
        result, meets = one.result, one.meets(told.asked.slo_s)
        table.add_row(
            "●" if one in best else "",
            named(one.candidate),
            seconds(result.percentile(50) or 0.0),
            Text(late(one.p99_s), style="green" if meets else "red"),
            str(one.violations),
            str(result.refused),
            f"{one.gpu_h:.1f}",
            f"{one.cost:.2f}" if told.asked.gpu_price else "-",
            str(result.promotions),
            str(result.starts),
        )
    table.caption = "● no other is both cheaper and faster. late: first token after the SLO, or never"
    table.caption_justify = "left"
    return table


def _standbys(found: Sequence[Standby]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("active", "standby", "violations avoided", "GPU-hours more", "avoided per GPU-hour"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        each = one.per_gpu_h
        table.add_row(
            str(one.active),
            ordinal(one.standby),
            str(one.avoided),
            f"{one.gpu_h:+.1f}",
            "-" if each is None else f"{each:.3g}",
        )
    return table


def ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def plain(told: Told) -> dict[str, Any]:
    """What `--json` prints; times in seconds, an infinite p99 (refusals) as null."""
    best = told.best
    on_frontier = frontier(told.answers)
    return {
        "trace": told.name,
        "requests": len(told.requests),
        "span_s": told.span_s,
        "slo_ttft_p99_s": told.asked.slo_s,
        "answers": [_plain(one, one in on_frontier, one.meets(told.asked.slo_s)) for one in told.answers],
        "best": None if best is None else told.answers.index(best),
        "standbys": [
            {
                "active": one.active,
                "standby": one.standby,
                "violations_avoided": one.avoided,
                "gpu_hours": one.gpu_h,
                "avoided_per_gpu_hour": one.per_gpu_h,
            }
            for one in told.standbys()
        ],
    }


def _plain(one: Answer, on_frontier: bool, meets: bool) -> dict[str, Any]:
    candidate, result = one.candidate, one.result
    return {
        "kind": candidate.kind,
        "active": candidate.active,
        "standby": candidate.standby,
        "tier": candidate.tier,
        "demote_after_s": candidate.demote_after_s,
        "p50_s": result.percentile(50),
        "p95_s": result.percentile(95),
        "p99_s": None if math.isinf(one.p99_s) else one.p99_s,
        "violations": one.violations,
        "refused": result.refused,
        "held": result.held,
        "gpu_hours": one.gpu_h,
        "cost": one.cost,
        "promotions": result.promotions,
        "starts": result.starts,
        "meets_slo": meets,
        "frontier": on_frontier,
    }
