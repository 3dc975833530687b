"""Upgrades and rollbacks with `serve deploy` under load, where a third slot has no room: nobody may notice.

The head node has 16 CPUs and a slot takes 8, so every new slot waits for an old one to go.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from ray import serve

from serve_app.pool import naming

from .pool import MODEL, Pool

TWO = {"slots": {"min": 2, "max": 2, "demote_after_s": 1}}
SLOT = {"cpus": 8, "max_ongoing_requests": 40}
EVERY_S = 0.1
TOKENS = 5
# Streams that begin before the rollout and end after their slot has been told to go.
LONG_STREAMS, LONG_TOKENS = 3, 300
# States in which a slot gets no new requests.
ROUTED_PAST = ("draining", "parking", "standby")


@dataclass
class Watch:
    """What a bystander sees during a rollout, several times a second.

    Attributes:
        stopped: slots in the order in which Serve began to stop them, each with its state just before.
        active: how many slots were active, over all coordinators, at each look.
        promotions: slot and reason of every promotion so far.
    """

    stopped: list[tuple[str, str]] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    promotions: set[tuple[str, str]] = field(default_factory=set)
    _done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        states: dict[str, str] = {}
        while not self._done.wait(0.05):
            leaving = {name for name, state in replicas() if state == "STOPPING"}
            for slot in sorted(leaving - {name for name, _ in self.stopped}):
                self.stopped.append((slot, states.get(slot, "")))
            now: dict[str, str] = {}
            for status in statuses():
                now |= {slot["slot"]: slot["state"] for slot in status["slots"]}
                done = [entry for entry in status["ledger"] if entry["kind"] == "promotion"]
                self.promotions |= {(entry["slot"], entry["reason"]) for entry in done}
            states |= {slot: state for slot, state in now.items() if slot not in leaving}
            self.active.append(sum(1 for slot, state in now.items() if state == "active" and slot not in leaving))

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def replicas() -> list[tuple[str, str]]:
    """Id and Serve's state of every slot, in Serve's own order."""
    details: dict[str, Any] = serve.context._get_global_client().get_serve_details()
    deployment = details["applications"]["default"]["deployments"].get("Slot", {"replicas": []})
    return [(replica["replica_id"], replica["state"]) for replica in deployment["replicas"]]


def slot_message() -> str:
    """What Serve says of the slot deployment."""
    deployments = serve.status().applications["default"].deployments
    return deployments["Slot"].message if "Slot" in deployments else ""


def statuses() -> list[dict[str, Any]]:
    """What all coordinators say."""
    found: list[dict[str, Any]] = []
    for name in naming.coordinator_names("default"):
        try:
            found.append(ray.get(naming.coordinator(name).status.remote(), timeout=5))
        except (ValueError, ray.exceptions.RayError):
            continue  # gone since it was listed
    return found


async def complete(client: openai.AsyncOpenAI, tokens: int) -> tuple[int, float]:
    """Tokens of one stream, and seconds to the first; raises what the client raises."""
    begin, first, count = time.monotonic(), 0.0, 0
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=tokens, stream=True
    )
    async for chunk in stream:
        first = first or time.monotonic() - begin
        count += (chunk.choices[0].delta.content or "").count("token")
    return count, first


async def under_load(pool: Pool, change: Any) -> tuple[list[Any], list[Any]]:
    """Ten requests a second, and a few long streams, until `change` has been carried out; all outcomes."""
    async with openai.AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        long = [asyncio.create_task(complete(client, LONG_TOKENS)) for _ in range(LONG_STREAMS)]
        await asyncio.sleep(0.5)
        changing = asyncio.create_task(asyncio.to_thread(change))
        short: list[asyncio.Task[Any]] = []
        while not changing.done():
            short.append(asyncio.create_task(complete(client, TOKENS)))
            await asyncio.sleep(EVERY_S)
        await changing
        return (
            await asyncio.gather(*short, return_exceptions=True),
            await asyncio.gather(*long, return_exceptions=True),
        )


def whole(outcomes: list[Any], tokens: int) -> bool:
    """Whether every stream came to its end."""
    failed = [outcome for outcome in outcomes if not isinstance(outcome, tuple) or outcome[0] != tokens]
    assert failed == [], f"{len(failed)} of {len(outcomes)} failed: {failed[:3]}"
    return bool(outcomes)


def slots(pool: Pool) -> set[str]:
    return {slot["slot"] for slot in pool.status()["slots"]}


@pytest.mark.parametrize("token_s", [0.021, 0.02], ids=["upgrade", "rollback"])
def test_upgrade_without_room_for_a_third_slot(pool: Pool, token_s: float) -> None:
    """No request fails, no stream is cut; the slot that goes first serves nobody, and one is active all the time."""
    if token_s != 0.02:
        pool.deploy(TWO, engine={"start_s": 3, "token_s": 0.02}, slot=SLOT)
    before = slots(pool)

    def change() -> None:
        pool.deploy(TWO, engine={"start_s": 3, "token_s": token_s}, slot=SLOT)
        pool.wait(lambda _: len(slots(pool)) == 2 and not before & slots(pool), "all are new")
        pool.settled(active=1, standby=1)

    with Watch() as watch:
        short, long = asyncio.run(under_load(pool, change))
    assert whole(short, TOKENS) and whole(long, LONG_TOKENS)
    assert [slot for slot, _ in watch.stopped if slot in before] and watch.stopped[0][1] in ROUTED_PAST
    assert watch.active and 0 not in watch.active
    assert [reason for _, reason in watch.promotions].count("rollout") == 1


def test_version_that_does_not_start_leaves_the_old_one_serving(pool: Pool, tmp_path: Path) -> None:
    """It costs the standby, not a request; to deploy the old version again restores it without touching its slot."""
    pool.deploy(TWO, engine={"start_s": 0.2, "token_s": 0.02}, slot=SLOT)
    before = slots(pool)
    broken = tmp_path / "script.json"
    broken.write_text('{"start": "fail"}')

    def change() -> None:
        pool.deploy(TWO, engine={"script": str(broken)}, slot=SLOT, wait=False)
        pool.wait(lambda _: "simulated start failed" in slot_message(), "the new version has failed to start")
        pool.deploy(TWO, engine={"start_s": 0.2, "token_s": 0.02}, slot=SLOT)

    with Watch() as watch:
        short, long = asyncio.run(under_load(pool, change))
    assert whole(short, TOKENS) and whole(long, LONG_TOKENS)
    assert watch.active and 0 not in watch.active
    assert [slot["slot"] for slot in pool.slots("active")][0] in before
