"""One of a slot's engines: how warm it is, what it was verified against, what it holds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable

from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine.base import Engine, EngineMemory, Fingerprint
from serve_app.errors import EngineError, GoldenMismatch
from serve_app.live import Verify
from serve_app.pool.messages import EngineReport, Welcome
from serve_app.slot import golden
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import keep, stage

log = logging.getLogger("ray.serve")

# Gives a model's kind and fingerprint to the coordinator.
Introduce = Callable[[str, str, Fingerprint], Awaitable[Welcome]]


class HeldEngine:
    """Its attributes are written on the slot's loop and read on the link's thread: each is replaced, never changed.

    Attributes:
        anchor: the fingerprint it is compared with. golden_failed: it once differed.
        error: why it cannot serve any more.
    """

    def __init__(self, model: ModelConfig, slot: SlotConfig, engine: Engine) -> None:
        self.model = model
        self.engine = engine
        self._tier: Tier | None = None
        self.anchor: Fingerprint | None = None
        self.golden_failed = False
        self.error = ""
        self._memory = EngineMemory()
        self._wake_s = 0.0
        self._device = f"gpu{slot.gpus}" if slot.gpus else "cpu"

    @property
    def tier(self) -> Tier | None:
        """`disk` also while the engine has the weights of another model, whatever that one's tier is."""
        return Tier.DISK if self._tier is not None and self.engine.lent else self._tier

    @property
    def kind(self) -> str:
        """What must be equal for two fingerprints to be comparable: model, configuration, device."""
        settings = json.dumps(self.model.engine_kwargs, sort_keys=True, default=str)
        return f"{self.model.id}/{self._device}/{hashlib.sha256(settings.encode()).hexdigest()[:12]}"

    async def warm_up(self, introduce: Introduce | None) -> Welcome:
        """After its start: serve a few requests and pass the golden check; returns at which tier to keep it and how
        strictly to check it.

        Args:
            introduce: None where there is no pool.

        Raises:
            GoldenMismatch: under `verify: enforce`.
        """
        self._tier = Tier.READY
        with stage(Stage.WARM_UP, model=self.model.id):
            await self.engine.warm_up()
        with stage(Stage.VERIFY, model=self.model.id):
            fingerprint = await self.engine.fingerprint()
        if introduce is None:
            return Welcome(fingerprint, Verify.OFF, 0.0, Tier.READY)
        welcome = await introduce(self.model.id, self.kind, fingerprint)
        self.anchor = welcome.anchor
        self._check(fingerprint, welcome.verify, welcome.tolerance)
        return welcome

    async def sleep_first(self, tier: Tier) -> None:
        """Fall asleep, wake and fall asleep: the first sleep pins host memory for seconds, and nobody else may pay."""
        with stage(Stage.FIRST_SLEEP, tier=str(tier), model=self.model.id):
            await self.sleep(tier)
            await self.wake()
            await self.sleep(tier)

    async def sleep(self, tier: Tier) -> None:
        await self.engine.sleep(tier)
        self._tier = tier

    async def wake(self) -> None:
        begin = time.monotonic()
        await self.engine.wake()
        self._tier, self._wake_s = Tier.READY, time.monotonic() - begin

    async def verify(self, verify: Verify, tolerance: float) -> None:
        """The golden check of an engine that is awake. Raises GoldenMismatch under `verify: enforce`."""
        with stage(Stage.VERIFY, model=self.model.id):
            self._check(await self.engine.fingerprint(), verify, tolerance)

    async def collect(self, *, host: bool = True) -> None:
        """Add what its worker processes recorded, per rank, and read memory; a slot is no worse without it."""
        if self.engine.lent:
            return
        try:
            keep(await self.engine.worker_stages())
        except EngineError as error:
            log.warning("model %s: no stages from its workers: %s", self.model.id, error)
        await self.read_memory(host=host)

    async def read_memory(self, *, host: bool = True) -> None:
        if self.engine.lent:
            return
        try:
            await self.engine.read_gpus()
        except EngineError as error:
            log.warning("model %s: its workers do not say what they hold: %s", self.model.id, error)
        self._memory = await asyncio.to_thread(self.engine.memory, host=host)

    async def end(self, error: str) -> None:
        """Give up for good: its processes end, and what they hold comes back."""
        self.error, self._tier = error, None
        await self.engine.shutdown()
        self._memory = EngineMemory()

    def report(self) -> EngineReport:
        lent = self.engine.lent
        memory = EngineMemory() if lent else self._memory
        return EngineReport(
            self.model.id,
            self.tier,
            memory.host_bytes,
            memory.device_bytes,
            memory.pids,
            self._wake_s,
            self.error,
            lent,
            memory.unused,
        )

    def _check(self, found: Fingerprint, verify: Verify, tolerance: float) -> None:
        if verify is Verify.OFF or self.anchor is None:
            return
        try:
            golden.check(self.anchor, found, tolerance)
        except GoldenMismatch as mismatch:
            self.golden_failed = True
            if verify is Verify.ENFORCE:
                raise
            log.warning("model %s: %s (verify: warn)", self.model.id, mismatch)
