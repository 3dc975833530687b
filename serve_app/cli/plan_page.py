"""The page about a plan. Pure."""

from __future__ import annotations

from typing import Any

from serve_app.cli import pages, plan_plots, plan_view
from serve_app.cli.plan_view import Told
from serve_app.planning.candidates import COLD, POOL, frontier


def page(told: Told) -> str:
    """The whole page."""
    return pages.render("plan_report.html", _values(told))


def _values(told: Told) -> dict[str, Any]:
    best, best_pool = told.best, told.best_pool
    on_frontier, asked = frontier(told.answers), told.asked
    rows = [
        {
            "name": plan_view.named(one.candidate),
            "best": one is best,
            "frontier": one in on_frontier,
            "meets": one.meets(asked.slo_s),
            "p50_s": one.result.percentile(50),
            "p99": plan_view.late(one.p99_s),
            "violations": one.violations,
            "refused": one.result.refused,
            "gpu_h": one.gpu_h,
            "cost": one.cost,
            "promotions": one.result.promotions,
            "starts": one.result.starts,
        }
        for one in told.answers
    ]
    shown = best_pool or best
    return {
        "told": told,
        "opening": plan_view.opening(told),
        "verdict": plan_view.verdict(told),
        "rows": rows,
        "best": best,
        "shown": plan_view.named(shown.candidate) if shown else "",
        "priced": asked.gpu_price > 0,
        "choices": plan_plots.choices(told.answers, asked.slo_s),
        "arrivals": plan_plots.arrivals(told.requests, told.span_s),
        "slots": plan_plots.slots(shown.result.levels, told.span_s) if shown else "",
        "averaged": plan_plots.averaged_s(shown.result.levels, told.span_s) if shown else 0,
        "standbys": [(plan_view.ordinal(one.standby), one) for one in told.standbys()],
        "kinds": {POOL, COLD} & {one.candidate.kind for one in told.answers},
        "times": asked.times,
    }
