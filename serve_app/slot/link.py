"""A slot's link to its coordinator: heartbeats out, commands in, on a thread with an event loop of its own.

The slot's own loop may be late under load; a busy slot must not look dead, so how late it is goes into the report.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Protocol

from ray.exceptions import RayTaskError

from serve_app.engine.base import Fingerprint
from serve_app.live import LiveSettings
from serve_app.pool import naming
from serve_app.pool.holdings import Budget, Holdings, ModelCost, NothingFits
from serve_app.pool.messages import Command, SlotReport, Welcome, Wish

log = logging.getLogger("ray.serve")

BEAT_S = 0.25
RETRY_S = 0.1
# A call that takes longer than this goes to a coordinator that is gone or stuck; look it up anew.
CALL_TIMEOUT_S = 10.0
WANTED_TIMEOUT_S = 1.0
# In an application that is being deployed, `Pool` hands over its settings a moment after the first slots start.
LIVE_TIMEOUT_S = 5.0


class LinkedSlot(Protocol):
    """What the link needs of a slot.

    `take`, `acknowledged` and `repeat` are called on the slot's loop, everything else on the link's thread.
    """

    def report(self, lag_s: float) -> SlotReport: ...

    def acknowledged(self, report: SlotReport) -> None: ...

    def introductions(self) -> list[tuple[str, str, Fingerprint]]: ...

    def repeat(self) -> None: ...

    def take(self, command: Command) -> None: ...


class Link:
    """Reports at every kick and several times a second; hands each new command to the slot.

    Args:
        slot: made and used on the running event loop, which is the slot's.
        coordinator: actor name of the coordinator.
    """

    def __init__(self, slot: LinkedSlot, coordinator: str) -> None:
        self._slot, self._coordinator = slot, coordinator
        self._slot_loop = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._kicked = asyncio.Event()
        self._epoch = 0
        self._probe_sent_s = self._probe_back_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="slot-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def kick(self) -> None:
        """Report now; from any thread."""
        self._loop.call_soon_threadsafe(self._kicked.set)

    async def introduce(self, model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        """Give the fingerprint to the coordinator, waiting for one to be there; called on the slot's loop."""
        future = asyncio.run_coroutine_threadsafe(self._introduce(model, kind, fingerprint), self._loop)
        return await asyncio.wrap_future(future)

    async def assign(self, costs: list[ModelCost], budget: Budget) -> Holdings:
        """Ask which models to hold, waiting for a coordinator that knows what the others hold. Raises NothingFits."""
        future = asyncio.run_coroutine_threadsafe(self._assign(costs, budget), self._loop)
        return await asyncio.wrap_future(future)

    async def wish(self) -> Wish:
        """When Serve wanted this slot, as far as the coordinator knows; empty if it does not, or is not there."""
        future = asyncio.run_coroutine_threadsafe(self._wish(), self._loop)
        return await asyncio.wrap_future(future)

    async def live(self) -> LiveSettings | None:
        """The live settings, once `Pool` has handed them over; None if it has not for LIVE_TIMEOUT_S."""
        future = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        return await asyncio.wrap_future(future)

    async def is_needed(self) -> bool | None:
        """Whether this slot is to be active now; None while the coordinator cannot tell, or is not there."""
        future = asyncio.run_coroutine_threadsafe(self._is_needed(), self._loop)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        tasks = [self._loop.create_task(self._beat()), self._loop.create_task(self._listen())]
        self._loop.run_forever()
        for task in tasks:
            task.cancel()

    async def _assign(self, costs: list[ModelCost], budget: Budget) -> Holdings:
        name = self._slot.report(0.0).slot
        while True:
            try:
                found: Holdings | None = await naming.coordinator(self._coordinator).assign.remote(name, costs, budget)
            except RayTaskError as error:
                if isinstance(error.cause, NothingFits):
                    raise error.cause from None
                found = None
            except Exception as error:
                log.debug("no coordinator to ask what to hold: %s", error)
                found = None
            if found is not None:
                return found
            await asyncio.sleep(RETRY_S)

    async def _introduce(self, model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        while True:
            try:
                return await naming.coordinator(self._coordinator).introduce.remote(model, kind, fingerprint)
            except Exception as error:
                log.debug("no coordinator to introduce to: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _wish(self) -> Wish:
        try:
            call = naming.coordinator(self._coordinator).slot_wanted.remote()
            return await asyncio.wait_for(call, WANTED_TIMEOUT_S)
        except Exception as error:
            log.debug("not known when this slot was wanted: %s", error)
            return Wish()

    async def _is_needed(self) -> bool | None:
        try:
            call = naming.coordinator(self._coordinator).is_needed.remote(self._slot.report(0.0))
            return await asyncio.wait_for(call, LIVE_TIMEOUT_S)
        except Exception as error:
            log.debug("not known whether this slot is needed: %s", error)
            return None

    async def _live(self) -> LiveSettings | None:
        deadline = time.monotonic() + LIVE_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                call = naming.coordinator(self._coordinator).settings.remote()
                live = await asyncio.wait_for(call, LIVE_TIMEOUT_S)
                if live is not None:
                    return LiveSettings.model_validate(live)
            except Exception as error:
                log.debug("no coordinator to ask for the live settings: %s", error)
            await asyncio.sleep(RETRY_S)
        return None

    async def _beat(self) -> None:
        while True:
            self._kicked.clear()
            try:
                report = self._slot.report(self._lag_s())
                call = naming.coordinator(self._coordinator).report.remote(report)
                epoch = await asyncio.wait_for(call, CALL_TIMEOUT_S)
                self._slot_loop.call_soon_threadsafe(self._slot.acknowledged, report)
                await self._notice_epoch(epoch)
            except Exception as error:
                log.debug("report: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await asyncio.wait_for(self._kicked.wait(), BEAT_S)
            except TimeoutError:
                continue

    async def _notice_epoch(self, epoch: int) -> None:
        """A new coordinator has neither anchors nor ledger: give it ours, so that both survive its predecessor."""
        if epoch == self._epoch:
            return
        # Behind `acknowledged`, on the same loop: the other way round, what is to be repeated would be acknowledged.
        self._slot_loop.call_soon_threadsafe(self._slot.repeat)
        for introduction in self._slot.introductions():
            await self._introduce(*introduction)
        self._epoch = epoch

    async def _listen(self) -> None:
        after, name = 0, self._slot.report(0.0).slot
        while True:
            try:
                call = naming.coordinator(self._coordinator).commands.remote(name, after)
                command = await asyncio.wait_for(call, CALL_TIMEOUT_S)
            except Exception as error:
                log.debug("commands: %s", error)
                after = 0  # another coordinator counts anew
                await asyncio.sleep(RETRY_S)
                continue
            if command is not None:
                after = command.op
                self._slot_loop.call_soon_threadsafe(self._slot.take, command)

    def _lag_s(self) -> float:
        """How late the slot's loop is: the time that the last probe took, or has been taking so far."""
        now = time.monotonic()
        if self._probe_back_s >= self._probe_sent_s:
            lag = self._probe_back_s - self._probe_sent_s
            self._probe_sent_s = now
            self._slot_loop.call_soon_threadsafe(self._probed)
            return lag
        return now - self._probe_sent_s

    def _probed(self) -> None:
        self._probe_back_s = time.monotonic()
