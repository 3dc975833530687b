"""kill -9 of every part, and engines that fail: other requests go on, and the pool heals by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from typing import Any

import httpx
import ray

from .pool import Pool, served

# min_active 1, three slots: a standby is always at hand.
CALM = {"slots": {"min": 3, "max": 3, "demote_after_s": 1}, "promote_when": {"in_flight": 4}}


async def under_requests(pool: Pool, harm: Any, rounds: int = 30) -> list[Any]:
    """Send one short request after another from two clients, do `harm` in the middle; returns all answers."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def run() -> list[Any]:
            return [await pool.stream(client, 3) for _ in range(rounds)]

        tasks = [asyncio.create_task(run()) for _ in range(2)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(harm)
        return [answer for answers in await asyncio.gather(*tasks) for answer in answers]


def pool_replica() -> str:
    """Name of the actor; empty while there is none."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return next((actor["name"] for actor in named if "#Pool#" in actor["name"]), "")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_coordinator_killed_requests_go_on_and_roles_survive(pool: Pool) -> None:
    """No request fails, the new coordinator learns all roles from the slots, and promotes again when asked."""
    pool.deploy(CALM)
    before = pool.settled(active=1, standby=2)
    active, began_s = pool.slots("active")[0]["slot"], time.time()
    answers = asyncio.run(under_requests(pool, lambda: kill(before["pid"]), rounds=60))
    assert len(served(answers, 3)) == 120
    after = pool.wait(lambda s: s["epoch"] != before["epoch"] and not s["blind"], "a new coordinator sees")
    assert [slot["slot"] for slot in after["slots"] if slot["state"] == "active"] == [active]
    again = [entry for entry in after["ledger"] if entry["kind"] == "promotion" and entry["start_s"] > began_s]
    assert not again, "nothing is promoted twice; slots may have told of earlier promotions by now"
    assert len(served(pool.burst(8, tokens=20), 20)) == 8
    assert pool.promotions()
    pool.settled(active=1, standby=2)


def test_active_slot_killed_standby_takes_its_place(pool: Pool) -> None:
    """Streams on the dead slot break; every other request is served; Serve brings a new standby."""
    pool.deploy(CALM)
    pool.settled(active=1, standby=2)
    victim = pool.slots("active")[0]
    answers = asyncio.run(under_requests(pool, lambda: kill(victim["pid"]), rounds=60))
    broken = [answer for answer in answers if not answer.done]
    assert len(broken) <= 2, "at most the two that were running on it"
    status = pool.settled(active=1, standby=2)
    assert victim["slot"] not in [slot["slot"] for slot in status["slots"]]


def test_standby_killed_is_replaced_and_nobody_notices(pool: Pool) -> None:
    """No request fails, and the pool has two standbys again."""
    pool.deploy(CALM)
    pool.settled(active=1, standby=2)
    victim = pool.slots("standby")[0]
    answers = asyncio.run(under_requests(pool, lambda: kill(victim["pid"])))
    assert len(served(answers, 3)) == 60
    pool.wait(lambda s: victim["slot"] not in [slot["slot"] for slot in s["slots"]], "the dead slot is forgotten")
    pool.settled(active=1, standby=2)


def test_controller_killed_promotion_still_works(pool: Pool) -> None:
    """While Serve's controller restarts no request fails, and a burst still promotes."""
    pool.deploy(CALM)
    pool.settled(active=1, standby=2)
    before = len(pool.promotions())
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    kill(ray.get(controller.get_pid.remote()))
    assert len(served(pool.burst(8, tokens=20), 20)) == 8
    assert len(pool.promotions()) > before
    pool.settled(active=1, standby=2)


def test_engine_death_unroutes_the_slot_before_serve_notices(pool: Pool) -> None:
    """A slot whose engine core died fails with the reason, is replaced, and a standby serves meanwhile."""
    pool.deploy(CALM)
    pool.settled(active=1, standby=2)
    victim = pool.slots("active")[0]
    pool.script({f"core@{victim['pid']}": "dead"})
    pool.wait(
        lambda s: any(x["state"] == "active" and x["slot"] != victim["slot"] for x in s["slots"]), "another is active"
    )
    assert len(served(pool.burst(4, tokens=3), 3)) == 4
    pool.wait(lambda s: victim["slot"] not in [slot["slot"] for slot in s["slots"]], "Serve has removed it")
    pool.script({})
    pool.settled(active=1, standby=2)


def test_wake_that_fails_or_hangs_lets_the_next_standby_serve(pool: Pool) -> None:
    """A standby that cannot wake fails with its stage; the held requests are served by the next one."""
    for harm in ("fail", "hang"):
        pool.deploy(CALM | {"deadlines": {"wake_s": 1}})
        status = pool.settled(active=1, standby=2)
        # `decide` takes the first standby of the warmest tier, so that is the one to break.
        victim = next(slot for slot in status["slots"] if slot["state"] == "standby")
        pool.script({f"wake@{victim['pid']}": harm})
        assert len(served(pool.burst(8, tokens=20), 20)) == 8

        def failed(status: Any, slot: str = victim["slot"]) -> bool:
            errors = [entry["error"] for entry in status["ledger"] if entry["slot"] == slot]
            return any("simulated wake failed" in error or "engine.wake took longer" in error for error in errors)

        pool.wait(failed, "the ledger has its failed promotion, with the stage")
        pool.wait(lambda s, gone=victim["slot"]: gone not in [x["slot"] for x in s["slots"]], "it is replaced")


def test_golden_mismatch_fails_the_slot_and_the_breaker_keeps_the_pool(pool: Pool) -> None:
    """With `enforce` a drifting engine is not served from; when many drift, the check itself is doubted."""
    pool.deploy(CALM | {"breaker_failures": 2})
    status = pool.settled(active=1, standby=2)
    assert not status["breaker_open"]
    pool.script({"golden": "drift"})
    assert len(served(pool.burst(8, tokens=20), 20)) == 8
    status = pool.wait(lambda s: s["breaker_open"], "two slots have failed the check")
    assert status["verify"] == "warn"
    pool.wait(
        lambda s: [x["state"] for x in s["slots"]].count("standby") == 2, "new slots join although they drift", 90
    )
    pool.script({})


def test_pool_deployment_killed_live_settings_survive(pool: Pool) -> None:
    """The settings stay in force while `Pool` is replaced, and the operator's door works again afterwards."""
    pool.deploy(CALM)
    pool.settled(active=1, standby=2)
    ray.kill(ray.get_actor(pool_replica(), namespace="serve"))
    assert len(served(pool.burst(8, tokens=20), 20)) == 8
    assert pool.status()["live"]["slots"]["min"] == 3
    pool.settled(active=1, standby=2)
    pool.freeze(False)


def test_pool_deployment_killed_the_pool_stays_frozen(pool: Pool) -> None:
    """An operator's freeze ends when an operator ends it."""
    pool.deploy(CALM)
    pool.freeze(True)
    before = pool_replica()
    ray.kill(ray.get_actor(before, namespace="serve"))
    pool.wait(lambda _: pool_replica() not in ("", before), "Pool is replaced")
    for _ in range(30):  # the new replica repeats what it knows several times a second
        time.sleep(0.1)
        assert pool.status()["frozen"]
    pool.freeze(False)
    assert not pool.status()["frozen"]


def test_a_slot_on_gpus_that_others_hold_keeps_them_until_they_are_free(pool: Pool) -> None:
    """It is fenced, with who holds what; another slot comes in its place; free again, the pool is what it was."""
    pool.deploy(CALM | {"slots": {"min": 2, "max": 2, "shrink_after_s": 1}})
    before = pool.settled(active=1, standby=1)
    (victim,) = pool.slots("standby")
    pool.script({"start": "held"})
    kill(victim["pid"])
    found = pool.wait(lambda status: any(slot["fenced"] for slot in status["slots"]), "the replacement is fenced")
    fenced = next(slot for slot in found["slots"] if slot["fenced"])
    assert "pid 4711 (40.0 GB); end these processes" in fenced["fenced"]
    assert fenced["state"] == "starting"
    pool.script({f"start@{fenced['pid']}": "held"})
    found = pool.wait(lambda status: counts(status)["standby"] == 1, "another slot has come in its place")
    assert [slot["slot"] for slot in found["slots"] if slot["fenced"]] == [fenced["slot"]]
    assert found["epoch"] == before["epoch"]
    pool.script({})
    pool.settled(active=1, standby=1)


def counts(status: dict[str, Any]) -> Counter[str]:
    return Counter(slot["state"] for slot in status["slots"])
