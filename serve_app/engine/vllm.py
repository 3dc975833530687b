"""The engine behind real slots: vLLM's AsyncLLM with its own OpenAI server, made to sleep and wake."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from serve_app.config import Tier
from serve_app.engine import caches, forkserver, processes
from serve_app.engine.arguments import check_engine_kwargs, prepare_environment, server_arguments
from serve_app.engine.base import ALONE, AsgiApp, Engine, EngineLoad, EngineMemory, Fingerprint, Siblings
from serve_app.engine.gpu_memory import GpuMemory
from serve_app.engine.imports import api_modules, import_vllm
from serve_app.engine.merging import merge_under_load
from serve_app.engine.stats import LastStats, prometheus_loggers, stat_logger
from serve_app.engine.worker_spans import WorkerSpans
from serve_app.errors import EngineError, OutOfMemory, ServeAppError
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord, stage
from serve_app.weights import checkpoint
from serve_app.weights.cache import NodeCache, Weights

if TYPE_CHECKING:
    from serve_app.config import ModelConfig, SlotConfig

__all__ = ["VllmEngine", "check_engine_kwargs"]

_GOLDEN_TOKENS = 16
# Prompt tokens and sampling of the warm-up, run together: lengths and paths that users hit first.
_WARM_UP: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, {"temperature": 0.0}),
    (64, {"temperature": 0.8, "top_p": 0.9}),
)
# On GPUs also what a CPU would take seconds for; kernels there are chosen, and some compiled, by length.
_WARM_UP_GPU: tuple[tuple[int, dict[str, Any]], ...] = (
    *_WARM_UP,
    (512, {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.5}),
    (2048, {"temperature": 1.0, "logprobs": 1}),
)
_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
_LEVELS = {Tier.HOST: 1, Tier.DISK: 2}
_END_GRACE_S = 5.0
# NCCL's own calls know no deadline. The ranks are idle then, and the reduction itself takes milliseconds.
_COMM_CHECK_S = 60.0


class ModelFiles(NamedTuple):
    """A model's id, and the directory of its files."""

    model: str
    directory: str


class VllmEngine:
    """One model's vLLM engine; see `serve_app.engine.base.Engine` for the contract.

    Call `shutdown` in the end, also after a `start` that failed or was cancelled.
    """

    def __init__(self, model: ModelConfig, slot: SlotConfig, siblings: Siblings = ALONE) -> None:
        self._model = model
        self._own = self._loaded = ModelFiles(model.id, "")  # until `start` knows its directory
        self._has_had_others = False
        self._siblings = siblings
        # vLLM binds to NUMA nodes by wrapping the executable of a spawned process: a forked one has none.
        self._fork = slot.forkserver and not model.engine_kwargs.get("numa_bind")
        self._slot = slot
        self._engine: Any = None
        self._app: AsgiApp | None = None
        self._tasks: tuple[str, ...] = ()
        self._building: asyncio.Future[Any] | None = None
        self._groups: list[int] = []
        self._holds_server = False
        self._closing = False
        self._asleep: Tier | None = None
        self._host_bytes = 0
        self._weights: Weights | None = None
        self._gpu = GpuMemory(model, slot, siblings)
        self._stats = LastStats()
        self._spans = WorkerSpans(slot.nodes)

    async def start(self) -> None:
        """Build the engine until it can serve.

        Raises:
            ConfigError: `engine_kwargs` that this version of vLLM does not take.
            EngineError: a stage failed; the message says which.
        """
        prepare_environment(self._slot, self._model, self._siblings)
        await asyncio.to_thread(self._gpu.prepare)
        if self._fork:
            await asyncio.to_thread(forkserver.acquire)
            self._holds_server = True
        with self._step(Stage.IMPORT):
            await asyncio.to_thread(import_vllm)
        with self._step(Stage.MODEL_FILES):
            source = await asyncio.to_thread(model_files, self._model)
        self._own = self._loaded = ModelFiles(self._model.id, source)
        if self._slot.node_cache.enabled:
            # Here rather than in the workers, whose errors vLLM keeps to itself; they find the weights then.
            with self._step(Stage.WEIGHTS_CACHE) as record:
                await asyncio.to_thread(self._cache_weights, Path(source))
                record.attributes.update(self._weights.attributes if self._weights else {})
        with self._step(Stage.ENGINE_CORE) as record:
            record.attributes["forkserver"] = self._fork
            args = await asyncio.to_thread(server_arguments, self._model, self._slot, source)
            await asyncio.to_thread(self._gpu.fix_kv_cache, args, source)
            self._building = asyncio.ensure_future(asyncio.to_thread(self._build, args))
            try:
                self._engine = await asyncio.shield(self._building)
            except Exception:
                self._gpu.forget_kv_cache()
                raise
        if self._model.world_size > 1:
            await self.check_communicator()
        if not self._pooling:
            merge_under_load(self._engine.output_processor, self._slot.merge_events)
        with self._step(Stage.API_SERVER):
            self._tasks = tuple(await self._alive.get_supported_tasks())
            self._app = await self.build_app(args)

    async def check_communicator(self) -> None:
        """Run an all-reduce over all ranks of the awake engine. Raises EngineError if it fails, or takes too long."""
        with self._step(Stage.COMM_CHECK):
            await self._alive.collective_rpc("check_communicator", self._slot.nccl.timeout_s or _COMM_CHECK_S)

    @property
    def app(self) -> AsgiApp:
        if self._app is None:
            raise EngineError(f"model {self._model.id}: the engine has not started")
        return self._app

    @property
    def model(self) -> ModelConfig:
        return self._model

    @property
    def loaded(self) -> str:
        """Id of the model whose weights it has, or is about to have."""
        return self._loaded.model

    @property
    def lent(self) -> bool:
        return self._loaded != self._own

    def variant(self, model: ModelConfig) -> Engine:
        from serve_app.engine.variant import VllmVariant

        return VllmVariant(model, self._slot, self)

    async def warm_up(self) -> None:
        shapes = _WARM_UP_GPU if self._slot.gpus else _WARM_UP
        with self._translated(Stage.WARM_UP):
            await asyncio.gather(*(self._run(tokens, max_tokens=4, ignore_eos=True, **how) for tokens, how in shapes))
        if self._slot.gpus:
            await asyncio.to_thread(caches.note_filled)

    async def fingerprint(self) -> Fingerprint:
        with self._translated(Stage.VERIFY):
            output = await self._run(_GOLDEN_TOKENS, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        if self._pooling:
            return Fingerprint("embedding", tuple(float(value) for value in output.outputs.data.flatten().tolist()))
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)  # the first token has none
        return Fingerprint("logprobs", tuple(float(found[token].logprob) for token, found in pairs if found))

    async def sleep(self, tier: Tier) -> None:
        if tier is Tier.READY or tier is self._asleep:
            return
        if self._asleep is not None:
            await self.wake_with(self._loaded)
        with self._translated(Stage.SLEEP):
            self._spans.note(Stage.SLEEP)
            self._asleep = tier
            await self._alive.sleep(level=_LEVELS[tier], mode="wait")
            await self._alive.reset_prefix_cache()  # its blocks are gone; here no request can be in the way
            if self._slot.gpus:
                self._gpu.note(await self._alive.collective_rpc("gpu_memory"))
                self._gpu.check_asleep()

    async def wake(self) -> None:
        await self.wake_with(self._own)

    async def wake_with(self, files: ModelFiles) -> None:
        """Wake from any tier, or stay awake, with these weights. No request may be in flight."""
        if self._asleep is not None:
            # Only from `disk` there are no weights that would have to come back before others can replace them.
            await self._wake_up(files if self._asleep is Tier.DISK else self._loaded)
        if files != self._loaded:
            with self._step(Stage.WAKE_WEIGHTS, tier=Tier.DISK.value, instead_of=self._loaded.model):
                await self._load(files)
                await self._alive.reset_prefix_cache()  # its blocks come from the weights of before

    async def _wake_up(self, files: ModelFiles) -> None:
        tier = self._asleep.value if self._asleep else ""
        self._spans.note(Stage.WEIGHTS_COPY)  # they overlap with both stages
        with self._step(Stage.WAKE_WEIGHTS, tier=tier):
            await self._alive.wake_up(["weights"])
            if self._asleep is Tier.DISK:
                await self._load(files)
        with self._step(Stage.WAKE_KV, tier=tier):
            await self._alive.wake_up(["kv_cache"])
            if await self._alive.is_sleeping():
                raise EngineError("the engine still sleeps after wake_up")
        self._asleep = None

    async def _load(self, files: ModelFiles) -> None:
        """Read weights into those that are there: graphs, communicators and addresses stay."""
        # As long as it has had no others, vLLM finds its own weights by itself, in every version.
        self._has_had_others = self._has_had_others or files != self._own
        path = {"weights_path": files.directory} if self._has_had_others else {}
        self._loaded = files
        self._spans.note(Stage.WEIGHTS_COPY)
        await self._alive.collective_rpc("reload_weights", kwargs=path)
        if self._alive.vllm_config.lora_config is not None:
            # Every model counts its adapters from 1. vLLM loads them again, from their paths, as they are asked for.
            for adapter in await self._alive.list_loras():
                await self._alive.remove_lora(adapter)

    async def read_gpus(self) -> None:
        if self._slot.gpus and self._asleep is None:
            with self._translated(Stage.ENGINE_CORE):
                self._gpu.note(await self._alive.collective_rpc("gpu_memory"))

    async def worker_stages(self) -> list[StageRecord]:
        with self._translated(Stage.ENGINE_CORE):
            ranks: list[list[dict[str, Any]]] = await self._alive.collective_rpc("take_stages")
        records = [_worker_record(values) for rank in ranks for values in rank]
        self._spans.export(records)
        self._gpu.learn(records)
        return records

    async def rank_nodes(self) -> tuple[str, ...]:
        with self._translated(Stage.ENGINE_CORE):
            return tuple(await self._alive.collective_rpc("ray_node"))

    def load(self) -> EngineLoad:
        if self._engine is None:
            return EngineLoad()
        # Exact, while the scheduler's counts are as old as its last step (an aborted request stays in them).
        processor = self._engine.output_processor
        unfinished = processor.get_num_unfinished_requests()
        waiting = min(self._stats.waiting, unfinished)
        prefill = sum(state.prompt_len for state in list(processor.request_states.values()) if state.is_prefilling)
        return EngineLoad(unfinished - waiting, waiting, self._stats.kv_use if unfinished else 0.0, prefill)

    def memory(self, *, host: bool = True) -> EngineMemory:
        pids = processes.members(self._groups)
        if host:
            self._host_bytes = processes.pss_bytes(pids)
        return EngineMemory(self._host_bytes, self._gpu.held, tuple(pids), self._gpu.unused)

    async def check_health(self) -> None:
        try:
            await self._alive.check_health()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"model {self._model.id}: the engine is dead: {error}") from error

    async def shutdown(self) -> None:
        self._closing = True
        await self._end_building()
        engine, self._engine, self._app = self._engine, None, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # else it takes the end of the process for a failure
            await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(processes.end, self._groups, _END_GRACE_S)
        if self._weights is not None:
            self._weights.close()
        if self._holds_server:
            self._holds_server = False
            forkserver.release()

    @property
    def _alive(self) -> Any:
        if self._engine is None:
            raise EngineError(f"model {self._model.id}: the engine has not started")
        return self._engine

    @property
    def _pooling(self) -> bool:
        return self._alive.model_config.runner_type == "pooling"

    @contextlib.contextmanager
    def _step(self, name: Stage, **attributes: str) -> Iterator[StageRecord]:
        """Run the body as a stage, its errors translated."""
        with stage(name, model=self.loaded) as record, self._translated(name):
            record.attributes.update(attributes)
            self._spans.note(name)
            yield record

    @contextlib.contextmanager
    def _translated(self, name: Stage) -> Iterator[None]:
        """What vLLM raises inside becomes an EngineError that says where (the slot records these stages)."""
        try:
            yield
        except ServeAppError:
            raise
        except Exception as error:
            kind = OutOfMemory if "out of memory" in str(error).lower() else EngineError
            raise kind(f"model {self.loaded}: {name}: {type(error).__name__}: {error}") from error

    def _cache_weights(self, directory: Path) -> None:
        """Have the model's weights in the node's cache, for as long as this slot lives."""
        settings = self._slot.node_cache
        cache = NodeCache(settings.max_bytes, settings.keep_s)
        self._weights = cache.acquire(checkpoint.load(checkpoint.find(directory)))

    def _build(self, args: Namespace) -> Any:
        """Build the AsyncLLM; blocks until its processes are ready."""
        arg_utils = importlib.import_module("vllm.engine.arg_utils")
        async_llm = importlib.import_module("vllm.v1.engine.async_llm")
        forkserver.install(self._fork)
        config = arg_utils.AsyncEngineArgs.from_cli_args(args).create_engine_config()
        with forkserver.collecting(self._groups):
            if self._closing:
                raise EngineError("shut down while it started")
            return async_llm.AsyncLLM.from_vllm_config(
                config,
                stat_loggers=[stat_logger(self._stats), *prometheus_loggers()],
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
            )

    async def build_app(self, args: Namespace) -> AsgiApp:
        """vLLM's own server on this engine, with the server's arguments in `args`."""
        app_module, state_module = api_modules()
        app = app_module.build_app(args, self._tasks, self._alive.model_config)
        await state_module.init_app_state(self._alive, app.state, args, self._tasks)
        app.state.server = SimpleNamespace(should_exit=False)  # vLLM sets it when the engine dies
        return cast("AsgiApp", app)

    async def _end_building(self) -> None:
        """After a cancelled start: end the processes that its thread waits for, then the thread ends too."""
        building, self._building = self._building, None
        if building is None:
            return
        while not building.done():
            await asyncio.to_thread(processes.end, list(self._groups), 0.0)
            await asyncio.wait([building], timeout=0.2)
        if not building.cancelled() and building.exception() is None:
            self._engine = building.result()

    def _prompt(self, tokens: int) -> dict[str, Any]:
        """Token ids spread over the vocabulary, the same in every slot; the salt keeps the prefix cache out."""
        config = self._alive.model_config
        count = max(1, min(tokens, config.max_model_len // 2))
        vocabulary = config.get_vocab_size()
        ids = [(index + 1) * vocabulary // (count + 2) for index in range(count)]
        return {"prompt_token_ids": ids, "cache_salt": uuid.uuid4().hex}

    async def _run(self, tokens: int, **sampling: Any) -> Any:
        """Run one prompt of at most `tokens` tokens, past the HTTP server, and return its last output."""
        prompt, request_id = self._prompt(tokens), f"serve-app-{uuid.uuid4().hex}"
        vllm = importlib.import_module("vllm")
        outputs: AsyncIterator[Any]
        if self._pooling:
            task = next(task for task in _POOLING_TASKS if task in self._tasks)
            outputs = self._alive.encode(prompt, vllm.PoolingParams(task=task), request_id)
        else:
            outputs = self._alive.generate(prompt, vllm.SamplingParams(**sampling), request_id)
        last: Any = None
        async for output in outputs:
            last = output
        return last


def _worker_record(values: dict[str, Any]) -> StageRecord:
    attributes = dict(values)
    name, start_s, duration_s, rank = (attributes.pop(key) for key in ("stage", "start_s", "duration_s", "rank"))
    return StageRecord(Stage(name), start_s, duration_s, attributes, rank, done=True)


def model_files(model: ModelConfig) -> str:
    from serve_app.models import ensure_model

    return str(ensure_model(model.resolved_source))
