"""Soft capacity beyond counting requests, when new capacity is to be expected, and how many standbys bursts need."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import Tier
from serve_app.errors import ConfigError
from serve_app.live import LiveSettings, PromoteWhen, SlotCounts, parse_live
from serve_app.pool.decide import decide, is_quiet
from serve_app.pool.eta import STEPS_S, UNKNOWN_S, retry_after_s, typical_s
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Transition, Verb
from serve_app.pool.peaks import MEMORY_S, Peaks
from serve_app.pool.pressure import crowded
from serve_app.pool.view import ModelView, SlotView, View

HOLDS = {"m": Tier.HOST}
WHEN = PromoteWhen(engine_waiting=4, kv_use=0.8, predicted_ttft_s=0.5, prefill_tokens_per_s=10_000)


def slot(name: str = "a", state: State = State.ACTIVE, **load: object) -> SlotView:
    return SlotView(name, state, "m", HOLDS, **load)  # type: ignore[arg-type]


def orders(*slots: SlotView, when: PromoteWhen = WHEN, quiet_s: float | None = None) -> list[str]:
    view = View(slots, (ModelView("m", 1),))
    live = LiveSettings(slots=SlotCounts(max=8), promote_when=when)
    return [f"{o.verb} {o.slot}: {o.reason}" for o in decide(view, live, {} if quiet_s is None else {"m": quiet_s})]


@pytest.mark.parametrize(
    ("load", "why"),
    [
        ({}, ""),
        ({"prefill_tokens": 5000}, ""),
        ({"prefill_tokens": 6000}, "a first token would take 0.60 s"),
        ({"engine_waiting": 3}, ""),
        ({"engine_waiting": 4}, "4 requests wait in the engine"),
        ({"kv_use": 0.79}, ""),
        ({"kv_use": 0.85}, "85% of the KV cache are in use"),
    ],
)
def test_each_limit_says_what_is_wrong(load: dict[str, object], why: str) -> None:
    """And none of them does where it is not set."""
    assert crowded(slot(**load), WHEN) == why
    assert crowded(slot(**load), PromoteWhen(kv_use=None)) == ""


def test_a_standby_is_promoted_once_every_active_slot_is_crowded() -> None:
    """One prompt of 30,000 tokens is enough, though it is one request; where one slot is free, it goes there."""
    busy, free, standby = slot(prefill_tokens=30_000, in_flight=1), slot("b"), slot("c", State.STANDBY)
    assert orders(busy, standby) == ["promote c: a first token would take 3.00 s"]
    assert orders(busy, free, standby) == []
    assert orders(busy, slot("b", engine_waiting=9), standby) == [
        "promote c: a first token would take 3.00 s on the least busy of 2 active slots"
    ]


def test_what_one_more_slot_relieves_is_seen_before_another_one_is_promoted() -> None:
    """While one is coming, nothing is asked for again."""
    busy, standby = slot(prefill_tokens=30_000), slot("c", State.STANDBY)
    assert orders(busy, slot("b", State.PROMOTING), standby) == []
    assert orders(busy, slot("b", State.STANDBY, pending=Verb.PROMOTE), standby) == []


@pytest.mark.parametrize(
    ("load", "quiet"),
    [({}, True), ({"kv_use": 0.39}, True), ({"kv_use": 0.41}, False), ({"prefill_tokens": 3000}, False)],
)
def test_a_pool_is_quiet_only_far_below_the_limits(load: dict[str, object], quiet: bool) -> None:
    """Half of each: else the slot that goes would be missed at once."""
    view = View((slot(**load), slot("b")), (ModelView("m", 1),))
    assert is_quiet(view, LiveSettings(promote_when=WHEN), view.models[0]) is quiet


def test_a_prediction_without_a_measured_rate_is_refused() -> None:
    """Before anything is started, with what to do."""
    with pytest.raises(ConfigError, match="predicted_ttft_s needs prefill_tokens_per_s, which `serve-app calibrate`"):
        parse_live({"promote_when": {"predicted_ttft_s": 1}}, None)


# Retry-After.


def done(kind: str, seconds: float, error: str = "") -> Transition:
    return Transition(kind, 0.0, seconds, error=error)


LEDGER = [
    *(done("promotion", seconds) for seconds in (0.4, 0.5, 9.0)),
    done("promotion", 60, "x"),
    done("cold_start", 25),
]


def test_typical_durations_are_medians_of_what_went_well() -> None:
    """Of the last ten."""
    assert typical_s(LEDGER) == {"promotion": 0.5, "cold_start": 25}
    assert typical_s([done("promotion", 99)] * 50 + [done("promotion", 1)] * 10) == {"promotion": 1}


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], UNKNOWN_S),
        ([slot(), slot("b", State.STANDBY)], UNKNOWN_S),
        ([slot("b", State.STANDBY, pending=Verb.PROMOTE)], 1.0),
        ([slot("b", State.STARTING, stayed_s=1.0)], 30.0),
        ([slot("b", State.STARTING, stayed_s=17.0)], 10.0),
        ([slot("b", State.STARTING, stayed_s=99.0)], 1.0),
        ([slot("b", State.STARTING, stayed_s=1.0), slot("c", State.PROMOTING, stayed_s=0.1)], 1.0),
        ([slot("b", State.STARTING, stayed_s=1.0, leaving=True)], UNKNOWN_S),
    ],
)
def test_retry_after_is_when_the_first_slot_under_way_will_serve(slots: list[SlotView], expected: float) -> None:
    """Rounded up to a step, so that routers are not told all the time."""
    assert retry_after_s(slots, typical_s(LEDGER)) == expected
    assert retry_after_s(slots, {}) == UNKNOWN_S
    assert retry_after_s([slot("b", State.STARTING, stayed_s=0.0)], {"cold_start": 9999.0}) == STEPS_S[-1]


# Standbys that follow the peaks.


def peaks(*changes: tuple[float, int]) -> Peaks:
    made = Peaks()
    for at, busy in changes:
        made.update(busy, at)
    return made


@pytest.mark.parametrize(
    ("changes", "rise"),
    [
        ([], 0),
        ([(0, 1)], 0),
        ([(0, 1), (10, 4), (20, 1)], 3),
        ([(0, 1), (100, 2), (200, 3), (300, 4)], 1),  # slowly: each could be replaced meanwhile
        ([(0, 1), (59, 2), (60, 3), (61, 4)], 3),
        ([(0, 4), (10, 1), (15, 4)], 3),
        ([(0, 1), (5, 0), (200, 2)], 2),
    ],
)
def test_the_largest_rise_within_a_refill_is_what_a_burst_needs(changes: list[tuple[float, int]], rise: int) -> None:
    """However often; and not what comes so slowly that standbys are replaced in between."""
    assert peaks(*changes).largest_rise(60) == rise


def test_what_is_long_ago_is_forgotten() -> None:
    """An hour later the burst does not count any more."""
    made = peaks((0, 1), (10, 4), (20, 1))
    made.update(1, MEMORY_S + 30)
    made.update(2, MEMORY_S + 40)
    assert made.largest_rise(60) == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 6)), max_size=30), st.floats(1, 60))
def test_the_largest_rise_is_that_of_trying_every_pair(points: list[tuple[float, int]], span_s: float) -> None:
    """Against the definition, spelled out: a level holds until the next change."""
    made = peaks(*sorted(points))
    changes = list(made._changes)
    ends = [at for at, _ in changes[1:]] + [float("inf")]
    expected = [
        busy - low
        for at, busy in changes
        for (begin, low), end in zip(changes, ends, strict=False)
        if begin <= at <= end + span_s
    ]
    assert made.largest_rise(span_s) == max([0, *expected])


POINTS = st.lists(st.tuples(st.floats(0, 4000), st.integers(0, 9)), max_size=30)


@given(points=POINTS, spans=st.lists(st.sampled_from([5.0, 60.0, 600.0]), min_size=30, max_size=30))
def test_the_largest_rise_is_the_same_however_often_it_was_asked_for(
    points: list[tuple[float, int]], spans: list[float]
) -> None:
    """Between the changes, for one span and another."""
    made = Peaks()
    for index, (at, busy) in enumerate(sorted(points)):
        made.update(busy, at)
        assert made.largest_rise(spans[index]) == peaks(*sorted(points)[: index + 1]).largest_rise(spans[index])


def test_the_largest_rise_costs_nothing_while_nothing_changes() -> None:
    """It is asked for several times a second, after an hour of changes."""
    made = peaks(*((float(at), at % 7) for at in range(3600)))

    def seconds(times: int) -> float:
        begin = time.process_time()
        for _ in range(times):
            made.largest_rise(60)
        return time.process_time() - begin

    once = seconds(1)
    assert seconds(200) < 20 * once
