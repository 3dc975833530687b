"""A model on the vLLM engine of another one: own weights, loaded in place, and own server; one set of processes.

What differs stays here: weights, chat template, adapters, the arguments of vLLM's server. What vLLM has only once for
an engine must be equal (`engine/alike.py`), the tokenizer above all, of which EngineCore has one of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serve_app.engine import alike
from serve_app.engine.arguments import server_arguments
from serve_app.engine.base import AsgiApp, Engine, EngineLoad, EngineMemory, Fingerprint
from serve_app.engine.vllm import ModelFiles, VllmEngine, model_files
from serve_app.errors import EngineError
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord, stage

if TYPE_CHECKING:
    from serve_app.config import ModelConfig, SlotConfig, Tier


class VllmVariant:
    """See `serve_app.engine.base.Engine.variant`."""

    def __init__(self, model: ModelConfig, slot: SlotConfig, owner: VllmEngine) -> None:
        self._model = model
        self._slot = slot
        self._owner = owner
        self._files = ModelFiles(model.id, "")
        self._app: AsgiApp | None = None

    async def start(self) -> None:
        """Load its weights into the engine, which has started, and build its server.

        Raises:
            ConfigError: they do not fit that engine; the message says which file tells.
            EngineError: as for any engine.
        """
        with stage(Stage.MODEL_FILES, model=self._model.id):
            source = await asyncio.to_thread(model_files, self._model)
            await asyncio.to_thread(alike.check, self._model, self._owner.model)
        self._files = ModelFiles(self._model.id, source)
        await self.wake()
        with stage(Stage.API_SERVER, model=self._model.id):
            args = await asyncio.to_thread(server_arguments, self._model, self._slot, source)
            if args.chat_template is None:  # else vLLM would take the one of the engine's own tokenizer
                args.chat_template = await asyncio.to_thread(alike.chat_template, self._model, self._owner.model)
            self._app = await self._owner.build_app(args)

    @property
    def app(self) -> AsgiApp:
        if self._app is None:
            raise EngineError(f"model {self._model.id}: the engine has not started")
        return self._app

    @property
    def lent(self) -> bool:
        return self._owner.loaded != self._model.id

    def variant(self, model: ModelConfig) -> Engine:
        return self._owner.variant(model)

    async def warm_up(self) -> None:
        await self._owner.warm_up()

    async def fingerprint(self) -> Fingerprint:
        return await self._owner.fingerprint()

    async def sleep(self, tier: Tier) -> None:
        await self._owner.sleep(tier)

    async def wake(self) -> None:
        await self._owner.wake_with(self._files)

    async def read_gpus(self) -> None:
        await self._owner.read_gpus()

    async def worker_stages(self) -> list[StageRecord]:
        return await self._owner.worker_stages()

    async def rank_nodes(self) -> tuple[str, ...]:
        return await self._owner.rank_nodes()

    def load(self) -> EngineLoad:
        return self._owner.load()

    def memory(self, *, host: bool = True) -> EngineMemory:
        return self._owner.memory(host=host)

    async def check_health(self) -> None:
        await self._owner.check_health()

    async def shutdown(self) -> None:
        """Its processes end with the engine that they belong to."""
        self._app = None
