"""Statistics and the result file of benchmarks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import client, processes
from benchmarks.configs import simulated_shape
from benchmarks.promotion import Benchmark
from benchmarks.report import Claim, Report, median, ratio
from serve_app.percentile import percentile


@pytest.mark.parametrize(
    ("value", "bound", "met"),
    [(0.4, "<=", True), (0.5, "<=", True), (0.6, "<=", False), (0.4, ">=", False), (0.5, ">=", True)],
)
def test_claim_is_met_up_to_its_target(value: float, bound: str, met: bool) -> None:
    """The target itself still counts, in both directions."""
    assert Claim("x", value, "s", target=0.5, bound=bound).met is met  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_claim_without_a_number_is_not_met(value: float | None) -> None:
    """A benchmark that measured nothing has shown nothing."""
    assert Claim("x", value, "s", target=0.5).met is False


def test_claim_without_a_target_is_neither_met_nor_missed() -> None:
    assert Claim("x", 1.0, "s").met is None


def test_statistics_of_nothing_are_nothing() -> None:
    assert median([]) is None
    assert percentile([], 50) is None
    assert ratio(None, 1.0) is None
    assert ratio(1.0, 0.0) is None


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (25, 1.0), (50, 2.0), (51, 3.0), (99, 4.0), (100, 4.0)])
def test_percentile_is_a_measured_value(percent: float, expected: float) -> None:
    """Nearest rank: no number is reported that was not measured."""
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


def test_median_of_an_even_count_lies_between() -> None:
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_report_writes_everything_needed_to_judge_it(tmp_path: Path) -> None:
    """Command, date, machine, versions, runs and claims, with the reason where a claim falls short."""
    report = Report("example", runs=[{"phase": "a", "seconds": 1.0}])
    report.claim("first_token_s", 0.7, target=0.5, note="the machine was busy")
    written = json.loads(report.write(tmp_path / "deep" / "example.json").read_text())
    assert set(written) == {"command", "date", "machine", "versions", "configs", "runs", "claims"}
    assert set(written["machine"]) == {"cpu", "cores", "memory_gib", "load"}
    assert set(written["versions"]) == {"python", "ray", "vllm", "torch", "serve_app"}
    assert written["command"].startswith("python -m benchmarks.example")
    [claim] = written["claims"]
    assert claim["met"] is False and claim["value"] == 0.7 and claim["note"] == "the machine was busy"


def test_table_shows_what_is_not_met_and_why() -> None:
    report = Report("example")
    report.claim("first_token_s", 0.7, target=0.5, note="busy")
    report.claim("nothing", None, target=0.5)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(report.table())
    text = shown.get()
    assert "0.7 s" in text and "<= 0.5 s" in text and "busy" in text
    assert text.count("NOT MET") == 2


def test_stream_counts_tokens_as_the_server_does() -> None:
    """A chunk may hold several tokens; the usage at the end is right, and no token of its own."""
    stream = client.Stream()
    chunk = {"id": "cmpl-1", "choices": [{"text": "a"}], "usage": None}
    client._take(stream, f"data: {json.dumps(chunk)}", 1.0)
    client._take(stream, "", 1.5)
    client._take(stream, f"data: {json.dumps(chunk)}", 3.0)
    client._take(stream, 'data: {"choices": [], "usage": {"completion_tokens": 5}}', 4.0)
    client._take(stream, "data: [DONE]", 4.0)
    assert (stream.first_s, stream.last_s, stream.tokens, stream.token_s) == (1.0, 3.0, 5, 0.5)
    assert stream.done and not stream.error and stream.first.is_set()


def test_stream_to_nobody_is_an_error_and_not_an_exception() -> None:
    """A benchmark goes on after a failed request, and says so."""

    async def ask() -> client.Stream:
        async with client.Client(f"http://127.0.0.1:{processes.free_port()}", "model") as asking:
            return await asking.stream("text", 1)

    stream = asyncio.run(ask())
    assert stream.error and stream.first_s is None and stream.first.is_set()


def test_runs_that_are_not_valid_do_not_count() -> None:
    """A thrown-out burst stays in the file and out of every median."""
    benchmark = Benchmark(simulated_shape(4, 1.0), repeat=2, extra=2)
    for first_s, valid in ((0.2, True), (9.0, False)):
        benchmark.report.runs.append({"phase": "promoted", "tier": "host", "first_token_s": [first_s], "valid": valid})
    benchmark.claim()
    claims = {claim.name: claim for claim in benchmark.report.claims}
    assert claims["promoted_first_token_s"].value == 0.2
    assert claims["invalid_runs"].value == 1
    assert claims["cold_over_promoted"].met is False


def test_server_stops_with_all_its_descendants(tmp_path: Path) -> None:
    """Also those that ignore the interrupt and have lost their parent."""
    script = "sh -c 'trap \"\" INT; sleep 60 & sleep 60' & wait"
    server = processes.Server(["sh", "-c", script], {"PATH": "/usr/bin:/bin"}, tmp_path / "log")
    while len(family := processes.descendants(server.pid)) < 4:
        server.check()
    server.stop(grace_s=5)
    assert not [pid for pid, start in family if processes._lives(pid, start)]


def test_server_does_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    """Even where the benchmark had no chance to stop it, and where interrupts were ignored around it."""
    script = (
        "import os, signal, pathlib; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from benchmarks.processes import Server\n"
        f"server = Server(['sleep', '60'], dict(os.environ), pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(server.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True, timeout=60)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (stat := processes._stat(processes.PROC / done.stdout.strip())):
        if stat[0] in "ZX":
            break
        time.sleep(0.05)
    else:
        assert time.monotonic() < deadline, "it still runs"
