"""All engines of one slot: one awake at most, the others asleep. Nothing here runs two of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from serve_app import engine as engines
from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine.base import AsgiApp, Engine, EngineLoad, Fingerprint, Siblings
from serve_app.errors import OutOfMemory, Refused, StageTimeout
from serve_app.live import Verify
from serve_app.pool.messages import Command, EngineReport, Welcome
from serve_app.slot.held import HeldEngine, Introduce
from serve_app.slot.turn import gpu_turn
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import stage


class SlotEngines:
    """The slot calls one method at a time: its state machine allows one transition at a time."""

    def __init__(self, models: Sequence[ModelConfig], slot: SlotConfig) -> None:
        self._slot = slot
        owners: dict[str, Engine] = {}  # by engine id: the first of its models, which starts its processes
        last = len({model.engine_id for model in models}) - 1
        self._held: dict[str, HeldEngine] = {}
        for model in models:
            owner = owners.get(model.engine_id)
            siblings = Siblings(started=len(owners), to_come=last - len(owners))
            engine = owner.variant(model) if owner else engines.create(model, slot, siblings)
            owners.setdefault(model.engine_id, engine)
            self._held[model.id] = HeldEngine(model, slot, engine)

    async def start(
        self, introduce: Introduce | None, started: Callable[[HeldEngine], Coroutine[Any, Any, None]]
    ) -> None:
        """Start the engines one after the other; then each sleeps at its tier, but one of tier `ready`.

        Args:
            started: called with each engine as soon as it has started.
        """
        welcomes: dict[str, Welcome] = {}
        alone = len(self._held) == 1
        for name, held in self._held.items():
            async with gpu_turn(self._slot):
                await held.engine.start()
                await started(held)
                welcomes[name] = await held.warm_up(introduce)
                if welcomes[name].tier is not Tier.READY or not alone:
                    await held.sleep_first(_asleep(welcomes[name].tier))
            await held.collect()
        # All of this is within the deadline of the cold start.
        for held in self._kept_ready({name: welcome.tier for name, welcome in welcomes.items()}):
            await held.wake()
            await held.verify(welcomes[held.model.id].verify, welcomes[held.model.id].tolerance)

    def ensure_usable(self, model: str) -> None:
        """Raises Refused if this slot cannot wake this model."""
        if model not in self._held:
            raise Refused(f"this slot does not hold {model}, only {', '.join(self._held)}")
        if self._held[model].error:
            raise Refused(f"this slot has lost its engine of {model}: {self._held[model].error}")

    async def wake(self, command: Command) -> HeldEngine:
        """Wake and verify the engine of the command's model, after any other one has fallen asleep.

        Raises:
            StageTimeout, GoldenMismatch, EngineError.
            OutOfMemory: with what each engine holds.
        """
        held = self._held[command.model]
        was_awake = held.tier is Tier.READY
        async with gpu_turn(self._slot):
            for other in self.usable:
                # An engine that both share changes its weights as it is, awake.
                if other.tier is Tier.READY and other.model.engine_id != held.model.engine_id:
                    await self._sleep(other, command)
            try:
                await within(held.wake(), command.wake_s, "engine.wake")
            except OutOfMemory as short:
                raise OutOfMemory(f"{short}; {self._holders()}") from short
        # An engine of tier `ready` is still the one that was verified when it started or woke up last.
        if not was_awake:
            await self._verify(held, command)
        return held

    async def rest(self, command: Command) -> None:
        """Each engine at the command's tier for it, as long as none serves.

        Raises:
            StageTimeout, EngineError.
            GoldenMismatch: of the one kept awake: the next promotion for it checks no more.
        """
        before = {held: held.tier for held in self._resting(command)}
        changing = self._changing(command)
        asleep = [] if self.stays_awake(command) else [held for held in before if held.tier is Tier.READY]
        async with gpu_turn(self._slot):
            for held in asleep:
                await self._sleep(held, command)
            for held in changing:
                await within(held.wake(), command.wake_s, "engine.wake")
                await self._sleep(held, command)
            woken = self._kept_ready(command.tiers)
            for held in woken:
                await within(held.wake(), command.wake_s, "engine.wake")
        for held in woken:
            await self._verify(held, command)
        for held in before:
            if held in changing or held.tier is not before[held]:
                await held.collect()

    def stays_awake(self, command: Command) -> bool:
        """Whether `rest` leaves the engine that is awake as it is."""
        resting = self._resting(command)
        return not self._changing(command) and all(
            tier is Tier.READY for held, tier in resting.items() if held.tier is Tier.READY
        )

    async def give_up(self, model: str, error: str) -> None:
        """End one engine for good, and with it all models that share it; the others can still serve."""
        for held in reversed(self._sharing(model)):
            await held.end(error)

    def has_others(self, model: str) -> bool:
        """Whether a model is left that could still serve without the engine of this one."""
        return any(held not in self._sharing(model) for held in self.usable)

    async def shutdown(self) -> None:
        for held in self._held.values():
            await held.engine.shutdown()

    async def check_health(self) -> None:
        """Raise EngineError if an engine has died. Busy is not dead."""
        for held in self.usable:
            if held.tier is not None:
                await held.engine.check_health()

    async def read_memory(self) -> None:
        for held in self.usable:
            await held.read_memory()

    def load(self) -> EngineLoad:
        """Of the engine that is awake; safe from any thread."""
        awake = [held for held in self.usable if held.tier is Tier.READY]
        return awake[0].engine.load() if awake else EngineLoad()

    @property
    def awake(self) -> str:
        """Id of the model whose engine is awake, and with whose weights; empty if all are asleep."""
        return next((held.model.id for held in self.usable if held.tier is Tier.READY), "")

    def app(self, model: str) -> AsgiApp:
        return self._held[model].engine.app

    @property
    def usable(self) -> list[HeldEngine]:
        return [held for held in self._held.values() if not held.error]

    @property
    def golden_failed(self) -> bool:
        return any(held.golden_failed for held in self._held.values())

    def introductions(self) -> list[tuple[str, str, Fingerprint]]:
        """Model, kind and fingerprint of each verified engine."""
        return [(held.model.id, held.kind, held.anchor) for held in self.usable if held.anchor is not None]

    def reports(self) -> tuple[EngineReport, ...]:
        return tuple(held.report() for held in self._held.values())

    async def _sleep(self, held: HeldEngine, command: Command) -> None:
        tier = _asleep(command.tiers.get(held.model.id, Tier.HOST))
        with stage(Stage.SLEEP, tier=str(tier), model=held.model.id):
            await within(held.sleep(tier), command.sleep_s, Stage.SLEEP)

    async def _verify(self, held: HeldEngine, command: Command) -> None:
        if command.verify is not Verify.OFF:
            await within(held.verify(command.verify, command.tolerance), command.verify_s, Stage.VERIFY)

    def _resting(self, command: Command) -> dict[HeldEngine, Tier]:
        """The engines that have a tier of their own now, each with the one it is to have."""
        return {held: command.tiers.get(held.model.id, Tier.HOST) for held in self.usable if not held.engine.lent}

    def _changing(self, command: Command) -> list[HeldEngine]:
        """Those that sleep at another level than they are to: in between they must be awake."""
        resting = self._resting(command).items()
        return [held for held, tier in resting if tier is not Tier.READY and held.tier not in (tier, Tier.READY)]

    def _kept_ready(self, tiers: Mapping[str, Tier]) -> list[HeldEngine]:
        """Who is to stay awake, which one engine of a slot may, and is not."""
        return [held for held in self.usable if tiers.get(held.model.id) is Tier.READY and held.tier is not Tier.READY]

    def _sharing(self, model: str) -> list[HeldEngine]:
        shared = self._held[model].model.engine_id
        return [held for held in self.usable if held.model.engine_id == shared]

    def _holders(self) -> str:
        """What each engine of the slot holds, for people."""
        return "; ".join(f"{report.model} {_holds(report)}" for report in self.reports())


def _holds(report: EngineReport) -> str:
    gpu = f"{max(report.device_bytes) / 1e9:.1f} GB of each GPU, " if report.device_bytes else ""
    return f"({report.tier or 'ended'}) holds {gpu}{report.host_bytes / 1e9:.1f} GB of host memory"


def _asleep(tier: Tier) -> Tier:
    """The level at which an engine sleeps while another one of its slot is awake."""
    return Tier.HOST if tier is Tier.READY else tier


async def within(work: Coroutine[Any, Any, Any], deadline_s: float | None, name: str) -> Any:
    """Await `work`, at most `deadline_s` seconds. Raises StageTimeout."""
    try:
        return await asyncio.wait_for(work, deadline_s)
    except TimeoutError as late:
        raise StageTimeout(str(name), deadline_s or 0.0) from late
