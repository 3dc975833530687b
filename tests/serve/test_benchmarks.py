"""The benchmarks run from end to end on simulated engines; their numbers mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLAIMED = {"promoted_first_token_s", "cold_over_promoted", "trigger_s", "cold_slot_s"}
# Of the one burst at tier host.
OF_PROMOTIONS = {"promoted_first_token_s", "cold_over_promoted", "trigger_s"}
PHASES = {"promoted": 3, "cold_slot": 1, "all_active": 1, "cold_stock": 1, "cold_forkserver": 1}


def test_promotion_benchmark_writes_its_result(tmp_path: Path) -> None:
    """Every phase leaves its runs, every claim a value."""
    output = tmp_path / "promotion.json"
    short = ["--engine", "simulated", "--repeat", "1", "--start-s", "0.2", "--hard", "2", "--extra", "1"]
    command = [sys.executable, "-m", "benchmarks.promotion", *short, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    phases = [run["phase"] for run in result["runs"]]
    assert {phase: phases.count(phase) for phase in phases} == PHASES
    # The slot is full before the burst, so a busy machine may promote a moment too early: no run that counts.
    invalid = [run for run in result["runs"] if not run["valid"]]
    assert [run for run in invalid if not run["invalid"].startswith("promoted before the burst")] == []
    assert {run["phase"] for run in invalid} <= {"promoted"}
    lost = OF_PROMOTIONS if "host" in {run["tier"] for run in invalid} else set()
    claims = {claim["name"]: claim for claim in result["claims"]}
    assert {name for name, claim in claims.items() if claim["target"] is not None} == CLAIMED
    assert all(claims[name]["value"] > 0 for name in CLAIMED - lost)
    assert result["configs"]["pool"]["applications"][0]["import_path"] == "serve_app:app"
    assert result["versions"]["ray"] and result["machine"]["cores"]


def test_bursts_benchmark_writes_its_result(tmp_path: Path) -> None:
    """The pool against Serve's fastest autoscaler: every run and claim is there, and the pages."""
    output = tmp_path / "bursts.json"
    short = ["--engine", "simulated", "--repeat", "1", "--start-s", "0.2", "--hard", "2", "--extra", "1"]
    trace = ["--tokens", "400", "--trace-seconds", "3", "--trace-speed", "10"]
    cases = ["--cases", "pool", "fastest", "--pages", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.bursts", *short, *trace, *cases, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    runs = {(run["phase"], run["case"]): run for run in result["runs"]}
    counted = {(phase, case) for phase in ("step", "trace") for case in ("pool", "fastest")}
    assert set(runs) == counted | {("warm_up", "pool")}
    assert all(run["served"] == run["requests"] > 0 for run in runs.values())
    step = runs["step", "pool"]
    assert step["valid"] and step["held"] == 1 and 0 < step["awake_slot_s"] < step["slot_s"]
    claims = {claim["name"]: claim for claim in result["claims"]}
    assert claims["pool_failures"]["met"] and claims["p99_ttft_cold_over_pool"]["value"] > 0
    assert {"pool", "pool_trace", "fastest"} == set(result["configs"])
    assert "requests were served in full" in (tmp_path / "pool.html").read_text()
