"""The ledger as one self-contained web page: a cold start and a promotion as waterfalls, side by side. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from serve_app import __version__
from serve_app.cli.text import gigabytes, seconds
from serve_app.telemetry.ledger import Interval, Part, Transition, intervals, parts
from serve_app.telemetry.stages import Stage

TEMPLATE = Path(__file__).with_name("ledger_page.html")
# With more workers than these, their bars are lower than the slot's own, and lower still.
FULL_LANES, THIN_LANES = 2, 8
TICKS = 5

# A colour's class in the page, and what it stands for.
COLORS = {
    "process": "process, imports",
    "device": "device, communicators",
    "weights": "weights",
    "memory": "KV cache, memory",
    "graphs": "CUDA graphs",
    "check": "warm-up, golden check",
    "sleep": "sleep",
    "wait": "waiting, deciding, unexplained",
}
COLOR_OF: dict[str, str] = {
    Stage.SPAWN: "process",
    Stage.PREFLIGHT: "process",
    Stage.IMPORT: "process",
    Stage.ENGINE_CORE: "process",
    Stage.API_SERVER: "process",
    Stage.DEVICE_CONTEXT: "device",
    Stage.COMM_INIT: "device",
    Stage.COMM_CHECK: "device",
    Stage.MODEL_FILES: "weights",
    Stage.WEIGHTS_CACHE: "weights",
    Stage.WEIGHTS_COPY: "weights",
    Stage.WEIGHTS_LOAD: "weights",
    Stage.WAKE_WEIGHTS: "weights",
    Stage.MEMORY_PROFILE: "memory",
    Stage.KV_ALLOCATE: "memory",
    Stage.WAKE_KV: "memory",
    Stage.GRAPH_CAPTURE: "graphs",
    Stage.WARM_UP: "check",
    Stage.VERIFY: "check",
    Stage.FIRST_SLEEP: "sleep",
    Stage.SLEEP: "sleep",
}


@dataclass(frozen=True)
class Bar:
    """Per cent of the transition's whole time."""

    left: float
    width: float
    failed: bool


@dataclass(frozen=True)
class Line:
    """One line of what is shown when a row is pointed at."""

    what: str
    said: str


@dataclass(frozen=True)
class Row:
    """One stage; one lane for the slot itself, else one for each worker rank."""

    part: Part
    lanes: list[list[Bar]]
    lines: list[Line]

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def depth(self) -> int:
        return self.part.depth

    @property
    def is_inner(self) -> bool:
        return bool(self.part.depth or self.part.ranks)

    @property
    def lane_style(self) -> str:
        return "" if len(self.lanes) <= FULL_LANES else " thin" if len(self.lanes) <= THIN_LANES else " hair"

    @property
    def color(self) -> str:
        return COLOR_OF.get(self.name, "wait")

    @property
    def workers(self) -> str:
        ranks = self.part.ranks
        if not ranks:
            return ""
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"

    @property
    def seconds(self) -> str:
        low, high = seconds(self.part.low_s), seconds(self.part.high_s)
        return high if low == high else f"{low.removesuffix(' s')}..{high}"

    @property
    def share(self) -> str:
        return f"{self.part.share:.0%}"


def render(transitions: Sequence[Transition], written_s: float, source: str = "") -> str:
    """The page. On the left the last cold start, on the right the last promotion that succeeded; both can be changed.

    Args:
        transitions: at least one; written_s: wall clock; source: the file they were read from.
    """
    newest_first = sorted(transitions, key=lambda one: (str(one["kind"]), -one["start_s"]))
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text()
    )
    return template.render(
        colors=COLORS,
        columns=[_first(newest_first, kind) for kind in (Stage.COLD_START, Stage.PROMOTION)],
        count=len(transitions),
        falls=[_waterfall(one) for one in newest_first],
        source=source,
        totals=_totals(transitions),
        version=__version__,
        written=_when(written_s),
    )


def _first(transitions: Sequence[Transition], kind: Stage) -> int:
    """Index of the first good one of this kind, else of any of this kind, else 0."""
    of_kind = [index for index, one in enumerate(transitions) if one["kind"] == kind]
    return next((index for index in of_kind if not transitions[index]["error"]), of_kind[0] if of_kind else 0)


def _totals(transitions: Sequence[Transition]) -> list[dict[str, Any]]:
    """Cold and hot on one scale: medians of those that succeeded; empty where there are not both."""
    found = {
        kind: [one["duration_s"] for one in transitions if one["kind"] == kind and not one["error"]]
        for kind in (Stage.COLD_START, Stage.PROMOTION)
    }
    if not all(found.values()):
        return []
    middle = {kind: median(durations) for kind, durations in found.items()}
    cold_s, hot_s = middle.values()
    longest_s = max(cold_s, hot_s) or 1.0
    faster = f", {cold_s / hot_s:.0f} times faster" if 0 < hot_s < cold_s else ""
    return [
        {
            "kind": str(kind),
            "width": round(80 * middle[kind] / longest_s, 3),  # room for the number beside it
            "seconds": seconds(middle[kind]),
            "note": (f"median of {len(durations)}" if len(durations) > 1 else "the only one")
            + (faster if kind is Stage.PROMOTION else ""),
        }
        for kind, durations in found.items()
    ]


def _waterfall(transition: Transition) -> dict[str, Any]:
    total_s = transition["duration_s"] or 1e-9
    step_s = _step(total_s)
    marks = range(int(total_s / step_s + 1e-9) + 1)
    when, took = _when(transition["start_s"]), seconds(transition["duration_s"])
    failed = ", failed" if transition["error"] else ""
    return {
        "option": f"{transition['kind']}  {transition['slot']}  {transition['model']}  {took}  {when}{failed}",
        "kind": str(transition["kind"]),
        "model": transition["model"],
        "slot": transition["slot"],
        "seconds": took,
        "when": when,
        "reason": transition["reason"],
        "error": transition["error"],
        "tick": round(100 * step_s / total_s, 4),
        # The last label would be cut off at the edge.
        "ticks": [
            {"left": round(100 * mark * step_s / total_s, 3), "label": f"{mark * step_s:g} s"}
            for mark in marks
            if mark * step_s / total_s < 0.97
        ],
        "rows": _rows(transition),
    }


def _step(total_s: float) -> float:
    """1, 2 or 5 times a power of ten: about TICKS of them make up the whole."""
    power = 10 ** math.floor(math.log10(total_s / TICKS))
    return next(float(f"{power * factor:.1g}") for factor in (1, 2, 5, 10) if total_s / (power * factor) <= TICKS)


def _rows(transition: Transition) -> list[Row]:
    groups: dict[tuple[tuple[str, ...], bool], list[Interval]] = {}
    for one in intervals(transition):
        groups.setdefault((one.path, one.rank >= 0), []).append(one)
    rows: list[Row] = []
    for part in parts(transition):
        found = groups.get((part.path, bool(part.ranks)), [])
        ranks = part.ranks or ((-1,) if found else ())
        lanes = [[_bar(transition, one) for one in found if one.rank == rank] for rank in ranks]
        rows.append(Row(part, lanes, [_line(transition, one) for one in sorted(found, key=lambda one: one.rank)]))
    return rows


def _bar(transition: Transition, one: Interval) -> Bar:
    """Clipped to the whole: clocks of other processes may differ."""
    total_s = transition["duration_s"] or 1e-9
    left = min(max(0.0, (one.start_s - transition["start_s"]) / total_s), 1.0)
    right = min(max(left, (one.end_s - transition["start_s"]) / total_s), 1.0)
    return Bar(round(100 * left, 3), round(100 * (right - left), 3), bool(one.error))


def _line(transition: Transition, one: Interval) -> Line:
    took_s = one.end_s - one.start_s
    said = [seconds(took_s), f"from {seconds(max(0.0, one.start_s - transition['start_s']))} on"]
    said += [_attribute(name, value) for name, value in one.attributes.items() if value != ""]
    said += [f"failed: {one.error}"] if one.error else []
    return Line(f"rank {one.rank}" if one.rank >= 0 else "slot", ", ".join(said))


def _attribute(name: str, value: Any) -> str:
    if name == "gb_per_s":
        return f"{value} GB/s"
    shown = gigabytes(value) if name == "bytes" and isinstance(value, int) else value
    return f"{name} {shown}"


def _when(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
