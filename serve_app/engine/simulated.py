"""A scripted engine with honest timings: for tests, for rehearsals of a cluster without GPUs, and for planning.

It answers the OpenAI chat and completions API with made-up tokens at a set pace, and it answers 500 if a request ever
reaches it while it is not awake, which is how the pool's tests notice a broken gate.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.engine.base import AsgiApp, EngineLoad, EngineMemory, Fingerprint
from serve_app.engine.merging import tokens_per_event
from serve_app.errors import EngineError, GpuNotFree, OutOfMemory
from serve_app.strict import Strict, parse_strict
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord, stage

if TYPE_CHECKING:
    from serve_app.engine.simulated_ranks import SimulatedRanks


class SimulatedTimes(Strict):
    """What `engine_kwargs` may say for this engine; seconds unless the name says otherwise."""

    start_s: float = Field(default=1.0, ge=0)
    first_sleep_s: float = Field(default=0.05, ge=0)
    sleep_s: float = Field(default=0.02, ge=0)
    wake_host_s: float = Field(default=0.05, ge=0)
    wake_disk_s: float = Field(default=0.3, ge=0)
    verify_s: float = Field(default=0.01, ge=0)
    first_token_s: float = Field(default=0.02, ge=0)
    token_s: float = Field(default=0.02, ge=0)
    max_num_seqs: int = Field(default=8, ge=1)
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    prefill_tokens_per_s: float | None = Field(
        default=None, gt=0, description="Prompts are computed one after the other at this pace; null: at once."
    )
    kv_fills: bool = Field(default=False, description="A full batch counts as a full KV cache.")
    weights_bytes: int = Field(default=1 << 30, ge=0)
    kv_cache_bytes: int = Field(default=1 << 28, ge=0)
    script: str = Field(
        default="",
        description="A JSON file read before each step: {'wake': 'fail'|'hang'|'oom', 'golden': 'drift', "
        "'start': 'fail'|'held', 'core': 'dead'}; a step may be limited to one slot's process or one model: "
        "'wake@PID', 'wake@MODEL'.",
    )


def simulated_times(model: ModelConfig) -> SimulatedTimes:
    """Read a model's `engine_kwargs`. Raises ConfigError naming each wrong key."""
    return parse_strict(SimulatedTimes, model.engine_kwargs, f"models.{model.id}.engine_kwargs")


@dataclass
class _Core:
    """What models that share an engine share.

    Attributes:
        loaded: the model whose weights it has. tier: None before it has started, and once it has ended.
        slept: it has pinned its memory.
    """

    loaded: str
    tier: Tier | None = None
    slept: bool = False


class SimulatedEngine:
    """See the module."""

    def __init__(self, model: ModelConfig, slot: SlotConfig, owner: SimulatedEngine | None = None) -> None:
        self._slot, self._owner = slot, owner
        self._core = owner.core if owner else _Core(model.id)
        self._times = simulated_times(model)
        self._model = model.id
        self._spans_nodes = slot.nodes > 1
        self._ranks: SimulatedRanks | None = None
        self._rank_nodes: tuple[str, ...] = ()
        self._merge = slot.merge_events
        self._running = 0
        self._batch = asyncio.Semaphore(self._times.max_num_seqs)
        self._prefill, self._prefiller = 0, asyncio.Lock()
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        self._app = Starlette(routes=routes)

    @property
    def app(self) -> AsgiApp:
        return self._app

    @property
    def core(self) -> _Core:
        return self._core

    @property
    def lent(self) -> bool:
        return self._core.loaded != self._model

    def variant(self, model: ModelConfig) -> SimulatedEngine:
        return SimulatedEngine(model, self._slot, self)

    async def start(self) -> None:
        if self._owner:
            await self.wake()
            return
        with stage(Stage.ENGINE_CORE):
            if self._spans_nodes:
                await self._start_ranks()
            await asyncio.sleep(self._times.start_s)
            await self._scripted("start")
        self._core.tier = Tier.READY

    async def _start_ranks(self) -> None:
        from serve_app.engine.simulated_ranks import SimulatedRanks

        self._ranks = SimulatedRanks()
        self._rank_nodes = await self._ranks.start()

    async def rank_nodes(self) -> tuple[str, ...]:
        return self._rank_nodes

    async def warm_up(self) -> None:
        await asyncio.sleep(self._times.first_token_s)

    async def fingerprint(self) -> Fingerprint:
        await asyncio.sleep(self._times.verify_s)
        drift = 1.0 if self._script().get("golden") == "drift" else 0.0
        return Fingerprint("logprobs", tuple(-0.1 * i - drift for i in range(16)))

    async def sleep(self, tier: Tier) -> None:
        await self._scripted("sleep")
        if tier is not Tier.READY:
            await asyncio.sleep(self._times.sleep_s if self._core.slept else self._times.first_sleep_s)
            self._core.slept = True
        self._core.tier = tier

    async def wake(self) -> None:
        if self._core.tier is not Tier.READY:
            await self._wake_up()
        if self.lent:
            with stage(Stage.WAKE_WEIGHTS, tier=Tier.DISK.value):
                await self._scripted("wake")
                self._core.loaded = self._model
                await asyncio.sleep(self._times.wake_disk_s)

    async def _wake_up(self) -> None:
        with stage(Stage.WAKE_WEIGHTS, tier=str(self._core.tier)):
            await self._scripted("wake")
            await asyncio.sleep(self._times.wake_disk_s if self._core.tier is Tier.DISK else self._times.wake_host_s)
        with stage(Stage.WAKE_KV, bytes=self._times.kv_cache_bytes):
            await asyncio.sleep(0)
        self._core.tier = Tier.READY

    async def read_gpus(self) -> None:
        pass

    async def worker_stages(self) -> list[StageRecord]:
        return []

    def load(self) -> EngineLoad:
        running = min(self._running, self._times.max_num_seqs)
        share = running / self._times.max_num_seqs
        return EngineLoad(running, self._running - running, share if self._times.kv_fills else 0.0, self._prefill)

    def memory(self, *, host: bool = True) -> EngineMemory:
        weights = 0 if self._core.tier in (Tier.DISK, None) else self._times.weights_bytes
        return EngineMemory(weights + (self._times.kv_cache_bytes if self._core.tier is Tier.READY else 0))

    async def check_health(self) -> None:
        if self._script().get("core") == "dead":
            raise EngineError("simulated EngineCore died")
        if self._ranks is not None:
            self._ranks.check()

    async def shutdown(self) -> None:
        if self._owner:
            return
        self._core.tier = None
        if self._ranks is not None:
            self._ranks.stop()

    async def _scripted(self, step: str) -> None:
        match self._script().get(step):
            case "fail":
                raise EngineError(f"simulated {step} failed")
            case "oom":
                raise OutOfMemory(f"model {self._model}: simulated {step}: out of memory")
            case "held":
                raise GpuNotFree("GPU-simulated 40.0 GB by pid 4711 (40.0 GB)", 0)
            case "hang":
                await asyncio.sleep(3600)
            case _:
                return

    def _script(self) -> dict[str, str]:
        """The script as it stands now, with the entries for other processes and models left out."""
        if not self._times.script or not Path(self._times.script).exists():
            return {}
        entries: dict[str, str] = json.loads(Path(self._times.script).read_text())
        mine = ("", str(os.getpid()), self._model)
        return {key.partition("@")[0]: value for key, value in entries.items() if key.partition("@")[2] in mine}

    async def _models(self, request: Request) -> Response:
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "serve_app"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _complete(self, request: Request) -> Response:
        if self._core.tier is not Tier.READY:
            return _error(500, f"a request reached an engine that is not awake ({self._core.tier})", "server_error")
        if self.lent:
            return _error(
                500, f"a request reached an engine that has the weights of {self._core.loaded}", "server_error"
            )
        try:
            body: dict[str, Any] = await request.json()
        except ValueError:
            return _error(400, "the body is not JSON", "invalid_request_error")
        if body.get("model") != self._model:
            return _error(404, f"the model '{body.get('model')}' does not exist", "not_found_error")
        chat = request.url.path.endswith("/chat/completions")
        tokens = self._tokens(int(body.get("max_tokens") or 16), _prompt_tokens(body))
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(self._stream(tokens, chat, usage), media_type="text/event-stream")
        text = "".join([token async for token in tokens])
        return JSONResponse(self._object(chat, text, whole=True))

    async def _tokens(self, count: int, prompt_tokens: int) -> AsyncIterator[str]:
        """`count` tokens at the set pace, in a batch of at most `max_num_seqs`; asleep in the middle is an error."""
        self._running += 1
        try:
            async with self._batch:
                await self._compute_prompt(prompt_tokens)
                await asyncio.sleep(self._times.first_token_s)
                for index in range(count):
                    if self._core.tier is not Tier.READY:
                        raise EngineError("the engine fell asleep under a running request")
                    if self.lent:
                        raise EngineError(f"the engine became {self._core.loaded} under a running request")
                    yield f"token{index} "
                    await asyncio.sleep(self._times.token_s)
        finally:
            self._running -= 1

    async def _compute_prompt(self, tokens: int) -> None:
        if self._times.prefill_tokens_per_s is None:
            return
        self._prefill += tokens
        try:
            async with self._prefiller:
                await asyncio.sleep(tokens / self._times.prefill_tokens_per_s)
        finally:
            self._prefill -= tokens

    async def _stream(self, tokens: AsyncIterator[str], chat: bool, usage: bool) -> AsyncIterator[str]:
        """As vLLM merges: the first token at once, then so many to an event, at the end what is left."""
        size, due, merged, count = tokens_per_event(self._running, self._merge), 1, "", 0
        async for token in tokens:
            merged, due, count = merged + token, due - 1, count + 1
            if due <= 0:
                yield self._event(chat, merged)
                merged, due = "", size
        if merged:
            yield self._event(chat, merged)
        if usage:
            total = {"usage": {"prompt_tokens": 0, "completion_tokens": count, "total_tokens": count}, "choices": []}
            yield f"data: {json.dumps(self._object(chat, '', whole=False) | total)}\n\n"
        yield "data: [DONE]\n\n"

    def _event(self, chat: bool, text: str) -> str:
        return f"data: {json.dumps(self._object(chat, text, whole=False))}\n\n"

    def _object(self, chat: bool, text: str, *, whole: bool) -> dict[str, Any]:
        """One completion object or chunk; the process id tells tests which slot answered."""
        kind = ("chat.completion" if chat else "text_completion") + ("" if whole else ".chunk" if chat else "")
        message = {"role": "assistant", "content": text}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if whole else None}
        choice |= {("message" if whole else "delta"): message} if chat else {"text": text}
        return {
            "id": f"sim-{os.getpid()}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
        }


def _prompt_tokens(body: dict[str, Any]) -> int:
    """A word is a token; so is an entry of a list of token ids."""
    prompt = body.get("prompt") or [message.get("content", "") for message in body.get("messages") or []]
    words = prompt.split() if isinstance(prompt, str) else prompt
    return sum(len(word.split()) if isinstance(word, str) else 1 for word in words)


def _error(status: int, message: str, kind: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
