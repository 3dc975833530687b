"""The plots of a plan's page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_app.cli import replay_plots
from serve_app.cli.drawing import STAND_INS, figure, figure_over, svg
from serve_app.planning.candidates import ALL_ACTIVE, COLD, POOL, Answer, frontier
from serve_app.planning.fleet import Level
from serve_app.pool.lifecycle import State
from serve_app.traces import TraceRequest

# Name of the page's colour, and sign, of each kind of candidate.
KINDS = {POOL: ("active", "o"), ALL_ACTIVE: ("unknown", "s"), COLD: ("cold", "^")}
# More steps than this cannot be told apart; means over so many pieces are shown then.
MAX_STEPS, PIECES = 1000, 300
BINS = 180


def choices(answers: Sequence[Answer], slo_s: float) -> str:
    """Every candidate by what it costs and its 99th percentile; the frontier as a line, the SLO as another."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    drawn, axes = figure(3.6, "time to first token, p99, s", "GPU-hours")
    shown = [one for one in answers if one.p99_s < float("inf")]
    axes.set_yscale("log")
    axes.set_ylim(replay_plots.decades([slo_s, *(one.p99_s for one in shown)]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    best = [one for one in frontier(answers) if one.p99_s < float("inf")]
    axes.plot(
        [one.gpu_h for one in best],
        [one.p99_s for one in best],
        color=STAND_INS["standby"],
        linewidth=2,
        drawstyle="steps-post",
        zorder=1,
    )
    axes.axhline(slo_s, color=STAND_INS["failed"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for kind, (color, sign) in KINDS.items():
        some = [(one.gpu_h, one.p99_s) for one in shown if one.candidate.kind == kind]
        if some:
            axes.plot(*zip(*some, strict=True), sign, color=STAND_INS[color], markersize=8, zorder=2)
    axes.set_xlim(left=0)
    return svg(drawn)


def slots(levels: Sequence[Level], span_s: float) -> str:
    """How many slots of one candidate are in which state over time."""
    from matplotlib.ticker import MaxNLocator

    drawn, axes = figure_over(2.0, span_s / 3600, "slots")
    axes.set_xlabel("hours", color=STAND_INS["ink"], loc="right", labelpad=1)
    shown = means(levels, span_s) if averaged_s(levels, span_s) else [(level.at_s, level.slots) for level in levels]
    shown = [*shown, (span_s, shown[-1][1])]
    stacked = [[sum(s.get(state, 0) for state in states) for _, s in shown] for states in replay_plots.STACK.values()]
    colors = [STAND_INS[name] for name in replay_plots.STACK]
    times_h = [at_s / 3600 for at_s, _ in shown]
    axes.stackplot(times_h, *stacked, step="post", colors=colors, linewidth=0)
    axes.set_ylim(0, max(map(sum, zip(*stacked, strict=True)), default=1) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return svg(drawn)


def averaged_s(levels: Sequence[Level], span_s: float) -> int:
    """Over how many seconds `slots` shows means; 0 if it shows every change."""
    return round(span_s / PIECES) if len(levels) > MAX_STEPS else 0


def means(levels: Sequence[Level], span_s: float) -> list[tuple[float, Mapping[State, float]]]:
    """Mean numbers of slots by state, in each of PIECES equal pieces of the time."""
    width_s = span_s / PIECES
    seconds: list[dict[State, float]] = [{} for _ in range(PIECES)]
    ends = [*(level.at_s for level in levels[1:]), span_s]
    for level, end_s in zip(levels, ends, strict=True):
        at_s = level.at_s
        for piece in range(int(at_s / width_s), PIECES):
            until_s = min(end_s, (piece + 1) * width_s)
            for state, count in level.slots.items():
                seconds[piece][state] = seconds[piece].get(state, 0.0) + count * (until_s - at_s)
            at_s = until_s
            if at_s >= end_s:
                break
    return [
        (piece * width_s, {state: total / width_s for state, total in found.items()})
        for piece, found in enumerate(seconds)
    ]


def arrivals(requests: Sequence[TraceRequest], span_s: float) -> str:
    """Requests a second over time."""
    step_s = span_s / BINS
    counts = [0] * (BINS + 1)
    for request in requests:
        counts[min(BINS, int(request.at_s / step_s))] += 1
    drawn, axes = figure_over(1.6, span_s / 3600, "requests / s")
    axes.set_xlabel("hours", color=STAND_INS["ink"], loc="right", labelpad=1)
    axes.bar(
        [index * step_s / 3600 for index in range(BINS + 1)],
        [count / step_s for count in counts],
        width=step_s / 3600,
        align="edge",
        color=STAND_INS["unknown"],
    )
    return svg(drawn)
