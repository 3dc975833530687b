"""What benchmarks.gpu.overhead starts and concludes; no server runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import configs
from benchmarks.cpu import CpuByRole
from benchmarks.gpu.overhead import SERVE_DEFAULTS, SERVERS, Benchmark, Load, _application, _arguments
from benchmarks.vllm_serve import _flag
from serve_app.config import parse_app

SHAPE = configs.simulated_shape(8, start_s=0.1)
LOAD = Load(streams=(1, 32), requests=3, tokens_in=8, tokens_out=8, tokenizer="/models/tiny")


def run(index: int, server: str, streams: int, throughput: float, p99_tpot_s: float) -> dict[str, Any]:
    cpu = {"cpu_us_per_token": {"proxy": 100.0 * streams, "other": 5.0}}
    values = {"throughput": throughput, "p99_tpot_s": p99_tpot_s, "failed": 0}
    return {"round": index, "server": server, "streams": streams} | values | cpu


@pytest.mark.parametrize(
    ("line", "missing"), [("", "--model"), ("--tokenizer T", "--model"), ("--engine simulated", "--tokenizer")]
)
def test_what_is_missing_is_said_at_once(line: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by a server that does not start."""
    with pytest.raises(SystemExit):
        _arguments(line.split())
    assert f"needs {missing} DIRECTORY" in capsys.readouterr().err


def test_tokenizer_is_the_models_unless_another_one_is_named() -> None:
    """A simulated engine has none of its own."""
    assert _arguments(["--model", "M"]).tokenizer == "M"
    assert _arguments(["--engine", "simulated", "--tokenizer", "T"]).tokenizer == "T"


def test_claims_compare_within_a_round_and_aim_at_most_streams() -> None:
    """The median of each round's own ratio, with the targets on the largest number of streams."""
    benchmark = Benchmark(SHAPE, LOAD, ("vllm", "pool"), rounds=2)
    for index, (ours, theirs) in enumerate([(90.0, 100.0), (300.0, 200.0)]):
        for streams in LOAD.streams:
            benchmark.report.runs += [
                run(index, "vllm", streams, theirs, 0.02),
                run(index, "pool", streams, ours, 0.03),
            ]
    benchmark.claim()
    claims = {claim.name: claim for claim in benchmark.report.claims}
    assert (claims["throughput_ratio"].value, claims["throughput_ratio"].met) == (pytest.approx(1.2), True)
    assert (claims["p99_tpot_ratio"].value, claims["p99_tpot_ratio"].met) == (pytest.approx(1.5), False)
    assert claims["throughput_ratio_1"].met is None
    assert claims["pool_proxy_cpu_32"].value == 3200.0
    assert "pool_other_cpu_32" not in claims


def test_claims_without_a_complete_round_have_no_value() -> None:
    """A run that was cut short claims nothing instead of a wrong ratio."""
    benchmark = Benchmark(SHAPE, LOAD, ("vllm", "pool"), rounds=1)
    benchmark.report.runs.append(run(0, "vllm", 1, 100.0, 0.02))
    benchmark.claim()
    claims = {claim.name: claim for claim in benchmark.report.claims}
    assert (claims["throughput_ratio"].value, claims["throughput_ratio"].met) == (None, False)


def test_applications_differ_in_what_their_names_say() -> None:
    """All are valid; only `pool` merges, only `actors` goes Serve's way inside the pool, `bare` is plain Serve."""
    found = {name: _application(name, SHAPE) for name in SERVERS if not name.startswith("vllm")}
    args = {name: parse_app(config["applications"][0]["args"]) for name, config in found.items()}
    assert {name: parsed.slot.merge_events.tokens for name, parsed in args.items()} == {
        "pool": 8,
        "unmerged": 1,
        "actors": 1,
        "bare": 1,
    }
    environment = found["actors"]["controller_options"]["runtime_env"]["env_vars"]
    assert environment | SERVE_DEFAULTS == environment
    assert "controller_options" not in found["bare"] and not args["bare"].pool


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        (True, ["--a-b"]),
        (False, ["--no-a-b"]),
        (7, ["--a-b", "7"]),
        ([1, 2, 4], ["--a-b", "1", "2", "4"]),
        ({"x": {"y": False}}, ["--a-b", '{"x": {"y": false}}']),
    ],
)
def test_flag_as_vllm_takes_it(value: object, flag: list[str]) -> None:
    """Lists are several words, dictionaries JSON."""
    assert _flag("a_b", value) == flag


def test_cpu_by_role_tells_a_server_from_what_it_started() -> None:
    """The seconds of `vllm serve` itself and of the processes below it, since an earlier reading."""
    busy = "sum(i * i for i in range(3_000_000))"
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{busy}; input()'])"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE) as server:
        cpu = CpuByRole(server.pid, plain=True)
        used: dict[str, float] = {}
        while used.get("engine_core", 0.0) == 0.0:
            assert server.poll() is None
            used = cpu.since({})
            os.sched_yield()
        server.communicate(b"\n")
    assert set(used) == {"api_server", "engine_core"}
