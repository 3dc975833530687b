"""The Locust file, headless for seconds, against a running pool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.arrivals import NAMES, Wave, arrivals

from .pool import Pool
from .test_cli import run

ROOT = Path(__file__).resolve().parents[2]
LOCUSTFILE = ROOT / "benchmarks" / "load" / "locustfile.py"
SECONDS, RATE, PEAK, PERIOD = 3.0, 2.0, 12.0, 2.0
TOKENS = ["--prompt-tokens", "10", "--output-tokens", "5"]


def load(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run Locust without its page; its figures come as JSON."""
    command = (sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--json", "-H", url)
    return run(*command, "--seconds", str(SECONDS), *options, PYTHONPATH=str(ROOT))


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """What Locust counted, by name."""
    return {entry["name"]: entry for entry in json.loads(done.stdout)}


@pytest.mark.parametrize("shape", NAMES)
def test_every_shape_streams_and_reports_first_tokens(pool: Pool, shape: Any) -> None:
    """As many requests as the wave has, none failed, each with a time to its first token below its whole time."""
    pool.deploy({"slots": {"demote_after_s": 1}})
    wave = ["--rate", str(RATE), "--peak", str(PEAK), "--period", str(PERIOD)]
    done = load(pool.url, "--shape", shape, *wave, *TOKENS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures(done)
    whole = found.pop("/v1/chat/completions")
    expected = len(arrivals(Wave(shape, RATE, PEAK, PERIOD, SECONDS), seed=0))
    assert (whole["num_requests"], whole["num_failures"]) == (expected, 0)
    assert set(found) <= {"first token", "first token, held"}
    assert sum(entry["num_requests"] for entry in found.values()) == expected
    assert found["first token"]["total_response_time"] < whole["total_response_time"]


def test_trace_is_sent_as_it_came(pool: Pool) -> None:
    """The sample, ten times as fast."""
    pool.deploy({"slots": {"demote_after_s": 1}})
    sample = str(ROOT / "configs" / "sample-trace.csv")
    done = load(pool.url, "--shape", "trace", "--trace", sample, "--speed", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures(done)["/v1/chat/completions"]["num_requests"] > 10


def test_failures_are_failures(pool: Pool) -> None:
    """A model that nobody serves: Locust counts it, and ends with its own exit status; nothing has a first token."""
    pool.deploy({"slots": {"demote_after_s": 1}})
    done = load(pool.url, "--rate", "3", "--model", "nobody")
    found = figures(done)
    assert done.returncode == 1
    assert found["/v1/chat/completions"]["num_failures"] == found["/v1/chat/completions"]["num_requests"] > 0
    assert set(found) == {"/v1/chat/completions"}


def test_nobody_at_the_address_ends_at_once() -> None:
    done = load("http://127.0.0.1:1")
    assert done.returncode == 1 and "nothing answers at http://127.0.0.1:1" in done.stderr
