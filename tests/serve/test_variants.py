"""Models that share an engine share a pool with others: every answer from the right one, one engine for all of them."""

from __future__ import annotations

import pytest

from .pool import Pool, served
from .test_models import IDS, ONE_SLOT, TWO_SLOTS, engines, mixed

SHARED = {"green": "red"}


@pytest.mark.parametrize("slots", [ONE_SLOT, TWO_SLOTS])
def test_bursts_on_models_that_share_an_engine_fail_nobody(pool: Pool, slots: dict[str, dict[str, float]]) -> None:
    """A simulated engine answers 500 if a request reaches it while it has another model's weights."""
    pool.deploy(slots, ids=IDS, engine_of=SHARED)
    wanted = [IDS[index * 7 % 3] for index in range(60)]
    answers = mixed(pool, *wanted, tokens=4, spread_s=0.02)
    wrong = [answer for answer, model in zip(answers, wanted, strict=True) if not answer.done or answer.model != model]
    assert wrong == []
    status = pool.settled(active=0)
    for slot in status["slots"]:
        held = engines(slot)
        assert sum(held[name]["lent"] for name in ("red", "green")) == 1, "one engine has the weights of one model"
        assert {engine["tier"] for engine in held.values() if not engine["lent"]} == {"host"}


def test_slots_with_little_memory_hold_all_models_of_one_engine(pool: Pool) -> None:
    """Room for two engines: both models of the shared one, and the third."""
    pool.deploy(ONE_SLOT, ids=IDS, engine_of=SHARED, slot={"host_ram_gb": 2.5}, engine={"weights_bytes": 10**9})
    [slot] = pool.status()["slots"]
    assert set(engines(slot)) == set(IDS)
    assert len(served(mixed(pool, *IDS), 5)) == 3


def test_the_ready_tier_keeps_a_model_awake_that_shares_its_engine(pool: Pool) -> None:
    """It gives its engine to the other one, and gets it back; then nothing more is ordered."""
    pool.deploy(ONE_SLOT | {"models": {"red": {"tier": "ready"}}}, ids=IDS, engine_of=SHARED)

    def red_is_awake() -> None:
        pool.wait(lambda s: [engines(slot)["red"]["tier"] for slot in s["slots"]] == ["ready"], "red is awake")

    red_is_awake()
    assert len(served(mixed(pool, "green"), 5)) == 1
    red_is_awake()
    assert len(served(mixed(pool, "red"), 5)) == 1


def test_an_engine_without_memory_is_lost_for_all_its_models(pool: Pool) -> None:
    """The slot serves the third one, and is replaced by a whole one."""
    pool.deploy(TWO_SLOTS | {"hold": {"max_hold_s": 5}}, ids=IDS, engine_of=SHARED)
    before = {slot["slot"] for slot in pool.status()["slots"]}
    pool.script({"wake@green": "oom", "wake@red": "oom"})
    assert mixed(pool, "green")[0].status == 503
    assert len(served(mixed(pool, "blue"), 5)) == 1
    lost = [engine["model"] for slot in pool.status()["slots"] for engine in slot["engines"] if engine["error"]]
    assert lost and lost.count("red") == lost.count("green")
    pool.script({})
    pool.wait(lambda s: not before & {slot["slot"] for slot in s["slots"]}, "new slots")
    assert len(served(mixed(pool, "green", "red"), 5)) == 2
