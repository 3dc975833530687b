"""The plots of a replay's report, as SVG that takes its colours from the page. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serve_app.cli.drawing import STAND_INS, figure_over, svg
from serve_app.cli.replay_pool import Level, PoolRecord
from serve_app.cli.replay_rows import PATHS, Row
from serve_app.pool.lifecycle import State
from serve_app.telemetry.stages import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In this order slots are stacked, with the names of the page's colours.
STACK = {
    "active": (State.ACTIVE,),
    "changing": (State.PROMOTING, State.DRAINING, State.PARKING),
    "standby": (State.STANDBY,),
    "starting": (State.STARTING,),
    "failed": (State.FAILED, State.RETIRING),
}
# More dots than this are drawn as a picture, which cannot take its colours from the page: as shapes they would make the
# page heavy. These colours can be read on light and dark.
MAX_SHAPES = 4000
IN_PICTURES = {"": "#6a90c0", "active": "#3aa76d", "held": "#d9822b", "cold": "#c84bb5"}
# More steps than a plot has pixels cannot be seen.
MAX_STEPS = 2000
BINS = 150
STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600)


def arrivals(rows: Sequence[Row], end_s: float) -> str:
    """Requests per second over time."""
    step_s = bin_s(end_s)
    counts = [0] * (int(end_s / step_s) + 1)
    for row in rows:
        counts[int(row.arrival_s / step_s)] += 1
    figure, axes = figure_over(1.6, end_s, "requests / s")
    axes.bar(
        [index * step_s for index in range(len(counts))],
        [count / step_s for count in counts],
        width=step_s,
        align="edge",
        color=STAND_INS["unknown"],
    )
    return svg(figure)


def requests(rows: Sequence[Row], end_s: float) -> str:
    """Requests that wait for a slot, and those that one works on, over time."""
    changes: list[tuple[float, int, int]] = []
    for row in rows:
        begin = row.arrival_s + row.late_s
        end = begin + (row.total_s if row.total_s is not None else end_s)
        taken = min(end, begin + (row.held_s or 0.0))
        changes += [(begin, 1, 0), (taken, -1, 1), (end, 0, -1)]
    steps = [(0.0, 0, 0)]
    for at_s, held, running in sorted(changes):
        steps.append((at_s, steps[-1][1] + held, steps[-1][2] + running))
    times, waits, runs = zip(*thinned(steps, end_s), strict=True)
    figure, axes = figure_over(1.6, end_s, "requests")
    colors = [STAND_INS["active"], STAND_INS["held"]]
    axes.stackplot(times, runs, waits, step="post", colors=colors, linewidth=0)
    return svg(figure)


def thinned(steps: Sequence[tuple[float, int, int]], end_s: float) -> list[tuple[float, int, int]]:
    """At most MAX_STEPS of many steps: of those that fall on one pixel, the highest."""
    if len(steps) <= MAX_STEPS:
        return list(steps)
    highest: dict[int, tuple[float, int, int]] = {}
    for step in steps:
        pixel = int(step[0] / end_s * (MAX_STEPS - 1))
        highest[pixel] = max(highest.get(pixel, step), step, key=lambda either: either[1] + either[2])
    return list(highest.values())


def slots(pool: PoolRecord, end_s: float) -> str:
    """How many slots are in which state over time, with promotions and cold starts."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = figure_over(2.0, end_s, "slots")
    levels = [*pool.levels, Level(end_s, pool.levels[-1].slots)]
    stacked = [[sum(level.slots.get(state, 0) for state in states) for level in levels] for states in STACK.values()]
    colors = [STAND_INS[name] for name in STACK]
    axes.stackplot([level.at_s for level in levels], *stacked, step="post", colors=colors, linewidth=0)
    top = max(map(sum, zip(*stacked, strict=True)), default=1)
    axes.set_ylim(0, top + 1)
    for event in pool.events:
        if event.kind == Stage.PROMOTION:
            axes.plot([event.at_s], [top + 0.5], "v", color=STAND_INS["held"], markersize=6, clip_on=False)
        else:
            line = [max(0.0, event.at_s), event.at_s + event.duration_s]
            axes.plot(line, [top + 0.25] * 2, color=STAND_INS["starting"], linewidth=3, solid_capstyle="butt")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return svg(figure)


def first_tokens(rows: Sequence[Row], pool: PoolRecord, end_s: float) -> str:
    """Seconds to the first token of each request by its arrival; failures in a strip above."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = figure_over(3.2, end_s, "time to first token, s")
    axes.set_yscale("log")
    axes.set_ylim(decades([row.first_token_s for row in rows if row.first_token_s]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    for event in pool.events:
        if event.kind == Stage.PROMOTION:
            axes.axvline(event.at_s, color=STAND_INS["held"], linewidth=0.8, alpha=0.5, zorder=0)
        else:
            begin, end = max(0.0, event.at_s), event.at_s + event.duration_s
            axes.axvspan(begin, end, color=STAND_INS["starting"], alpha=0.18, linewidth=0, zorder=0)
    for name in ("", *PATHS):
        some = [(row.arrival_s, row.first_token_s) for row in rows if row.path == name and row.first_token_s]
        if some:
            picture = len(some) > MAX_SHAPES
            color = IN_PICTURES[name] if picture else STAND_INS[name or "unknown"]
            axes.plot(*zip(*some, strict=True), ".", color=color, markersize=5, rasterized=picture)
    _failures(axes, [row.arrival_s for row in rows if row.outcome in ("failed", "refused")])
    return svg(figure)


def decades(values: Sequence[float]) -> tuple[float, float]:
    """The whole powers of ten around all values, so that there are always two of them to read the others by."""
    low, high = min(values, default=0.1), max(values, default=1.0)
    below = 10.0 ** math.floor(math.log10(low))
    return below, max(10 * below, 10.0 ** math.ceil(math.log10(high)))


def _failures(axes: Axes, at_s: Sequence[float]) -> None:
    """Crosses above the highest time, wherever that is."""
    if at_s:
        axes.plot(
            at_s,
            [0.97] * len(at_s),
            "x",
            color=STAND_INS["failed"],
            markersize=7,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )


def bin_s(end_s: float) -> float:
    """The width of a bar: round, and so that about BINS of them fill the plot."""
    return next((step for step in STEPS_S if end_s / step <= BINS), STEPS_S[-1])
