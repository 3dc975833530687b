"""The pool in virtual time: engines, whole runs, and what a plan says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import Tier
from serve_app.errors import ConfigError
from serve_app.planning import arrivals, candidates, prometheus, times
from serve_app.planning.candidates import ALL_ACTIVE, COLD, POOL, Answer, Candidate, Question
from serve_app.planning.loop import Loop
from serve_app.planning.requests import Request
from serve_app.planning.service import Engine, pace
from serve_app.planning.times import Times
from serve_app.pool.lifecycle import State
from serve_app.traces import TraceRequest

MEASURED = Times(
    promotion_s={Tier.READY: 0.01, Tier.HOST: 0.6, Tier.DISK: 3.0},
    sleep_s=0.4,
    cold_start_s=60.0,
    trigger_s=0.01,
    publish_s=0.004,
    token_s={1: 0.01, 8: 0.02},
    prefill_token_s=1e-5,
)
ASKED = Question(
    times=MEASURED,
    hard=8,
    soft=6,
    most=4,
    existing=4,
    node_lead_s=0.0,
    active=(1,),
    standby=(1, 2, 3),
    tiers=(Tier.HOST,),
    demote_after_s=(10.0,),
    shrink_after_s=60.0,
    refill_delay_s=0.0,
    gpus=1.0,
    gpu_price=4.0,
    slo_s=2.0,
)
SPAN_S = 600.0


def bursts(size: int, every_s: float = 120.0, tokens: int = 400) -> list[TraceRequest]:
    """So many requests at once, again and again, a trickle between them."""
    steps = [TraceRequest(at * every_s + 60.0, 100, tokens) for at in range(int(SPAN_S / every_s)) for _ in range(size)]
    trickle = [TraceRequest(float(at), 100, 50) for at in range(0, int(SPAN_S), 2)]
    return sorted([*steps, *trickle], key=lambda one: one.at_s)


def ask(candidate: Candidate, trace: Sequence[TraceRequest], asked: Question = ASKED) -> Answer:
    return candidates.answer(asked, candidate, trace, SPAN_S)


def pool(standby: int, tier: Tier = Tier.HOST) -> Candidate:
    return Candidate(POOL, 1, standby, tier, 10.0)


def test_what_is_due_next_happens_next() -> None:
    """Ties in the order in which they were set; what is set for the past happens at once."""
    loop, seen = Loop(), list[str]()
    loop.at(2.0, seen.append, "c")
    loop.at(1.0, seen.append, "a")
    loop.at(1.0, lambda: loop.at(0.5, seen.append, "b"))
    loop.run(1.5)
    assert seen == ["a", "b"] and loop.now == 1.5
    loop.run(2.0)
    assert seen == ["a", "b", "c"]


def test_the_pace_is_linear_between_what_was_measured_and_goes_on_beyond() -> None:
    assert pace({1: 0.01, 3: 0.03}, 5) == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.04, 0.05])
    assert pace({4: 0.02}, 2) == [0.02, 0.02, 0.02]


def test_streams_share_an_engine_and_each_ends_when_its_tokens_are_out() -> None:
    """Alone a token takes 10 ms, two at once take 20 ms each."""
    engine = Engine(pace({1: 0.01, 2: 0.02}, 2), 0.0, 0.0)
    long, short = Request(0, 0.0, "m", 1, 100), Request(1, 0.0, "m", 1, 10)
    engine.begin(long, 0.0)
    engine.begin(short, 0.5)  # 50 tokens of the long one are out
    assert engine.next_end() == pytest.approx(0.7)
    assert engine.end(0.7) is short
    assert engine.next_end() == pytest.approx(0.7 + 40 * 0.01)
    assert engine.end(1.1) is long and engine.streams == 0


def test_prompts_are_taken_one_after_the_other() -> None:
    engine = Engine([0.01], prefill_token_s=0.001, prefill_request_s=0.5)
    assert engine.prompt_ends(Request(0, 0.0, "m", 100, 1), 1.0) == pytest.approx(1.6)
    assert engine.prompt_ends(Request(1, 0.0, "m", 100, 1), 1.1) == pytest.approx(2.2)


def test_a_run_can_be_repeated() -> None:
    """The same question gives the same answer, in every request."""
    trace = arrivals.tiled(bursts(12), SPAN_S, seed=3)
    assert ask(pool(1), trace) == ask(pool(1), trace)


@pytest.mark.parametrize("size", [8, 14, 20])
def test_a_step_burst_waits_least_where_all_are_active_and_longest_without_a_pool(size: int) -> None:
    """And one more standby never makes the 99th percentile worse."""
    trace = bursts(size)
    all_active = ask(Candidate(ALL_ACTIVE, ASKED.most), trace)
    pools = [ask(pool(standby), trace) for standby in ASKED.standby]
    cold = ask(Candidate(COLD, 1), trace)
    p99_s = [one.p99_s for one in (all_active, *reversed(pools), cold)]
    slack_s = 0.05  # how requests spread over slots differs a little
    assert all(better <= worse + slack_s for better, worse in zip(p99_s, p99_s[1:], strict=False))
    assert all(one.result.refused == 0 for one in (all_active, *pools, cold))


def test_a_burst_beyond_the_active_slot_pays_a_promotion_and_not_a_cold_start() -> None:
    """The held ones wait for the wake, whose duration is the tier's; without a pool they wait until streams end."""
    trace = bursts(12, tokens=2000)
    ready, host, disk = (ask(pool(1, tier), trace) for tier in (Tier.READY, Tier.HOST, Tier.DISK))
    assert ready.p99_s < host.p99_s < disk.p99_s
    assert 0.6 < host.p99_s < 1.5
    assert disk.p99_s - host.p99_s == pytest.approx(2.4, abs=0.3)
    cold = ask(Candidate(COLD, 1), trace)
    assert cold.p99_s > 20.0 and cold.violations > host.violations


def test_every_request_ends_and_slots_are_paid_for_while_they_exist() -> None:
    answer = ask(Candidate(ALL_ACTIVE, 2), bursts(4))
    assert len(answer.result.first_s) == len(answer.result.firsts) == len(bursts(4))
    assert answer.gpu_h == pytest.approx(2 * SPAN_S / 3600)
    assert answer.cost == pytest.approx(answer.gpu_h * ASKED.gpu_price)


def test_more_than_may_be_held_is_refused_and_counts_as_a_violation() -> None:
    """256 are held; one slot serves eight at a time."""
    asked = replace(ASKED, most=1)
    answer = ask(Candidate(ALL_ACTIVE, 1), [TraceRequest(1.0, 100, 100)] * 400, asked)
    assert answer.result.refused > 100 and answer.violations >= answer.result.refused
    assert answer.p99_s == float("inf") and not answer.meets(1000.0)


def test_a_slot_beyond_the_nodes_that_exist_waits_for_one() -> None:
    """A standby that is promoted is replaced later by as much as a node takes to come."""
    trace = bursts(12, every_s=SPAN_S, tokens=12_000)
    here, far = (ask(pool(1), trace, replace(ASKED, existing=2, node_lead_s=lead_s)) for lead_s in (0.0, 100.0))
    first = [
        next(level.at_s for level in one.result.levels if level.slots.get(State.STANDBY) and level.at_s > 61)
        for one in (here, far)
    ]
    assert first[1] - first[0] == pytest.approx(100.0, abs=2.0)


def test_a_short_burst_starts_no_slot_where_refilling_is_delayed() -> None:
    """The standby that it woke is back before the delay is over."""
    trace = bursts(12, tokens=600)
    at_once, later = (ask(pool(1), trace, replace(ASKED, refill_delay_s=delay_s)) for delay_s in (0.0, 60.0))
    assert at_once.result.starts > 0 == later.result.starts
    assert later.gpu_h < at_once.gpu_h


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(1, 2000), st.integers(1, 300)), min_size=1, max_size=60))
def test_nothing_is_lost_whatever_comes(rows: list[tuple[float, int, int]]) -> None:
    """Every request is served or refused; the slots themselves refuse what the design rules out, and that raises."""
    trace = sorted((TraceRequest(*row) for row in rows), key=lambda one: one.at_s)
    result = ask(pool(2), trace).result
    assert len(result.first_s) + result.refused == len(trace)
    assert all(first_s >= 0 for first_s in result.first_s)


def all_answers(trace: Sequence[TraceRequest]) -> list[Answer]:
    return [candidates.answer(ASKED, one, trace, SPAN_S) for one in candidates.candidates(ASKED)]


def test_the_frontier_has_what_nothing_else_beats() -> None:
    found = all_answers(bursts(12))
    best = candidates.frontier(found)
    assert best and all(not (other.gpu_h <= one.gpu_h and other.p99_s < one.p99_s) for one in best for other in found)
    assert [one.gpu_h for one in best] == sorted(one.gpu_h for one in best)


def test_what_a_standby_buys_is_counted_against_one_fewer() -> None:
    """The first one against the cold baseline, whose violations it avoids."""
    found = all_answers(bursts(12, tokens=2000))
    first, *others = candidates.steps(found, Tier.HOST, 10.0)
    by_count = {one.candidate.standby: one for one in found if one.candidate.kind == POOL}
    cold = next(one for one in found if one.candidate.kind == COLD)
    assert first.avoided == cold.violations - by_count[1].violations > 0
    assert [one.standby for one in others] == [2, 3]
    assert others[0].gpu_h == pytest.approx(by_count[2].gpu_h - by_count[1].gpu_h)


def test_a_trace_is_repeated_for_a_day_at_its_own_rate() -> None:
    day = arrivals.tiled(bursts(5), 86_400.0, seed=1)
    rate = len(bursts(5)) / arrivals.span_s(bursts(5))
    assert len(day) / 86_400 == pytest.approx(rate, rel=0.01)
    assert [one.at_s for one in day] == sorted(one.at_s for one in day) and day[-1].at_s < 86_400
    assert day == arrivals.tiled(bursts(5), 86_400.0, seed=1) != arrivals.tiled(bursts(5), 86_400.0, seed=2)


def test_counts_become_requests_and_none_is_lost_to_rounding() -> None:
    trace = arrivals.spread([0.5, 0.5, 0.0, 2.0], 10.0, 100, 20, seed=0)
    assert [int(one.at_s // 10) for one in trace] == [1, 3, 3]


def test_measured_files_say_what_a_simulation_needs() -> None:
    """Those of this repository, which were measured on H200s."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    found = times.read([results / f"gpu_{name}.json" for name in ("cold_start", "promotion", "overhead")])
    assert found.missing(list(Tier)) == []
    assert found.promotion_s[Tier.READY] < found.promotion_s[Tier.HOST] < found.promotion_s[Tier.DISK]
    assert found.token_s[1] < found.token_s[256]
    said = json.loads((results / "gpu_promotion.json").read_text())["claims"]
    claimed = next(claim["value"] for claim in said if claim["name"] == "h200_tp1_wake_s")
    assert found.promotion_s[Tier.HOST] == pytest.approx(claimed, abs=0.1)


def test_a_ledger_says_what_a_simulation_needs_of_stages(tmp_path: Path) -> None:
    """A promotion is of the tier at which that slot fell asleep before it."""

    def transition(kind: str, at_s: float, duration_s: float, *records: tuple[str, float, str]) -> dict[str, object]:
        return {
            "slot": "a", "kind": kind, "start_s": at_s, "duration_s": duration_s, "error": "",
            "records": [
                {"stage": stage, "duration_s": seconds, "attributes": {"tier": tier} if tier else {}}
                for stage, seconds, tier in records
            ],
        }  # fmt: skip

    path = tmp_path / "ledger.json"
    entries = [
        transition("cold_start", 0.0, 40.0, ("engine.first_sleep", 5.0, "disk")),
        transition("promotion", 50.0, 3.0, ("promotion.publish", 0.005, "")),
        transition("demotion", 60.0, 1.0, ("engine.sleep", 0.4, "host")),
        transition("promotion", 70.0, 0.7, ("promotion.publish", 0.003, "")),
    ]
    path.write_text(json.dumps({"transitions": entries}))
    found = times.read([path])
    assert found.promotion_s == {Tier.DISK: 3.0, Tier.HOST: 0.7}
    assert (found.cold_start_s, found.sleep_s) == (40.0, 0.4)
    assert found.missing([Tier.HOST]) == ["the pace of tokens", "the pace of prompts"]


def test_a_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"claims": []}')
    with pytest.raises(ConfigError, match="says nothing of promotions"):
        times.read([path])


def test_since_needs_a_unit() -> None:
    assert prometheus.seconds("7d") == 7 * 86_400
    with pytest.raises(ConfigError, match="as in 7d"):
        prometheus.seconds("7")
