"""The engines of one slot, of which one is kept `ready`: each time it wakes it is checked, and has a deadline."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine.base import Fingerprint
from serve_app.errors import GoldenMismatch, StageTimeout
from serve_app.live import Verify
from serve_app.pool.messages import Command, Verb, Welcome
from serve_app.slot.engines import SlotEngines
from serve_app.slot.held import HeldEngine

from .test_simulated import INSTANT

pytestmark = pytest.mark.asyncio

TIERS = {"ready": Tier.READY, "other": Tier.HOST}


def order(model: str = "", verify: Verify = Verify.ENFORCE) -> Command:
    return Command(1, 1, Verb.PROMOTE, model, TIERS, verify, wake_s=0.2, sleep_s=5, verify_s=5)


async def started(script: Path, of: str = "", drifts: bool = False) -> SlotEngines:
    """Model `ready` is awake, model `other` asleep; `of`: whose engine it shares.

    Args:
        drifts: the weights of `ready` come back broken from its first sleep.
    """
    models = [
        ModelConfig(id=name, engine="simulated", engine_kwargs=INSTANT | {"script": str(script)}, engine_of=sharing)
        for name, sharing in (("ready", ""), ("other", of))
    ]
    made = SlotEngines(models, SlotConfig())

    async def introduce(model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        if drifts:
            say(script, {"golden@ready": "drift"})
        return Welcome(fingerprint, Verify.ENFORCE, 0.2, TIERS[model])

    async def on_started(held: HeldEngine) -> None:
        pass

    await made.start(introduce, on_started)
    assert made.awake == "ready"
    return made


def say(script: Path, entries: dict[str, Any]) -> None:
    script.write_text(json.dumps(entries))


@pytest.mark.parametrize("of", ["", "ready"])
async def test_an_engine_woken_to_be_kept_ready_is_checked(tmp_path: Path, of: str) -> None:
    """Its promotion finds it awake and checks no more, so this is the only time."""
    made = await started(tmp_path / "script", of)
    await made.wake(order("other"))
    say(tmp_path / "script", {"golden@ready": "drift"})
    with pytest.raises(GoldenMismatch):
        await made.rest(order())
    assert made.golden_failed


@pytest.mark.parametrize("verify", [Verify.WARN, Verify.OFF])
async def test_it_stays_where_the_check_is_not_enforced(tmp_path: Path, verify: Verify) -> None:
    made = await started(tmp_path / "script")
    await made.wake(order("other"))
    say(tmp_path / "script", {"golden@ready": "drift"})
    await made.rest(order(verify=verify))
    assert (made.awake, made.golden_failed) == ("ready", verify is Verify.WARN)


async def test_a_slot_checks_it_also_at_its_start(tmp_path: Path) -> None:
    """It has slept there, so that the others could start."""
    with pytest.raises(GoldenMismatch):
        await started(tmp_path / "script", drifts=True)


@pytest.mark.parametrize("of", ["", "ready"])
async def test_a_wake_that_hangs_ends_at_its_deadline(tmp_path: Path, of: str) -> None:
    """The slot fails then, and is replaced; else it would fall asleep for ever."""
    made = await started(tmp_path / "script", of)
    await made.wake(order("other"))
    say(tmp_path / "script", {"wake@ready": "hang"})
    with pytest.raises(StageTimeout, match=r"engine\.wake"):
        await asyncio.wait_for(made.rest(order()), 5)


@pytest.mark.parametrize(
    ("awake", "tiers", "stays"),
    [
        ("ready", TIERS, True),
        ("ready", {"ready": Tier.HOST, "other": Tier.HOST}, False),
        ("ready", {"ready": Tier.READY, "other": Tier.DISK}, False),
        ("other", TIERS, False),
    ],
)
async def test_an_engine_stays_awake_where_neither_model_nor_tiers_change(
    tmp_path: Path, awake: str, tiers: dict[str, Tier], stays: bool
) -> None:
    """Requests of `service_tier: flex` may then stay inside. Two engines are never awake together."""
    made = await started(tmp_path / "script")
    await made.wake(order(awake))
    [before] = [held for held in made.usable if held.model.id == awake]
    slept: list[Tier] = []
    sleep = before.engine.sleep

    async def noted(tier: Tier) -> None:
        slept.append(tier)
        await sleep(tier)

    before.engine.sleep = noted  # type: ignore[method-assign]
    resting = replace(order(), tiers=tiers)
    assert made.stays_awake(resting) is stays
    await made.rest(resting)
    assert (not slept) is stays
