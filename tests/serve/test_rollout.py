"""Changes under traffic: live ones touch no slot, static ones roll slots with two coordinators for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from .pool import Pool, served

THREE = {"slots": {"min": 3, "max": 3, "demote_after_s": 1}}


async def requests_during(pool: Pool, change: Any) -> list[Any]:
    """Two clients send short requests until `change` has been carried out; returns all answers."""
    changing = asyncio.create_task(asyncio.to_thread(change))
    async with httpx.AsyncClient(timeout=60) as client:

        async def run() -> list[Any]:
            answers = []
            while not changing.done():
                answers.append(await pool.stream(client, 3))
            return answers

        both = await asyncio.gather(run(), run())
    await changing
    return [answer for answers in both for answer in answers]


def test_live_change_leaves_every_slot_routable(pool: Pool) -> None:
    """Changing tiers, counts and bounds of a running pool restarts no slot and fails no request."""
    pool.deploy(THREE)
    before = {slot["slot"]: slot["pid"] for slot in pool.settled(active=1, standby=2)["slots"]}
    changed = THREE | {"hold": {"max_held_requests": 7}, "models": {"sim": {"min_active": 2, "tier": "disk"}}}
    answers = asyncio.run(requests_during(pool, lambda: (pool.deploy(changed), pool.settled(active=2, standby=1))))
    assert answers and len(served(answers, 3)) == len(answers)
    status = pool.status()
    assert {slot["slot"]: slot["pid"] for slot in status["slots"]} == before
    assert status["live"]["hold"]["max_held_requests"] == 7


def test_static_change_rolls_slots_without_failures(pool: Pool) -> None:
    """New `args` replace every slot, one at a time, with two coordinators in between; every request is served."""
    pool.deploy(THREE)
    before = {slot["slot"] for slot in pool.settled(active=1, standby=2)["slots"]}

    def change() -> None:
        pool.deploy(THREE, engine={"token_s": 0.021})
        pool.wait(lambda s: len(s["slots"]) == 3 and not before & {x["slot"] for x in s["slots"]}, "all are new")
        pool.settled(active=1, standby=2)

    answers = asyncio.run(requests_during(pool, change))
    assert answers and len(served(answers, 3)) == len(answers), [a for a in answers if not a.done]
    assert len(pool.coordinators()) == 1


def test_static_change_where_only_one_slot_fits(pool: Pool) -> None:
    """A rollout asks for no more slots than there are: one that takes most of the node is replaced in its place."""
    one = {"slots": {"min": 1, "max": 1, "standby": 0}}
    pool.deploy(one)
    pool.wait(lambda status: len(status["slots"]) == 1, "one slot is left")
    pool.deploy(one, slot={"cpus": 10})
    pool.deploy(one, slot={"cpus": 10, "max_ongoing_requests": 5})
    assert [slot["hard"] for slot in pool.settled(active=1, standby=0)["slots"]] == [5]


def test_fewer_slots_wanted_retires_standbys_only(pool: Pool) -> None:
    """Lowering slots.max retires standbys, never the active slot, and fails nothing."""
    pool.deploy(THREE)
    active = pool.settled(active=1, standby=2) and pool.slots("active")[0]["slot"]
    smaller = {"slots": {"min": 2, "max": 2}}

    def change() -> None:
        pool.deploy(smaller)
        pool.wait(lambda s: len(s["slots"]) == 2, "one standby is gone")
        pool.settled(active=1, standby=1)

    answers = asyncio.run(requests_during(pool, change))
    assert len(served(answers, 3)) == len(answers)
    assert [slot["slot"] for slot in pool.slots("active")] == [active]


def test_pool_off_is_a_plain_serve_application(pool: Pool) -> None:
    """`pool: off` serves the same model from ordinary replicas, without coordinator or router of ours."""
    pool.deploy(pool=False)
    assert len(served(pool.burst(6, tokens=3), 3)) == 6
    assert not pool.coordinators()
    assert httpx.get(f"{pool.url}/health/ready", timeout=10).status_code == 200
