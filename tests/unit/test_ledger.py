"""Stages of transitions: how they lie within each other, and what each one's share is."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.telemetry import ledger
from serve_app.telemetry.stages import Stage


def record(stage: Stage, start_s: float, duration_s: float, rank: int = -1) -> dict[str, Any]:
    return {"stage": stage, "start_s": start_s, "duration_s": duration_s, "rank": rank}


def cold_start(*stages: dict[str, Any], total_s: float = 10.0) -> dict[str, Any]:
    return {
        "kind": "cold_start",
        "start_s": 100.0,
        "duration_s": total_s,
        "stages": [record(Stage.COLD_START, 100.0, total_s), *stages],
    }


def rows(parts: list[ledger.Part]) -> list[tuple[str, str, float]]:
    """Path, shown seconds and share, as comparable values."""
    return [("/".join(part.path), f"{part.low_s:.1f}..{part.high_s:.1f}", round(part.share, 3)) for part in parts]


CORE = record(Stage.ENGINE_CORE, 100.0, 8.0)
LOAD = record(Stage.WEIGHTS_LOAD, 101.0, 2.0)
WARM_UP = record(Stage.WARM_UP, 108.0, 1.0)


def test_stages_within_stages_are_not_counted_twice() -> None:
    """The top level and `other` make up the whole, however much lies within."""
    parts = ledger.parts(cold_start(CORE, LOAD, WARM_UP))
    assert rows(parts) == [
        ("engine.core", "8.0..8.0", 0.8),
        ("engine.core/weights.load", "2.0..2.0", 0.2),
        ("engine.warmup", "1.0..1.0", 0.1),
        ("other", "1.0..1.0", 0.1),
    ]
    assert sum(part.share for part in parts if part.depth == 0) == pytest.approx(1)


def test_workers_stand_below_the_slots_stage_from_fastest_to_slowest() -> None:
    """Two ranks are one row that counts for nothing; their own stages are nested too, and come last in the records."""
    context = [record(Stage.DEVICE_CONTEXT, 101.0, 2.0 + rank, rank) for rank in (0, 1)]
    comm = [record(Stage.COMM_INIT, 101.5, 1.0, rank) for rank in (0, 1)]
    parts = ledger.parts(cold_start(CORE, WARM_UP, *context, *comm))
    assert rows(parts) == [
        ("engine.core", "8.0..8.0", 0.8),
        ("engine.core/device.context", "2.0..3.0", 0.3),
        ("engine.core/device.context/comm.init", "1.0..1.0", 0.1),
        ("engine.warmup", "1.0..1.0", 0.1),
        ("other", "1.0..1.0", 0.1),
    ]
    assert [part.ranks for part in parts] == [(), (0, 1), (0, 1), (), ()]


def test_one_rank_leaves_out_the_other_workers() -> None:
    """The slot's own stages stay."""
    loads = [record(Stage.WEIGHTS_LOAD, 101.0, 2.0 + rank, rank) for rank in (0, 1)]
    parts = ledger.parts(cold_start(CORE, *loads, total_s=8.0), rank=1)
    assert rows(parts) == [("engine.core", "8.0..8.0", 1.0), ("engine.core/weights.load", "3.0..3.0", 0.375)]


def test_worker_outside_every_stage_counts_for_nothing() -> None:
    """Its seconds are not part of the whole: nobody knows that the slot waited for them."""
    parts = ledger.parts(cold_start(CORE, record(Stage.SLEEP, 109.0, 1.0, 0)))
    assert rows(parts) == [
        ("engine.core", "8.0..8.0", 0.8),
        ("engine.sleep", "1.0..1.0", 0.1),
        ("other", "2.0..2.0", 0.2),
    ]


def test_repeated_stage_is_one_row() -> None:
    """A first sleep falls asleep twice; both together are what it cost."""
    sleeps = [record(Stage.SLEEP, start_s, 1.0, 0) for start_s in (101.0, 105.0)]
    assert rows(ledger.parts(cold_start(record(Stage.FIRST_SLEEP, 100.0, 10.0), *sleeps))) == [
        ("engine.first_sleep", "10.0..10.0", 1.0),
        ("engine.first_sleep/engine.sleep", "2.0..2.0", 0.2),
    ]


def test_stage_without_duration_stands_beside_the_one_that_begins_with_it() -> None:
    """A slot that did not wait to be scheduled was not scheduled within its process."""
    schedule, spawn = record(Stage.SCHEDULE, 100.0, 0.0), record(Stage.SPAWN, 100.0, 10.0)
    assert [part.path for part in ledger.parts(cold_start(schedule, spawn))] == [("slot.schedule",), ("process.spawn",)]


def test_overlapping_stages_leave_no_negative_rest() -> None:
    """What two stages share is explained once."""
    late = record(Stage.WARM_UP, 107.0, 2.0)
    assert rows(ledger.parts(cold_start(CORE, late)))[-1] == ("other", "1.0..1.0", 0.1)


def test_medians_over_several_transitions() -> None:
    """Each row is the median over those that had the stage, in the order of one transition."""
    three = [
        cold_start(record(Stage.ENGINE_CORE, 100.0, seconds), record(Stage.WARM_UP, 100.0 + seconds, 10 - seconds))
        for seconds in (2.0, 4.0, 9.0)
    ]
    three[0]["stages"].append(record(Stage.WEIGHTS_LOAD, 100.5, 1.0, 0))
    assert rows(ledger.medians(three)) == [
        ("engine.core", "4.0..4.0", 0.4),
        ("engine.core/weights.load", "1.0..1.0", 0.1),
        ("engine.warmup", "6.0..6.0", 0.6),
    ]
    assert ledger.medians([]) == []
