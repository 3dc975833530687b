"""A burst promotes a standby, nothing is lost, and the pool comes back to rest."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from .pool import MODEL, Pool, served

QUICK = {"slots": {"demote_after_s": 1}}


def test_burst_beyond_capacity_promotes_standby_and_returns_to_rest(pool: Pool) -> None:
    """Held requests are served by the promoted slot, Serve refills the pool, and later the extra slot is standby."""
    pool.deploy(QUICK)
    before = len(pool.promotions())
    answers = pool.burst(8, tokens=60)
    assert len(served(answers, 60)) == 8, answers
    assert len({answer.slot for answer in answers}) == 2
    assert len(pool.promotions()) == before + 1
    pool.settled(active=1, standby=2)


def test_burst_within_one_slot_is_answered_by_one_promotion(pool: Pool) -> None:
    """With two standbys, a need that one slot covers promotes exactly one, time after time."""
    pool.deploy({"slots": {"min": 3, "max": 3, "demote_after_s": 0.3}, "promote_when": {"in_flight": 4}})
    pool.settled(active=1, standby=2)
    for _ in range(8):
        before = len(pool.promotions())
        answers = pool.burst(7, tokens=10)
        assert len(served(answers, 10)) == 7
        status = pool.settled(active=1, standby=2)
        done = [(e["start_s"], e["slot"], e["reason"]) for e in status["ledger"] if e["kind"] == "promotion"]
        assert len(done) == before + 1, done[before:]


def test_demotion_under_streams_cuts_none(pool: Pool) -> None:
    """A slot told to drain in the middle of streams finishes every one, takes no more, and only then falls asleep."""
    pool.deploy(QUICK)
    pool.freeze(True)  # only what this test orders

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            streams = [asyncio.create_task(pool.stream(client, 150)) for _ in range(4)]
            await asyncio.sleep(0.5)
            first = (await asyncio.to_thread(pool.slots, "active"))[0]["slot"]
            await asyncio.to_thread(pool.operate, "promote", None)
            await asyncio.to_thread(pool.wait, lambda s: [x["state"] for x in s["slots"]].count("active") == 2, "two")
            await asyncio.to_thread(pool.operate, "drain", first)
            late = [asyncio.create_task(pool.stream(client, 20)) for _ in range(4)]
            answers = await asyncio.gather(*streams, *late)
        assert len(served(answers[:4], 150)) == 4, answers
        assert len(served(answers[4:], 20)) == 4, answers
        assert {a.slot for a in answers[:4]}.isdisjoint({a.slot for a in answers[4:]})

    asyncio.run(run())
    pool.freeze(False)
    pool.settled(active=1)


def test_waves_over_role_changes_lose_nothing(pool: Pool) -> None:
    """Bursts that arrive while slots drain, shut and wake are all served, whatever they meet."""
    pool.deploy({"slots": {"demote_after_s": 0}})

    async def waves() -> list[int]:
        failures: list[int] = []
        for wave in range(20):
            answers = await pool.burst_async(5 + wave % 4, tokens=3 + wave % 5)
            failures += [answer.status for answer in answers if not answer.done]
            await asyncio.sleep(0.02 * (wave % 7))
        return failures

    assert asyncio.run(waves()) == []
    pool.settled(active=1)


@pytest.mark.parametrize("tier", ["ready", "host", "disk"])
def test_standby_of_each_tier_is_promoted(pool: Pool, tier: str) -> None:
    """Standbys move to the tier the live setting names, and a burst promotes them from there."""
    pool.deploy({"slots": {"demote_after_s": 0.5}, "models": {"sim": {"tier": tier}}})
    pool.wait(lambda s: {x["tier"] for x in s["slots"] if x["state"] == "standby"} == {tier}, f"standbys are {tier}")
    answers = pool.burst(8, tokens=20)
    assert len(served(answers, 20)) == 8, answers
    pool.settled(active=1)


def test_freeze_stops_automatic_promotion_until_unfrozen(pool: Pool) -> None:
    """Frozen, a burst waits for the active slot; unfrozen, the standby is promoted again."""
    pool.deploy(QUICK)
    pool.freeze(True)
    frozen_s = time.time()  # a promotion that was under way then may still end
    assert len(served(pool.burst(8, tokens=5), 5)) == 8
    assert [entry for entry in pool.promotions() if entry["start_s"] >= frozen_s] == []
    pool.freeze(False)
    assert len(served(pool.burst(8, tokens=40), 40)) == 8
    assert any(entry["start_s"] >= frozen_s for entry in pool.promotions())


def test_a_pool_without_active_slots_is_ready_and_serves(pool: Pool) -> None:
    """Scale to zero: health says ready while a standby waits, and the request that finds nothing active wakes it."""
    pool.deploy({"slots": {"min": 1, "max": 1, "demote_after_s": 0.2}, "models": {MODEL: {"min_active": 0}}})
    pool.wait(lambda status: [slot["state"] for slot in status["slots"]] == ["standby"], "all asleep")
    assert httpx.get(f"{pool.url}/health/ready", timeout=10).status_code == 200
    assert len(served(pool.burst(3, tokens=3), 3)) == 3
    pool.settled(active=0, standby=1)
