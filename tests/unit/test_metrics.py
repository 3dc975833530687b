"""What the coordinator's book says becomes metrics: the right ones, once, with labels from a short list."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from serve_app.config import Tier
from serve_app.engine.base import Unused
from serve_app.errors import Overloaded
from serve_app.live import Hold, LiveSettings
from serve_app.pool import gauges, router_metrics
from serve_app.pool.book import PoolBook
from serve_app.pool.dispatch import Dispatch, Ticket
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import EngineReport, SlotReport, Transition
from serve_app.telemetry import metrics
from serve_app.telemetry.metrics import Kind, Metric
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord
from tools import observability


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """What was counted or observed: (name, *labels without the application) -> sum."""
    found: Counter[tuple[str, ...]] = Counter()

    def take(metric: Metric, value: float, *labels: str) -> None:
        assert len(labels) == len(metric.labels)
        found[metric.name.removeprefix("serve_app_"), *labels[1:]] += value  # type: ignore[assignment]

    monkeypatch.setattr(Metric, "add", take)
    monkeypatch.setattr(Metric, "observe", take)
    return found


def book(*slots: SlotReport, models: tuple[str, ...] = ("m",)) -> PoolBook:
    found = PoolBook(1, LiveSettings(), {model: (model,) for model in models}, hard=4, born_s=0.0, configured=True)
    for slot in slots:
        found.on_report(slot, 1.0)
    return found


def slot(name: str, state: State, **more: Any) -> SlotReport:
    return SlotReport(name, 1, state, 0.0, "m", 4, **more)


def values(book: PoolBook, metric: Metric, gpus: float = 2) -> dict[tuple[str, ...], float]:
    return {labels: value for found, labels, value in gauges.samples(book, gpus, {"waiting": 7.0}) if found is metric}


def promotion(*outside: Stage, start_s: float = 100.0, error: str = "") -> Transition:
    own = StageRecord(Stage.PROMOTION, 100.0, 0.5, done=True)
    around = [StageRecord(stage, start_s, 0.1, done=True) for stage in outside]
    return Transition("promotion", start_s, 0.7, "m", "3 requests held", error, (own, *around))


@pytest.mark.parametrize("path", observability.files(), ids=lambda path: path.name)
def test_what_is_made_is_up_to_date(path: Any) -> None:
    """`python -m tools.observability` would change nothing."""
    assert path.read_text() == observability.files()[path]


def test_names_follow_prometheus() -> None:
    """Counters end in _total, others do not; times are seconds, sizes bytes."""
    for metric in metrics.ALL:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith("_seconds")
    assert len({metric.name for metric in metrics.ALL}) == len(metrics.ALL)


def test_what_an_allocator_keeps_is_said_of_the_gpu_where_it_is_most() -> None:
    """Of each engine that has GPUs, whichever rank it is; of others nothing."""
    ranks = (Unused(900, 50), Unused(700, 80))
    with_gpus, without = EngineReport("m", Tier.READY, unused=ranks), EngineReport("n", Tier.READY)
    found = book(slot("a", State.ACTIVE, engines=(with_gpus, without)), models=("m", "n"))
    assert values(found, metrics.UNUSED_BYTES) == {("a", "m", "cached"): 900, ("a", "m", "fragmented"): 80}


def test_slots_and_gpus_by_state_with_zeros() -> None:
    """Every role is there, also with nobody in it; else a gauge would keep its last value until it is forgotten."""
    busy = slot("d", State.STANDBY, flex_in_flight=1)
    fenced = slot("e", State.STARTING, fenced="GPU-1 40 GB by pid 4711")
    others = slot("a", State.ACTIVE), slot("b", State.STANDBY), slot("c", State.FAILED)
    found = book(*others, busy, fenced, models=("m", "n"))
    slots = values(found, metrics.SLOTS)
    assert {labels for labels, count in slots.items() if count} == {
        *(("active", "m"), ("standby", ""), ("failed", ""), ("starting", "")),
    }
    assert slots["active", "n"] == 0
    assert {role for role, _ in slots} == {*map(str, State), "leaving"}
    assert values(found, metrics.GPUS) == {
        ("active",): 2, ("standby",): 2, ("lent",): 2, ("starting",): 0, ("fenced",): 2,
        ("changing",): 0, ("leaving",): 2,
    }  # fmt: skip
    assert values(found, metrics.SLOT_PENDING_SECONDS) == {("waiting",): 7.0, ("infeasible",): 0.0}


def test_stages_are_the_slowest_ranks(counted: Counter[tuple[str, ...]]) -> None:
    """Ranks work at the same time: the slowest one is waited for; what one rank does twice is added up."""
    ranks = [
        StageRecord(Stage.WEIGHTS_LOAD, 0.0, seconds, rank=rank) for rank, seconds in ((0, 1.0), (0, 2.0), (1, 2.5))
    ]
    start = Transition("cold_start", 0.0, 9.0, stages=(*ranks, StageRecord(Stage.COLD_START, 0.0, 8.0)))
    assert gauges.durations(start) == {Stage.WEIGHTS_LOAD: 3.0, Stage.COLD_START: 9.0}
    found = book(slot("a", State.STANDBY, transitions=(start,), node="n"))
    assert values(found, metrics.LAST_STAGE_SECONDS)["a", "n", "weights.load", "cold_start"] == 3.0
    found.on_dead("a")
    assert values(found, metrics.LAST_STAGE_SECONDS) == {}, "only of slots that live"


def test_a_promotion_is_counted_once_when_it_is_whole(counted: Counter[tuple[str, ...]]) -> None:
    """Not before its publishing is known, and not again when the entry is completed or repeated."""
    found, happened = book(), gauges.Happened("a", since_s=0.0)
    found.entries.ledger.append(("s", promotion()))
    happened.update(found, 1, now_s=101.0)
    assert not counted
    found.entries.ledger[0] = ("s", promotion(Stage.DECIDE, Stage.PUBLISH, start_s=99.9))
    for now_s in (101.0, 102.0, 200.0):
        happened.update(found, 1, now_s)
    assert counted["promotions_total", "ok", "held", "m"] == 1
    assert counted["stage_seconds", "promotion", "promotion"] == 0.7
    found.entries.ledger.append(("t", replace(promotion(error="it broke"), reason="operator")))
    happened.update(found, 1, 201.0)
    assert counted["promotions_total", "failed", "operator", "m"] == 1


def test_node_cache_is_counted_from_what_the_stage_says(counted: Counter[tuple[str, ...]]) -> None:
    """The one that read the files is the miss; a stage that says nothing of a cache is neither."""
    said = [{"cached": False, "bytes": 500}, {"cached": True, "bytes": 0}, {}]
    records = tuple(StageRecord(Stage.WEIGHTS_CACHE, float(i), 1.0, dict(one)) for i, one in enumerate(said))
    found = book()
    found.entries.ledger.append(("s", Transition("cold_start", 0.0, 5.0, stages=records)))
    gauges.Happened("a", 0.0).update(found, 1, 9.0)
    assert counted["node_cache_loads_total", "hit"] == counted["node_cache_loads_total", "miss"] == 1
    assert counted["node_cache_read_bytes_total",] == 500
    assert counted["cold_starts_total", "ok"] == 1


def test_what_another_coordinator_counted_is_not_counted_again(counted: Counter[tuple[str, ...]]) -> None:
    """Slots repeat their transitions to a new coordinator."""
    found = book()
    found.entries.ledger.append(("s", promotion(Stage.PUBLISH)))
    gauges.Happened("a", since_s=150.0).update(found, 1, 200.0)
    assert not counted


def test_standby_time_is_counted_as_it_grows(counted: Counter[tuple[str, ...]]) -> None:
    """Slot-seconds, and times the GPUs of a slot."""
    found, happened = book(), gauges.Happened("a", 0.0)
    for seconds in (3.0, 5.0):
        found.meter.slot_s["m"] = seconds
        happened.update(found, 8, 0.0)
    assert counted["standby_slot_seconds_total", "m"] == 5.0
    assert counted["standby_gpu_seconds_total", "m"] == 40.0


def test_refusals_are_classed() -> None:
    """What `Dispatch` really says is known by one word each."""
    dispatch, found = Dispatch(Hold(max_held_requests=1)), []
    for ticket, now in ((Ticket(0.0, 1.0), 0.0), (Ticket(0.0, 9.0), 1.0), (Ticket(0.0, 1.0), 2.0)):
        try:
            dispatch.offer(ticket, now)
        except Overloaded as refused:
            found.append(router_metrics.reason_class(refused.reason))
    assert found == ["queue_full", "deadline"]
