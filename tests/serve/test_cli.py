"""`serve-app` as a process of its own, against a running pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

from .pool import MODEL, Pool

STILL = {"slots": {"min": 2, "max": 2, "demote_after_s": 3600}}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a process that finds the tests' own Ray cluster."""
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "COLUMNS": "120"} | variables
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def run_cli(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return run(sys.executable, "-m", "serve_app.cli", *arguments, **variables)


def answer(*arguments: str) -> Any:
    """The JSON that a command prints."""
    done = run_cli(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    """The reason for which a command ends with exit status 1; never a traceback."""
    done = run_cli(*arguments)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("serve-app: "), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.removeprefix("serve-app: ").rstrip()


def test_what_befalls_nodes_is_not_printed_into_the_output(serve_port: int) -> None:
    """Ray tells everybody who is connected; a script that reads `--json` must not be told there."""
    program = (
        "from serve_app.cli import cluster; import time; cluster.connect(); print('on', flush=True); time.sleep(3)"
    )
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as connected:
        assert connected.stdout is not None
        assert connected.stdout.readline() == "on\n"
        gcs = ray._private.worker.global_worker.gcs_client
        for _ in range(5):
            ray._private.utils.publish_error_to_driver("node_died", "a node has been marked dead", gcs_client=gcs)
            time.sleep(0.2)
        assert connected.communicate(timeout=30)[0] == ""


def test_without_an_application_the_reason_is_told(serve_port: int) -> None:
    """Ray and Serve run, nothing is deployed."""
    for command in ("status", "ledger", "freeze"):
        assert refused(command) == "no Serve application runs on this Ray cluster"


def test_status_shows_every_slot(pool: Pool) -> None:
    """The table has a row for each slot, the JSON its full report."""
    slots = pool.deploy(STILL)["slots"]
    said = run_cli("status")
    assert said.returncode == 0, said.stderr
    assert "default  1 active  1 standby  0 starting  0 failed" in said.stdout
    for slot in slots:
        [row] = [line for line in said.stdout.splitlines() if line.startswith(slot["slot"])]
        assert str(slot["pid"]) in row
    [status] = answer("status", "--app", "default")
    assert (status["application"], {slot["slot"] for slot in status["slots"]}) == (
        "default",
        {slot["slot"] for slot in slots},
    )
    assert refused("status", "--app", "other") == "no application 'other'; there are: default"


def test_promote_and_drain_change_roles(pool: Pool) -> None:
    """An operator's orders are carried out; impossible ones are refused with the reason and change nothing."""
    pool.deploy(STILL)
    [standby], [active] = pool.slots("standby"), pool.slots("active")
    assert "is standby: cannot drain" in refused("drain", standby["slot"])
    assert refused("promote", "nobody").startswith("no slot nobody; there are: ")
    assert run_cli("promote").stdout == f"promote {standby['slot']}\n"
    pool.settled(active=2, standby=0)
    assert refused("promote").startswith("no slot is standby; there are: ")
    assert run_cli("drain", active["slot"]).stdout == f"drain {active['slot']}\n"
    pool.settled(active=1, standby=1)
    assert [slot["slot"] for slot in pool.slots("active")] == [standby["slot"]]


def test_freeze_and_unfreeze(pool: Pool) -> None:
    """Frozen is visible in the status, and stays until it is taken back."""
    pool.deploy(STILL)
    assert run_cli("freeze").stdout == "frozen: no automatic promotion or demotion\n"
    assert "frozen" in run_cli("status").stdout
    assert run_cli("unfreeze").stdout == "unfrozen\n"
    assert "frozen" not in run_cli("status").stdout


def test_ledger_has_cold_and_hot(pool: Pool) -> None:
    """Every slot's cold start and the first promotion are in the ledger, with their stages."""
    pool.deploy(STILL)
    said = answer("ledger")
    assert min(said["kinds"][kind]["count"] for kind in ("cold_start", "promotion")) >= 1
    entries = said["transitions"]
    assert {entry["kind"] for entry in entries} >= {"cold_start", "promotion"}
    assert all(entry["stages"] for entry in entries if entry["kind"] != "demotion")
    shown = run_cli("ledger", "-n", "1").stdout
    for part in ("x faster", "engine.core", "engine.wake.weights", "engine.verify"):
        assert part in shown


def test_ledger_is_saved_drawn_and_exported(pool: Pool, tmp_path: Path) -> None:
    """The running pool's transitions, and the same ones read from the file that `--json` makes; with their model."""
    pool.deploy(STILL)
    saved = tmp_path / "ledger.json"
    saved.write_text(run_cli("ledger", "--json", "-n", "200").stdout)
    files = {name: tmp_path / name for name in ("live.html", "spans.json", "trace.json", "again.json")}
    assert run_cli("ledger", "--html", str(files["live.html"])).returncode == 0
    exported = run_cli("trace", "export", "--otlp", str(files["spans.json"]), "--chrome", str(files["trace.json"]))
    assert exported.returncode == 0, exported.stderr
    run_cli("trace", "export", "--from", str(saved), "--chrome", str(files["again.json"]))
    assert "cold_start of slot" in files["live.html"].read_text()
    assert {"key": "serve_app.model", "value": {"stringValue": MODEL}} in [
        attribute
        for resource in json.loads(files["spans.json"].read_text())["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
        if span["name"] == "engine.warmup"
        for attribute in span["attributes"]
    ]
    live, again = (
        {(event["name"], event["ts"]) for event in json.loads(files[name].read_text())["traceEvents"] if "ts" in event}
        for name in ("trace.json", "again.json")
    )
    assert live == again


INTERRUPTED_WATCH = """
import signal, sys
from serve_app.cli import cluster, main
answers, ask = [], cluster.coordinators
def interrupt_the_fourth(application):
    answers.append(ask(application))
    if len(answers) == 4:
        signal.raise_signal(signal.SIGINT)
    return answers[-1]
cluster.coordinators = interrupt_the_fourth
sys.argv = ["serve-app", "status", "--watch"]
main()
"""


def test_watch_redraws_until_interrupted(pool: Pool) -> None:
    """Ctrl-C ends it as a success and without a word."""
    pool.deploy(STILL)
    done = run(sys.executable, "-c", INTERRUPTED_WATCH)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_pool_the_reason_is_told(pool: Pool) -> None:
    """A plain application has no coordinator to ask. Last: a pool is not switched on again in place."""
    pool.deploy(pool=False)
    assert "default (RUNNING)" in refused("status")
    assert "`pool: off`" in refused("promote")
