"""`PoolCoordinator`: the one actor that decides which slot is active. Never in the data path.

It is a Serve deployment actor of the slot deployment: created before the slots, one per code version, restarted by the
controller when it dies. All state is in its `PoolBook`; this file is only the part that waits, listens and asks Ray.
Slots and routers reach it by hanging gets, so that a change is with them in milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray

from serve_app.engine.base import Fingerprint
from serve_app.live import LiveSettings
from serve_app.pool import capacity, naming, nodes, status
from serve_app.pool.book import PoolBook
from serve_app.pool.holdings import Budget, Holdings, ModelCost
from serve_app.pool.messages import Command, NeedReport, PoolTarget, RoleMap, SlotReport, Verb, Version, Welcome, Wish
from serve_app.pool.observer import Observer
from serve_app.pool.promotions import Promotions
from serve_app.pool.wanted import Wanted
from serve_app.telemetry import spans

log = logging.getLogger("serve_app.coordinator")

# How often the book is stepped when nobody says anything: delays are kept to this precision.
TICK_S = 0.1
# How often Ray is asked whether another slot would fit, and why slots are missing.
LOOK_S = 1.0
# A hanging get returns after this long, so that a dead caller does not wait here for ever.
HANG_S = 5.0


class PoolCoordinator:
    """Actor class; every method is a coroutine on one event loop, so nothing here needs a lock."""

    def __init__(
        self,
        live: dict[str, Any],
        models: dict[str, tuple[str, ...]],
        hard: int,
        slot_nodes: list[dict[str, float]],
        labels: dict[str, str],
    ) -> None:
        self._book = PoolBook(
            epoch=time.time_ns(),
            live=LiveSettings.model_validate(live),
            models=models,
            hard=hard,
            born_s=time.monotonic(),
        )
        self._promotions = Promotions()
        self._book.prepare = lambda slot, command: self._promotions.open(self._book, slot, command)
        self._wanted = Wanted()
        spans.configure("coordinator", str(self._book.epoch))
        self._slot_nodes, self._labels = slot_nodes, labels
        self._gpus = sum(node.get("GPU", 0.0) for node in slot_nodes)
        self._application = naming.application_of(str(ray.get_runtime_context().get_actor_name()))
        self._observer = Observer(self._application, self._gpus)
        self._looked_s = 0.0
        self._changed = asyncio.Condition()
        self._ticker: asyncio.Task[None] | None = None

    async def report(self, report: SlotReport) -> int:
        """A slot says how it is; returns our epoch, so that it notices a new coordinator."""
        if self._book.on_report(report, time.monotonic()):
            await self._step()
        return self._book.epoch

    async def introduce(self, model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        """A slot gives an engine's fingerprint; it gets the anchor to compare with and how strict to be.

        The first fingerprint of a kind (model, device, configuration) becomes the anchor of all later slots.
        """
        return self._book.welcome(model, kind, fingerprint)

    async def assign(self, slot: str, costs: list[ModelCost], budget: Budget) -> Holdings | None:
        """A new slot asks which models it is to hold: None while we do not know what the others hold.

        Raises:
            NothingFits: not even one model fits into the budget.
        """
        if self._book.blind(time.monotonic()):
            return None
        return self._book.assign(slot, costs, budget)

    async def is_needed(self, report: SlotReport) -> bool | None:
        """A new slot asks, before Serve counts it as running, whether it is to be active; None: we cannot tell yet."""
        await self.report(report)
        return None if self._book.blind(time.monotonic()) else self._book.is_needed(report.slot)

    async def slot_wanted(self) -> Wish:
        """A new slot asks since when it has been wanted, and what for it had to wait."""
        return self._wanted.oldest()

    async def settings(self) -> dict[str, Any] | None:
        """A new slot asks for the live settings: None until `Pool` has handed them over."""
        return self._book.live.model_dump(mode="json") if self._book.configured else None

    async def commands(self, slot: str, after: int) -> Command | None:
        """Hanging get of a slot: the next command with an op beyond `after`, or None after a while."""
        deadline = time.monotonic() + HANG_S
        while True:
            command = self._book.command_for(slot)
            if command is not None and command.op > after:
                return command
            if not await self._wait_for_change(deadline):
                return None

    async def watch(self, seen: Version) -> RoleMap:
        """Hanging get of a router: the role map once it is newer than `seen`, or the same one after a while."""
        deadline = time.monotonic() + HANG_S
        while self._book.role_map.version == seen or self._book.role_map.version == (0, 0):
            if not await self._wait_for_change(deadline):
                break
        return self._book.role_map

    async def need(self, need: NeedReport) -> None:
        """A router says what it cannot place, as a level."""
        if self._book.on_need(need, time.monotonic()):
            await self._step()

    async def configure(self, live: dict[str, Any], frozen: bool) -> int:
        """The `Pool` deployment hands over the live settings; it repeats this, so a new coordinator gets them too."""
        self._book.live = LiveSettings.model_validate(live)
        self._book.frozen, self._book.configured = frozen, True
        await self._step()
        return self._book.epoch

    async def target(self, current: int) -> PoolTarget:
        """The autoscaling policy asks how many slots there should be."""
        target, retire = self._book.target(current, time.monotonic())
        self._wanted.raised(target.slots - current)
        if retire is not None:
            log.info("retire", extra={"reason": retire.reason})
            await self._notify()
        return target

    async def operate(self, verb: str, slot: str, model: str, reason: str = "operator") -> str:
        """An operator's promote or drain, or a rollout's; see `PoolBook.operate`."""
        outcome = self._book.operate(Verb(verb), slot, model, time.monotonic(), reason)
        # A replacement for a drained slot is found now; once it drains, that slot itself would be the cheapest.
        await self._step()
        await self._notify()
        return outcome

    async def status(self, ledger: bool = True) -> dict[str, Any]:
        """Everything `serve-app status` and `serve-app ledger` show, as plain values.

        Args:
            ledger: False for who asks many times a second: the ledger is by far the larger part.
        """
        return status.of_book(self._book, time.monotonic(), self._gpus, ledger=ledger)

    async def _step(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        before = self._book.role_map.version
        commands = self._book.step(time.monotonic())
        self._promotions.follow(self._book)
        for command in commands:
            log.info("order %s: %s", command.verb, command.reason)
        if commands or self._book.role_map.version != before:
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, deadline: float) -> bool:
        """Wait until something was ordered or published; False when the deadline came first."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return False
        return True

    async def _tick(self) -> None:
        """Keep delays, leases and dead slots up to date. Must survive everything: it is the pool's heart."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._bury_dead_slots()
                await self._look_for_room()
                await self._step()
                self._observer.look(self._book, time.monotonic())
            except Exception:
                log.exception("coordinator tick failed; trying again")

    async def _look_for_room(self) -> None:
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        # As many again as there may be, in whose place they would be started, may be fenced.
        before, most = self._book.outlook.shortage, 2 * self._book.live.slots.max
        # Also as long as some had no place: they may have one now, or may be wanted no longer.
        missing = self._book.take_missing() or before is not None
        asked = self._book.asked  # before the look, which may miss what is asked for meanwhile
        seen, self._book.going = await asyncio.to_thread(self._look, most, missing=missing)
        self._book.outlook = replace(seen, asked=asked)
        if seen.shortage is not None:
            self._wanted.missing(seen.shortage.trouble)
        if seen.shortage and (before is None or before.trouble is not seen.shortage.trouble):
            infeasible = seen.shortage.trouble is capacity.Trouble.INFEASIBLE
            log.log(logging.WARNING if infeasible else logging.INFO, "slots are missing: %s", seen.shortage.message)

    def _look(self, most: int, *, missing: bool) -> tuple[capacity.Outlook, frozenset[str]]:
        going = nodes.draining_nodes()
        placed, unplaced = nodes.placed_slots(self._application) if missing else ([], [])
        if unplaced:
            unwanted = nodes.end_unwanted(self._application, unplaced)
            unplaced = [slot for slot in unplaced if slot not in unwanted]
        usable = nodes.live_nodes(self._labels, going)
        return capacity.outlook(self._slot_nodes, usable, most, len(placed), len(unplaced)), going

    async def _bury_dead_slots(self) -> None:
        for slot in self._book.suspects(time.monotonic()):
            if not await asyncio.to_thread(_actor_exists, self._book.slots[slot].report.actor):
                if self._book.on_dead(slot):
                    log.warning("slot %s is dead", slot)
                    self._observer.slot_died()
                self._wanted.raised(1)  # Serve replaces it


def _actor_exists(name: str) -> bool:
    """Ray forgets a named actor's name when the actor dies, so this tells dead from busy without asking the actor."""
    try:
        ray.get_actor(name, namespace="serve")
    except ValueError:
        return False
    return True
