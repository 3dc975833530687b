"""`serve-app replay` against a running pool: every row says what happened, and the page can be read without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

from .pool import MODEL, Pool
from .test_cli import refused, run_cli

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
QUICK = {"slots": {"demote_after_s": 1}}


def trace(folder: Path, *arrivals: tuple[float, int, int], model: str = "") -> Path:
    """A trace file with these (seconds, tokens in, tokens out)."""
    path = folder / "trace.csv"
    rows = [f"2024-01-01 00:00:{at:06.3f},{into},{out}" + (f",{model}" if model else "") for at, into, out in arrivals]
    path.write_text("\n".join([HEAD + (",Model" if model else ""), *rows]) + "\n")
    return path


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the last replay, by arrival."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda row: row["index"])


def test_burst_in_a_trace_is_told_row_by_row(pool: Pool, tmp_path: Path) -> None:
    """Eight at once on a slot for four: some are held, a standby is promoted, nothing is lost, all of it is told."""
    pool.deploy(QUICK)
    path = trace(tmp_path, (0, 30, 10), *[(10, 20, 30)] * 8, (15, 10, 5))
    page = tmp_path / "page.html"
    done = run_cli(
        *("replay", str(path), "--url", pool.url, "--speed", "10", "--rows", str(tmp_path / "rows.jsonl")),
        *("--report", str(page), "--json"),
    )
    assert done.returncode == 0, done.stderr
    said, told = json.loads(done.stdout), rows(tmp_path)
    assert (said["requests"], said["served"], len(told)) == (10, 10, 10)
    assert [row["arrival_s"] for row in told] == [0.0, *[1.0] * 8, 1.5]
    assert {row["model"] for row in told} == {MODEL}
    assert [row["served_output_tokens"] for row in told] == [10, *[30] * 8, 5]
    assert all(row["chunk_s"] == sorted(row["chunk_s"]) for row in told)
    assert all(row["first_token_s"] == row["chunk_s"][0] for row in told)
    assert all((row["path"] == "active") == (row["held_s"] == 0) for row in told)
    held = [row for row in told if row["path"] == "held"]
    assert held and {row["slot"] for row in told} <= {slot["slot"] for slot in pool.status()["slots"]}
    assert said["promotions"] and said["slot_seconds"]["active"] > 0
    text = page.read_text()
    assert "10 of 10 requests were served in full." in text and text.count("<svg") == 4


def test_request_that_waits_for_a_new_slot_is_cold(pool: Pool, tmp_path: Path) -> None:
    """No standby, room for another slot: whoever is served by the slot that Serve starts meanwhile met a cold start."""
    live = {"slots": {"min": 1, "max": 2, "standby": 1, "demote_after_s": 3600}}
    pool.deploy(live, engine={"start_s": 2.0})
    [standby] = pool.slots("standby")
    os.kill(standby["pid"], signal.SIGKILL)
    pool.wait(lambda status: standby["slot"] not in [slot["slot"] for slot in status["slots"]], "the standby is gone")
    path = trace(tmp_path, *[(0, 10, 400)] * 4, *[(0.2, 10, 5)] * 4)
    done = run_cli("replay", str(path), "--url", pool.url, "--rows", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    told = rows(tmp_path)
    assert [row["path"] for row in told[:4]] == ["active"] * 4
    assert {row["path"] for row in told[4:]} == {"cold"}
    assert {row["slot"] for row in told[4:]}.isdisjoint({row["slot"] for row in told[:4]})
    assert "8 requests: 8 served; 0 failed" in done.stdout


def test_without_a_cluster_rows_say_active_and_held(pool: Pool, tmp_path: Path) -> None:
    """What the answers themselves tell is enough for that; why the pool was not seen is told."""
    pool.deploy(QUICK)
    path = trace(tmp_path, *[(0, 10, 30)] * 6, model="chat")
    arguments = ("replay", str(path), "--url", f"{pool.url}/v1", "--rows", str(tmp_path / "rows.jsonl"), "--json")
    done = run_cli(*arguments, "--model", f"chat={MODEL}", RAY_ADDRESS="127.0.0.1:1")
    said = json.loads(done.stdout)
    assert (done.returncode, said["served"]) == (0, 6)
    assert said["trouble"].startswith("no Ray cluster at RAY_ADDRESS=127.0.0.1:1")
    assert {row["path"] for row in rows(tmp_path)} == {"active", "held"}


def test_refused_and_failed_requests_are_rows_too(pool: Pool, tmp_path: Path) -> None:
    """Exit status 1, and the reason in the row."""
    pool.deploy({"slots": {"min": 1, "max": 1, "standby": 0}, "hold": {"max_hold_s": 0.2}})
    path = trace(tmp_path, *[(0, 10, 200)] * 5)
    arguments = ("replay", str(path), "--url", pool.url, "--rows", str(tmp_path / "rows.jsonl"))
    done = run_cli(*arguments)
    assert done.returncode == 1
    [late] = [row for row in rows(tmp_path) if row["outcome"] == "refused"]
    assert late["status"] == 503 and late["held_s"] >= 0.2 and late["error"].startswith("HTTP 503")
    assert "4 served; 1 refused" in done.stdout
    assert run_cli(*arguments, "--model", "nobody").returncode == 1
    assert {(row["status"], row["outcome"]) for row in rows(tmp_path)} == {(404, "failed")}


def test_ctrl_c_keeps_what_has_been_measured(pool: Pool, tmp_path: Path) -> None:
    """Rows of what has ended and of what was cut off, none of what was never sent; the page is written all the same."""
    pool.deploy(QUICK)
    path = trace(tmp_path, (0, 10, 5), (0.1, 10, 2000), (50, 10, 5))
    page, written = tmp_path / "page.html", tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "serve_app.cli", "replay", str(path), "--url", pool.url]
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(
        [*command, "--rows", str(written), "--report", str(page)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not (written.exists() and written.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert [row["outcome"] for row in rows(tmp_path)] == ["served", "cut"]
    assert "2 requests: 1 served; 1 cut" in said
    assert "1 request cut off when the replay was interrupted" in page.read_text()


def test_what_cannot_be_replayed_is_refused(pool: Pool, tmp_path: Path) -> None:
    """The reason in one line, before anything is sent."""
    pool.deploy(QUICK)
    path, bad = trace(tmp_path, (0, 10, 5)), tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n")
    assert "no column TIMESTAMP" in refused("replay", str(bad), "--url", pool.url)
    assert "nothing answers at" in refused("replay", str(path), "--url", "http://127.0.0.1:1")
    assert "there is no folder" in refused("replay", str(path), "--url", pool.url, "--report", "/nowhere/page.html")
    assert "no request of the trace" in refused("replay", str(path), "--url", pool.url, "--start", "9")
