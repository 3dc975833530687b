"""`serve-app burst` and the ledger against a running pool: what they say is what happened."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx

from .pool import MODEL, Pool
from .test_cli import answer, run_cli

QUICK = {"slots": {"demote_after_s": 1}}


def completion(pool: Pool) -> httpx.Response:
    body = {"model": MODEL, "messages": [], "max_tokens": 1}
    return httpx.post(f"{pool.url}/v1/chat/completions", json=body, timeout=60)


def test_answers_say_which_slot_and_that_nothing_was_held(pool: Pool) -> None:
    """Both headers are in an ordinary answer."""
    pool.deploy(QUICK)
    headers = completion(pool).headers
    assert [headers["x-serve-app-slot"]] == [slot["slot"] for slot in pool.slots("active")]
    assert headers["x-serve-app-held-s"] == "0.0000"


def test_refusal_says_how_long_it_was_held(pool: Pool) -> None:
    """A request that was held in vain comes from no slot."""
    pool.deploy({"slots": {"min": 1, "max": 1, "standby": 0}, "hold": {"max_hold_s": 0.2}})
    done = run_cli("burst", "--url", pool.url, "--requests", "5", "--max-tokens", "200", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 1
    assert (said["served"], said["refused"], said["failed"]) == (4, 1, 0)
    [refused] = [entry for entry in said["answers"] if entry["outcome"] == "refused"]
    assert refused["slot"] == ""
    assert refused["held_s"] >= 0.2


def test_burst_promotes_a_standby_and_says_so(pool: Pool) -> None:
    """The JSON has the promotion with its stages, the held requests, and the refill."""
    pool.deploy(QUICK)
    before = len(pool.promotions())
    said = answer("burst", "--url", pool.url, "--requests", "8")
    assert (said["model"], said["served"], said["refused"], said["failed"]) == (MODEL, 8, 0, 0)
    assert said["held"] >= 1
    assert said["held_max_s"] == max(entry["held_s"] for entry in said["answers"])
    assert sum(said["slots"].values()) == 8
    promotions = said["pool"]["promotions"]
    assert len(promotions) == len(pool.promotions()) - before >= 1
    for promotion in promotions:
        assert promotion["tier"] == "host"
        assert promotion["slot"] in said["slots"]
        assert {"decide", "wake", "verify", "publish"} <= set(promotion["stages_s"])
    assert said["pool"]["refilled_s"] > 0


def test_burst_tells_its_story(pool: Pool) -> None:
    """The lines for people: what was sent, what the pool did, and the summary."""
    pool.deploy(QUICK)
    pool.settled(active=1)
    done = run_cli("burst", "--url", pool.url, "--requests", "8", "--no-wait")
    assert done.returncode == 0, done.stderr
    for part in ("8 requests sent", "it takes requests from now on", "promoted from host", "time to first token: "):
        assert part in done.stdout
    assert done.stdout.index("8 requests sent") < done.stdout.index("8 requests: ")


def test_burst_without_a_cluster_works_from_http_alone(pool: Pool) -> None:
    """Which slot and how long held is known from the answers, promotions are not; the reason is told."""
    pool.deploy(QUICK)
    done = run_cli("burst", "--url", pool.url, "--requests", "2", "--json", RAY_ADDRESS="127.0.0.1:1")
    said = json.loads(done.stdout)
    assert (done.returncode, said["served"], said["held"]) == (0, 2, 0)
    assert said["pool"]["trouble"].startswith("no Ray cluster at RAY_ADDRESS=127.0.0.1:1")


def test_ledger_survives_slot_and_coordinator(pool: Pool) -> None:
    """A dead slot's cold start stays; a new coordinator hears those of the living ones from the slots themselves."""
    status = pool.deploy({"slots": {"min": 2, "max": 2, "demote_after_s": 3600}})
    [dead] = pool.slots("standby")
    os.kill(dead["pid"], signal.SIGKILL)
    pool.wait(lambda s: dead["slot"] not in [slot["slot"] for slot in s["slots"]], "the dead slot is forgotten")
    pool.settled(active=1, standby=1)
    assert dead["slot"] in cold_starts(answer("ledger", "-n", "50"))
    assert {entry["slot"] for entry in answer("ledger", "--slot", dead["slot"])["transitions"]} == {dead["slot"]}

    os.kill(status["pid"], signal.SIGKILL)
    pool.wait(lambda s: s["epoch"] != status["epoch"] and not s["blind"], "a new coordinator sees")
    living = {slot["slot"] for slot in pool.settled(active=1, standby=1)["slots"]}
    pool.wait(lambda s: living <= {e["slot"] for e in s["ledger"] if e["kind"] == "cold_start"}, "slots repeat")
    assert cold_starts(answer("ledger", "-n", "50")) == living


def cold_starts(ledger: dict[str, Any]) -> set[str]:
    """The slots whose cold starts are known."""
    return {entry["slot"] for entry in ledger["transitions"] if entry["kind"] == "cold_start"}
