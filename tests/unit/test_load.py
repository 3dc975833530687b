"""The waves that Locust sends, and the traffic of the benchmark of bursts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import configs, traffic
from benchmarks.bursts import Benchmark, Load, everyday
from benchmarks.load.arrivals import NAMES, Wave, arrivals
from benchmarks.traffic import Traffic
from serve_app.cli import replay_rows
from serve_app.cli.burst_client import Answer
from serve_app.cli.replay_plan import Plan
from serve_app.cli.replay_pool import Event, PoolRecord
from serve_app.live import LiveSettings
from serve_app.traces import TraceRequest


@pytest.mark.parametrize(
    ("name", "high"),
    [
        ("steady", []),
        ("step", range(50, 100)),
        ("spike", [*range(10, 12), *range(30, 32), *range(50, 52), *range(70, 72), *range(90, 92)]),
        ("square", [second for second in range(100) if second % 20 >= 10]),
    ],
)
def test_waves_are_high_when_they_should_be(name: Any, high: Any) -> None:
    """In the second half; for a tenth of each period; for half of each."""
    wave = Wave(name, 1.0, 9.0, 20.0, 100.0)
    assert [second for second in range(100) if wave.at(second) == 9.0] == list(high)
    assert all(wave.at(second) in (1.0, 9.0) for second in range(100))


@pytest.mark.parametrize("name", NAMES)
def test_arrivals_follow_the_wave(name: Any) -> None:
    """As many at rest and at the height as the rates say, within five standard deviations; the same for one seed."""
    wave = Wave(name, 2.0, 20.0, 50.0, 1000.0)
    found = arrivals(wave, seed=3)
    assert found == sorted(found) == arrivals(wave, seed=3) != arrivals(wave, seed=4)
    for rate in (2.0, 20.0):
        expected = sum(rate for second in range(1000) if wave.at(second + 0.5) == rate)
        arrived = sum(1 for at_s in found if wave.at(at_s) == rate)
        assert abs(arrived - expected) <= 5 * expected**0.5


def test_no_rate_sends_nothing() -> None:
    assert arrivals(Wave("steady", 0.0, 0.0, 1.0, 10.0), seed=0) == []


def test_step_comes_after_its_base() -> None:
    """So many long streams first, and so many more at once when those run."""
    requests = traffic.step("m", 4, 8, 900)
    assert [request.at_s for request in requests] == [0.0] * 4 + [traffic.STEP_AFTER_S] * 8
    assert {request.output_tokens for request in requests} == {900}


def test_everyday_pool_has_the_package_own_settings() -> None:
    """Early promotion and slow demotion come back; the config it is made from stays as it is."""
    config = configs.pool(configs.simulated_shape(4, 1.0), active=1, standby=1)
    [plain], [changed] = (some["applications"][0]["deployments"] for some in (config, everyday(config)))
    live, usual = LiveSettings.model_validate(changed["user_config"]), LiveSettings()
    assert live.promote_when == usual.promote_when and live.slots.demote_after_s == usual.slots.demote_after_s
    assert plain["user_config"]["promote_when"] == {"in_flight": 4}


def run(
    case: str, *first_s: float, phase: str = "step", requests: int = 12, served: int = 12, valid: bool = True
) -> Any:
    times = {f"p{percent}_s": max(first_s) for percent in (50, 95, 99)}
    slots = {"slot_s": 100.0, "awake_slot_s": 60.0}
    counts = {"requests": requests, "served": served, "valid": valid}
    return {"phase": phase, "case": case, "first_token_s": list(first_s)} | times | slots | counts


def test_claims_compare_with_the_better_of_serves_settings() -> None:
    """The ratio takes the faster cold case, over all valid steps; every unserved request of the pool is a failure."""
    shape = configs.simulated_shape(8, 1.0)
    benchmark = Benchmark(shape, Load(4, 900, None, Plan([], {}), 1.0), 2)  # type: ignore[arg-type]
    benchmark.report.runs += [
        run("pool", 0.2, 0.5),
        run("pool", 0.3, 1.0, served=11),
        run("pool", 9.0, valid=False),
        run("fastest", 30.0),
        run("default", 40.0),
        run("active", 0.5),
        run("pool", 2.0, phase="trace", served=10),
    ]
    benchmark.claim()
    claims = {claim.name: claim for claim in benchmark.report.claims}
    assert (claims["p99_ttft_cold_over_pool"].value, claims["p99_ttft_cold_over_pool"].met) == (30.0, True)
    assert (claims["pool_failures"].value, claims["pool_failures"].met) == (3.0, False)
    assert claims["p99_ttft_pool_over_active"].value == 2.0
    assert claims["invalid_runs"].value == 1.0
    assert (claims["trace_pool_p99_ttft_s"].value, claims["trace_pool_slot_s"].value) == (2.0, 100.0)


@pytest.mark.parametrize(
    ("base_ends_s", "promoted_s", "told"),
    [(9.0, 5.2, ""), (4.0, 5.2, "base load had ended"), (9.0, 4.0, "before the step"), (9.0, None, "no standby")],
)
def test_step_that_shows_nothing_is_thrown_out(base_ends_s: float, promoted_s: float | None, told: str) -> None:
    """The load before it has ended, the pool has promoted already, or not at all."""
    benchmark = Benchmark(configs.simulated_shape(8, 1.0), Load(4, 900, None, Plan([], {}), 1.0), 2)  # type: ignore[arg-type]
    answer = Answer(200, "aaaa", 0.0, 0.1, base_ends_s)
    rows = [replay_rows.row(0, TraceRequest(0.0, 1, 1), 0.0, answer, None)]
    events = [Event("promotion", "bbbb", promoted_s - 0.1, 0.1)] if promoted_s else []
    seen = Traffic(rows, 0.0, PoolRecord("", (), events), 1.0, 1.0)
    found = benchmark._invalid(None, "pool", seen, 1)  # type: ignore[arg-type]
    assert told in found and bool(told) == bool(found)
