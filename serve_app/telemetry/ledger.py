"""What the ledger's transitions say: how stages lie within each other, and what each one's share is. Pure.

A transition is what a coordinator's status has in `ledger`: a `messages.Transition` with its slot, as plain values.
Stages of the slot itself (rank -1) are nested by their times; those of its worker processes (rank >= 0) lie below the
slot's stage during which they ran and count for nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from serve_app.telemetry.stages import Stage

# Wall clock and duration are read apart, so that starts and ends are only known to this precision.
SLACK_S = 0.002
OTHER = "other"
USUAL_ORDER = {str(stage): index for index, stage in enumerate(Stage)}

Transition = Mapping[str, Any]
Path = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A stage of a transition, or of several: then every number is a median.

    Attributes:
        path: the names of the stages around it, then its own.
        offset_s: from the transition's start to its own; seconds.
        low_s, high_s: seconds it took; they differ where workers took different times.
        share: of the whole transition, 0 to 1.
        ranks: the workers it ran in; empty for the slot itself.
    """

    path: Path
    offset_s: float
    low_s: float
    high_s: float
    share: float
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def depth(self) -> int:
        """0 for a stage of the transition itself: these, with `other`, make up the whole."""
        return len(self.path) - 1


@dataclass(frozen=True)
class Interval:
    """One record with its place among the others; wall-clock times in seconds.

    Attributes:
        parent: the stage it lies within; None directly below the transition.
    """

    path: Path
    start_s: float
    end_s: float
    rank: int
    parent: Interval | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        return self.path[-1]


def intervals(transition: Transition) -> list[Interval]:
    """All stages but the transition itself, in order of their start, each with the names of those around it."""
    records = [record for record in transition["stages"] if record["stage"] != transition["kind"]]
    slots = _nested([record for record in records if record.get("rank", -1) < 0])
    found = list(slots)
    for rank in sorted({record.get("rank", -1) for record in records} - {-1}):
        found += _nested([record for record in records if record.get("rank", -1) == rank], slots)
    return sorted(found, key=lambda interval: (interval.start_s, interval.rank, len(interval.path)))


def parts(transition: Transition, rank: int | None = None) -> list[Part]:
    """The stages of one transition as a tree in reading order, at the end what no stage explains.

    Args:
        rank: only this worker's own stages beside the slot's; None: all workers', from the fastest to the slowest.
    """
    start_s, total_s = transition["start_s"], transition["duration_s"]
    sums: dict[tuple[Path, bool], dict[int, float]] = {}
    offsets: dict[tuple[Path, bool], float] = {}
    found = [one for one in intervals(transition) if one.rank < 0 or rank is None or one.rank == rank]
    for one in found:
        key = (one.path, one.rank >= 0)
        offsets.setdefault(key, one.start_s - start_s)
        by_rank = sums.setdefault(key, {})
        by_rank[one.rank] = by_rank.get(one.rank, 0.0) + one.end_s - one.start_s
    whole = [
        Part(
            path,
            offsets[path, is_worker],
            min(by_rank.values()),
            max(by_rank.values()),
            max(by_rank.values()) / total_s if total_s else 0.0,
            tuple(sorted(by_rank)) if is_worker else (),
        )
        for (path, is_worker), by_rank in sums.items()
    ]
    other_s = total_s - _covered_s(one for one in found if one.rank < 0 and len(one.path) == 1)
    if whole and other_s > SLACK_S:
        whole.append(Part((OTHER,), total_s, other_s, other_s, other_s / total_s))
    return in_reading_order(whole)


def medians(transitions: Iterable[Transition], rank: int | None = None) -> list[Part]:
    """The stages of several transitions of one kind; each number is the median over those that had the stage."""
    groups: dict[tuple[Path, bool], list[Part]] = {}
    for transition in transitions:
        for part in parts(transition, rank):
            groups.setdefault((part.path, bool(part.ranks)), []).append(part)
    return in_reading_order(
        [
            Part(
                path,
                median(part.offset_s for part in group),
                median(part.low_s for part in group),
                median(part.high_s for part in group),
                median(part.share for part in group),
                tuple(sorted({rank for part in group for rank in part.ranks})),
            )
            for (path, _), group in groups.items()
        ]
    )


def in_reading_order(whole: list[Part]) -> list[Part]:
    """By time, every stage directly before those within it, and `other` last."""
    offsets: dict[Path, float] = {}
    for part in whole:
        offsets[part.path] = min(part.offset_s, offsets.get(part.path, part.offset_s))

    def key(part: Part) -> tuple[object, ...]:
        around = [part.path[: depth + 1] for depth in range(len(part.path))]
        steps = [(offsets.get(path, part.offset_s), USUAL_ORDER.get(path[-1], 0)) for path in around]
        return (part.name == OTHER, steps, bool(part.ranks))

    return sorted(whole, key=key)


def _nested(records: list[Any], below: Sequence[Interval] = ()) -> list[Interval]:
    """Stages of one process: one that begins and ends during another lies within it, else within one of `below`."""
    found: list[Interval] = []
    around: list[Interval] = []
    # Recorded in order of their start; of two that start together the first is the outer one.
    for record in sorted(records, key=lambda record: record["start_s"]):
        start_s, end_s = record["start_s"], record["start_s"] + record["duration_s"]
        while around and not (start_s < around[-1].end_s - SLACK_S and end_s <= around[-1].end_s + SLACK_S):
            around.pop()
        parent = around[-1] if around else _around((start_s + end_s) / 2, below)
        path = (*(parent.path if parent else ()), str(record["stage"]))
        more = (record.get("attributes", {}), record.get("error", ""))
        around.append(Interval(path, start_s, end_s, record.get("rank", -1), parent, *more))
        found.append(around[-1])
    return found


def _around(middle_s: float, slots: Sequence[Interval]) -> Interval | None:
    """The slot's innermost stage that runs in the middle of a worker's: their clocks may differ a little."""
    candidates = [one for one in slots if one.start_s <= middle_s <= one.end_s]
    return max(candidates, key=lambda one: len(one.path), default=None)


def _covered_s(found: Iterable[Interval]) -> float:
    """Seconds during which at least one of them ran."""
    covered_s, until_s = 0.0, float("-inf")
    for one in sorted(found, key=lambda one: one.start_s):
        covered_s += max(0.0, one.end_s - max(one.start_s, until_s))
        until_s = max(until_s, one.end_s)
    return covered_s
