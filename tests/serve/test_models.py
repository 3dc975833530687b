"""Several models share one pool: every answer comes from the right one, whatever has to move for it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest
from ray.cluster_utils import Cluster

from .pool import Answer, Pool, served

IDS = ["red", "green", "blue"]
ONE_SLOT = {"slots": {"min": 1, "max": 1, "standby": 1, "demote_after_s": 0.3, "keep_model_s": 0.3}}
TWO_SLOTS = {"slots": {"min": 2, "max": 2, "standby": 1, "demote_after_s": 0.5, "keep_model_s": 0.3}}


def mixed(pool: Pool, *models: str, tokens: int = 5, spread_s: float = 0.0) -> list[Answer]:
    """One streamed request for each of `models`, `spread_s` seconds apart."""

    async def later(client: httpx.AsyncClient, index: int, model: str) -> Answer:
        await asyncio.sleep(index * spread_s)
        return await pool.stream(client, tokens, model=model)

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_connections=1000)) as client:
            return await asyncio.gather(*(later(client, index, model) for index, model in enumerate(models)))

    return asyncio.run(run())


def promoted(pool: Pool) -> list[str]:
    """The models that slots became active for, in order."""
    return [entry["model"] for entry in sorted(pool.promotions(), key=lambda entry: float(entry["start_s"]))]


def engines(slot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {engine["model"]: engine for engine in slot["engines"]}


def test_every_model_is_listed_and_answers_and_others_do_not_exist(pool: Pool) -> None:
    """One port, one pool: `GET /v1/models` wakes nobody, an unknown model is OpenAI's 404."""
    pool.deploy(TWO_SLOTS, ids=IDS)
    pool.settled(active=0, standby=2)
    client = openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == IDS
    assert pool.status()["models"]["red"]["standby"] == 2, "listing models wakes nobody"
    with pytest.raises(openai.NotFoundError, match="`grey` does not exist; there are: red, green, blue"):
        client.chat.completions.create(model="grey", messages=[])
    answers = mixed(pool, *IDS)
    assert [(answer.model, answer.done) for answer in answers] == [(model, True) for model in IDS]
    unnamed = httpx.post(f"{pool.url}/v1/completions", json={"prompt": "x"}, timeout=30)
    assert unnamed.status_code == 404, "the engine's own word on a body without a model: it was routed to the first one"
    assert unnamed.headers["x-serve-app-slot"]
    pool.settled(active=0, standby=2)


def test_one_slot_becomes_one_model_after_the_other(pool: Pool) -> None:
    """Drain, sleep, wake, check, publish: nothing is lost, and no answer comes from another model."""
    pool.deploy(ONE_SLOT, ids=IDS)
    wanted = [IDS[index % 3] for index in range(12)]
    answers = [mixed(pool, model)[0] for model in wanted]
    assert [(answer.model, answer.tokens) for answer in answers] == [(model, 5) for model in wanted]
    assert promoted(pool)[-3:] == IDS
    [slot] = pool.settled(active=0, standby=1)["slots"]
    assert {engine["tier"] for engine in slot["engines"]} == {"host"}


def test_overlapping_bursts_on_all_models_fail_nobody(pool: Pool) -> None:
    """More models than slots, more requests than room: all are held, and served by the right model."""
    pool.deploy(TWO_SLOTS, ids=IDS)
    wanted = [IDS[index * 7 % 3] for index in range(90)]
    answers = mixed(pool, *wanted, tokens=4, spread_s=0.02)
    wrong = [answer for answer, model in zip(answers, wanted, strict=True) if not answer.done or answer.model != model]
    assert wrong == []
    pool.settled(active=0, standby=2)


def test_models_that_want_the_same_slot_take_turns_and_do_not_fight_for_it(pool: Pool) -> None:
    """Streams for both without end: each gets its turn, and a turn lasts `keep_model_s` at least."""
    keep_s = 1.5
    pool.deploy({"slots": ONE_SLOT["slots"] | {"keep_model_s": keep_s}}, ids=IDS)
    before, begin = len(pool.promotions()), time.monotonic()
    answers = mixed(pool, *(["red", "green"] * 30), tokens=10, spread_s=0.1)
    assert len(served(answers, 10)) == 60
    turns = len(pool.promotions()) - before
    assert 2 <= turns <= (time.monotonic() - begin) / keep_s + 2


def test_a_burst_on_one_model_does_not_starve_another(pool: Pool) -> None:
    """Its held requests fill its own bound only, and one request for another model still gets a slot."""
    pool.deploy(ONE_SLOT | {"hold": {"max_held_requests": 8}}, ids=IDS)
    answers = mixed(pool, *(["red"] * 40), "green", tokens=20)
    assert (answers[-1].model, answers[-1].done) == ("green", True)
    assert {answer.status for answer in answers} == {200, 503}
    # Eight held, and as many more as a busy client sends only once four of them are in the slot.
    assert 8 <= len(served(answers[:-1], 20)) < 40


def test_without_memory_to_wake_one_model_the_slot_still_serves_the_others(pool: Pool) -> None:
    """The engine is given up with an error that says who holds what; later a whole slot takes its place."""
    pool.deploy(TWO_SLOTS, ids=IDS)
    pool.script({"wake@green": "oom"})
    with_model = {"hold": {"max_hold_s": 5}}
    pool.deploy(TWO_SLOTS | with_model, ids=IDS)
    pool.script({"wake@green": "oom"})
    before = {slot["slot"] for slot in pool.status()["slots"]}
    assert mixed(pool, "green")[0].status == 503
    assert len(served(mixed(pool, "red", "blue"), 5)) == 2
    lost = [engine for slot in pool.status()["slots"] for engine in slot["engines"] if engine["error"]]
    assert lost, pool.status()["slots"]
    assert "out of memory" in lost[0]["error"] and "red (host) holds" in lost[0]["error"]
    pool.script({})
    pool.wait(lambda s: not any(e["error"] for slot in s["slots"] for e in slot["engines"]), "whole slots", 60)
    pool.wait(lambda s: not before & {slot["slot"] for slot in s["slots"]}, "new slots")
    assert len(served(mixed(pool, "green"), 5)) == 1


def test_a_coordinator_that_restarts_knows_who_serves_what(pool: Pool) -> None:
    """Slots tell it; streams go on, and the next requests find their models."""
    import ray

    from serve_app.pool import naming

    pool.deploy(TWO_SLOTS, ids=IDS)

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(timeout=60) as client:
            streams = [asyncio.create_task(pool.stream(client, 100, model=model)) for model in ("red", "green")]
            await asyncio.sleep(1)
            ray.kill(naming.coordinator(pool.coordinators()[0]))
            streams += [asyncio.create_task(pool.stream(client, 100, model=model)) for model in ("red", "green")]
            return await asyncio.gather(*streams)

    answers = asyncio.run(run())
    assert [(answer.model, answer.tokens) for answer in answers] == [("red", 100), ("green", 100)] * 2


def test_the_ready_tier_keeps_one_model_awake_in_every_standby(pool: Pool) -> None:
    """It gives way to another model, and comes back when that one is done."""
    live = TWO_SLOTS | {"models": {"green": {"tier": "ready"}}}
    pool.deploy(live, ids=IDS)
    pool.wait(lambda s: [engines(slot)["green"]["tier"] for slot in s["slots"]] == ["ready"] * 2, "green is awake")
    assert len(served(mixed(pool, "red", "green"), 5)) == 2
    pool.wait(lambda s: [engines(slot)["green"]["tier"] for slot in s["slots"]] == ["ready"] * 2, "green is back")
    assert {engines(slot)["red"]["tier"] for slot in pool.status()["slots"]} == {"host"}


def test_slots_with_little_memory_hold_what_fits_and_all_models_together(pool: Pool) -> None:
    """Room for two engines each: the second slot holds first what the first one does not."""
    pool.deploy(TWO_SLOTS, ids=IDS, slot={"host_ram_gb": 2.5}, engine={"weights_bytes": 10**9})
    held = sorted(sorted(engines(slot)) for slot in pool.status()["slots"])
    assert held == [["blue", "red"], ["green", "red"]]
    assert len(served(mixed(pool, *IDS), 5)) == 3


def test_two_slots_on_one_gpu_never_wake_at_the_same_time(cluster: Cluster, pool: Pool) -> None:
    """Concurrent demands: each wake waits for the other one to end."""
    node = cluster.add_node(num_cpus=2, num_gpus=1)
    try:
        pool.deploy(TWO_SLOTS, ids=["one", "two"], slot={"gpus": 0.5}, engine={"wake_host_s": 0.4})
        begin = time.time()
        assert len(served(mixed(pool, "one", "two"), 5)) == 2
        pool.settled(active=0, standby=2)
        wakes = [
            (stage["start_s"], stage["start_s"] + stage["duration_s"])
            for entry in pool.promotions()
            for stage in entry["stages"]
            if stage["stage"] == "engine.wake.weights" and entry["start_s"] > begin
        ]
        assert len(wakes) == 2, json.dumps(wakes)
        first, second = sorted(wakes)
        assert first[1] <= second[0]
    finally:
        from ray import serve

        serve.delete("default")
        cluster.remove_node(node)
