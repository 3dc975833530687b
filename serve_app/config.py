"""The static settings: Serve's `args`, a change of which replaces the slots one at a time.

Strict models that touch neither files nor network; what can be changed without replacing anything is in `live.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from serve_app.strict import Strict, parse_strict

DEFAULT_MODEL = "smollm2-135m"
# The two deployments of an application, by the names under which a Serve config file sets their options.
SLOT_DEPLOYMENT = "Slot"
POOL_DEPLOYMENT = "Pool"


class Tier(StrEnum):
    """How warm a standby's engine is kept."""

    READY = "ready"
    """Awake, only not routed to: promotion is a role change."""
    HOST = "host"
    """Weights in (pinned) host memory, KV cache freed: sleep level 1."""
    DISK = "disk"
    """Weights freed too and read again on promotion: sleep level 2."""


class ModelConfig(Strict):
    """One model that slots can serve."""

    id: str = Field(min_length=1, description="Name that clients put into `model`.")
    source: str = Field(
        default="", description=f"Directory, Hugging Face id, or '{DEFAULT_MODEL}'; empty: the same as `id`."
    )
    engine: Literal["vllm", "simulated"] = Field(default="vllm", description="Which engine runs it.")
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="vLLM's own engine and server arguments, word for word (underscores)."
    )
    engine_of: str = Field(
        default="",
        description="Id of a model listed before, of the same architecture (a fine-tune and its base, say): in a slot "
        "both share one engine, which changes its weights in place.",
    )

    @property
    def engine_id(self) -> str:
        """Equal for models that share an engine in a slot."""
        return self.engine_of or self.id

    @property
    def resolved_source(self) -> str:
        return self.source or self.id

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may put into `model`: its id, and the LoRA adapters that vLLM's `lora_modules` adds to it."""
        adapters: object = self.engine_kwargs.get("lora_modules") or ()
        if not isinstance(adapters, list | tuple):
            raise ValueError(f"models.{self.id}.engine_kwargs.lora_modules: a list is wanted, found {adapters!r}")
        return (self.id, *(_adapter_name(adapter) for adapter in cast("list[object]", adapters)))

    @property
    def tensor_parallel(self) -> int:
        """GPUs that compute each layer together: ranks that follow one another; rank // this is the pipeline stage."""
        return self._parallel("tensor_parallel_size")

    @property
    def world_size(self) -> int:
        """GPUs that one engine spans: tensor parallel x pipeline parallel."""
        return self.tensor_parallel * self._parallel("pipeline_parallel_size")

    def _parallel(self, key: str) -> int:
        value = self.engine_kwargs.get(key)
        if value is None:
            return 1
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"models.{self.id}.engine_kwargs.{key}: a whole number from 1 on is wanted, found {value!r}"
            )
        return value


def _adapter_name(adapter: object) -> str:
    """As vLLM reads an entry of `lora_modules`: a mapping with `name`, or `name=path`."""
    if isinstance(adapter, dict):
        return str(cast("dict[str, object]", adapter).get("name"))
    return str(adapter).partition("=")[0]


class MergeEvents(Strict):
    """Several tokens to one event of a stream while many streams run; what it saves: docs/data_path.md."""

    from_streams: int = Field(
        default=16, ge=2, description="So many requests in the engine make a new one's events one token longer."
    )
    tokens: int = Field(
        default=8, ge=1, le=64, description="To an event at most; the first and the last go at once. 1: never merge."
    )


class NcclConfig(Strict):
    """How the ranks of one slot talk to each other; what a node's environment already sets stays (`gpu/nccl.py`)."""

    interface: str | None = Field(
        default=None,
        pattern=r"^\^?=?[^\s,=^]+(,[^\s,=^]+)*$",
        description="NCCL_SOCKET_IFNAME: `eth` is a prefix, `=eth0` exact, `^docker` excludes, commas make a list; "
        "null: the interface that carries Ray's node address.",
    )
    gpu_direct_level: Literal["LOC", "PIX", "PXB", "PHB", "SYS"] | None = Field(
        default=None, description="NCCL_NET_GDR_LEVEL: how far GPU and network card may be apart; null: NCCL decides."
    )
    nvls: bool | None = Field(default=None, description="NCCL_NVLS_ENABLE: NVLink SHARP; null: NCCL decides.")
    topo_file: str | None = Field(
        default=None, min_length=1, description="NCCL_TOPO_FILE: an XML file that is there on every node of a slot."
    )
    timeout_s: int | None = Field(
        default=None,
        ge=1,
        description="A collective, or waiting for a rank, that takes longer has failed; null: PyTorch's own limits "
        "(600 for NCCL, 1800 for gloo). Ranks wait while one of them compiles.",
    )
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = Field(default=None, description="NCCL_DEBUG.")


class NodeCacheConfig(Strict):
    """One copy of a model's weights per node, in shared memory, for all engines of the node (docs/weights.md)."""

    enabled: bool = Field(default=False, description="Keep that copy; off: each engine reads the files for itself.")
    max_bytes: int | None = Field(
        default=None, ge=1, description="Bytes that it may hold on one node; null: half of what /dev/shm can hold."
    )
    keep_s: float = Field(
        default=120, ge=0, description="Seconds that the weights stay after the node's last engine has gone."
    )


class SlotConfig(Strict):
    """The shape of one slot: a Serve replica with its placement group."""

    gpus: float = Field(
        default=0,
        ge=0,
        description="GPUs of one slot, on all its nodes: a whole number, or a part of one; 0 runs on CPU.",
    )
    nodes: int = Field(default=1, ge=1, description="Nodes that one slot spans, with equally many GPUs on each.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray's labels that each node of a slot must have, as in {ray.io/market-type: on-demand}.",
    )
    asleep_gpu_gb: float = Field(
        default=6, gt=0, description="Most that a sleeping engine may hold of each GPU, in 10^9 bytes; else it failed."
    )
    cpus: float = Field(default=0.5, gt=0, description="CPUs that Ray reserves for one slot.")
    host_ram_gb: float | None = Field(
        default=None, gt=0, description="Host memory that Ray reserves for one slot, in 10^9 bytes."
    )
    max_ongoing_requests: int = Field(
        default=10,
        ge=1,
        description="Hard capacity of one slot: beyond it requests are held. On GPUs max_num_seqs and a tenth more.",
    )
    start_deadline_s: float = Field(
        default=900,
        gt=0,
        description="A cold start that takes longer has failed. For each model that slots can serve: with two models a "
        "slot has twice as long.",
    )
    shutdown_grace_s: float = Field(default=600, gt=0, description="How long a removed slot may finish its streams.")
    health_check_period_s: float = Field(default=2, gt=0, description="How often Serve asks a slot for its health.")
    forkserver: bool = Field(default=True, description="Fork engine processes from one that has imported vLLM.")
    merge_events: MergeEvents = MergeEvents()
    spare_worker: bool = Field(
        default=True, description="Keep one process with vLLM imported on each node, for the next slot (0.6 GB)."
    )
    flex_requests: int = Field(
        default=0,
        ge=0,
        description="Requests of `service_tier: flex` that a standby of tier `ready` serves at once, after all others "
        "(docs/capacity.md); 0: they are requests like others.",
    )
    nccl: NcclConfig = NcclConfig()
    node_cache: NodeCacheConfig = NodeCacheConfig()

    @field_validator("gpus")
    @classmethod
    def _whole_or_part(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("a whole number, or a part of one GPU below 1, is wanted")
        return value

    @model_validator(mode="after")
    def _gpus_spread_evenly(self) -> SlotConfig:
        whole = max(self.gpu_count, 1)
        if whole % self.nodes:
            allowed = [nodes for nodes in range(1, whole + 1) if whole % nodes == 0]
            raise ValueError(
                f"slot.nodes is {self.nodes}, but slot.gpus is {self.gpus:g}: every node holds equally many of them; "
                f"allowed: {_listed(allowed)}"
            )
        return self

    @property
    def gpu_count(self) -> int:
        """GPUs that one slot has, in whole or in part."""
        return math.ceil(self.gpus)

    @property
    def gpus_on_a_node(self) -> int:
        return self.gpu_count // self.nodes

    @property
    def executor_backends(self) -> tuple[str, ...]:
        """The values of vLLM's `distributed_executor_backend` that fit this shape, the one that we set first.

        Over several nodes only Ray's workers reach the other nodes; on one node a hop through Ray costs time for
        nothing, and the slot's actor holds its GPUs itself, so that Ray's workers would wait for them for ever.
        """
        if self.nodes > 1:
            return ("ray",)
        return ("mp",) if self.gpus > 1 else ("uni", "mp")


class AppConfig(Strict):
    """The static half: Serve's `args`."""

    model: str | None = Field(default=None, description="Shorthand for one model with this source.")
    models: tuple[ModelConfig, ...] = Field(default=(), description="The models that slots can serve.")
    slot: SlotConfig = SlotConfig()
    pool: bool = Field(default=True, description="off: a plain Serve application from the same image.")

    @model_validator(mode="after")
    def _one_way_to_name_models(self) -> AppConfig:
        if self.model is not None and self.models:
            raise ValueError("'model' and 'models' both set: 'model' is the shorthand for a single entry of 'models'")
        names = [name for model in self.models for name in model.names]
        if len(set(names)) != len(names):
            raise ValueError(f"models: ids and the names of lora_modules must differ, found {names}")
        return self

    @model_validator(mode="after")
    def _without_a_pool_one_model(self) -> AppConfig:
        if not self.pool and len(self.models) > 1:
            raise ValueError(
                f"pool is off, but models has {len(self.models)} entries: only a pool changes what a slot serves; use "
                "one application for each model"
            )
        return self

    @model_validator(mode="after")
    def _flex_leaves_room(self) -> AppConfig:
        flex = self.slot.flex_requests
        if flex and not self.pool:
            raise ValueError(f"slot.flex_requests is {flex}, but pool is off: only a pool has standbys to serve them")
        for model in self.served:
            most = model.engine_kwargs.get("max_num_seqs")
            if flex and isinstance(most, int) and flex >= most:
                raise ValueError(
                    f"slot.flex_requests is {flex}, but models.{model.id}.engine_kwargs.max_num_seqs is {most}: after "
                    "a promotion they would leave no place for others"
                )
        return self

    @model_validator(mode="after")
    def _variants_fit_their_engine(self) -> AppConfig:
        before: dict[str, ModelConfig] = {}
        for model in self.models:
            if model.engine_of:
                _check_variant(model, before)
            before[model.id] = model
        return self

    @model_validator(mode="after")
    def _models_fit_the_slot(self) -> AppConfig:
        for model in self.served:
            _check_parallel(self.slot, model)
            _check_backend(self.slot, model)
        return self

    @model_validator(mode="after")
    def _one_way_to_set_the_timeout(self) -> AppConfig:
        for model in self.models:
            for key in ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"):
                if self.slot.nccl.timeout_s is not None and key in model.engine_kwargs:
                    raise ValueError(
                        f"slot.nccl.timeout_s and models.{model.id}.engine_kwargs.{key} both set: use one of them"
                    )
        return self

    @property
    def served(self) -> tuple[ModelConfig, ...]:
        """The models that slots can serve: `models`, or one by the shorthand, or the default on CPU.

        The first is the one for requests that name none.
        """
        if self.models:
            return self.models
        source = self.model or DEFAULT_MODEL
        name = source.rstrip("/").rsplit("/", 1)[-1]
        return (ModelConfig(id=name, source=source, engine_kwargs=dict(CPU_ENGINE)),)

    @property
    def model_names(self) -> dict[str, tuple[str, ...]]:
        """Model id -> what clients may call it."""
        return {model.id: model.names for model in self.served}


# Arguments of vLLM's server, which each model has for itself also where several share one engine.
SERVER_KEYS = frozenset(
    (
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "lora_modules",
        "response_role",
        "tool_call_parser",
        "tool_parser_plugin",
    )
)


def _check_variant(model: ModelConfig, before: Mapping[str, ModelConfig]) -> None:
    """What the settings alone tell of a model that is to share another one's engine. Raises ValueError."""
    where, first = f"models.{model.id}", before.get(model.engine_of)
    if first is None or first.engine_of:
        owners = [other.id for other in before.values() if not other.engine_of]
        raise ValueError(
            f"{where}.engine_of is {model.engine_of!r}, which is no model listed before it that has an engine of its "
            f"own; allowed: {_listed(owners) or 'none'}"
        )
    if model.engine != first.engine:
        raise ValueError(
            f"{where}.engine is {model.engine!r}, but models.{first.id}, whose engine it shares, has {first.engine!r}"
        )
    keys = (set(model.engine_kwargs) | set(first.engine_kwargs)) - SERVER_KEYS
    unlike = sorted(key for key in keys if model.engine_kwargs.get(key) != first.engine_kwargs.get(key))
    if unlike:
        raise ValueError(
            f"{where}.engine_kwargs: {_listed(unlike)} must be as in models.{first.id}, whose engine it shares; its "
            f"own may be: {_listed(sorted(SERVER_KEYS))}"
        )


def _check_parallel(slot: SlotConfig, model: ModelConfig) -> None:
    """A slot's GPUs are exactly its ranks', and a tensor parallel group shares a node. Raises ValueError."""
    kwargs = f"models.{model.id}.engine_kwargs"
    world, group, on_a_node = model.world_size, model.tensor_parallel, slot.gpus_on_a_node
    if world != max(slot.gpu_count, 1):
        idle = ": the other GPUs would be reserved and idle" if world < slot.gpus else ""
        raise ValueError(
            f"slot.gpus is {slot.gpus:g}, but {kwargs} asks for "
            f"tensor_parallel_size x pipeline_parallel_size = {world}{idle}; allowed: {world}"
        )
    if on_a_node % group:
        allowed = [size for size in range(1, on_a_node + 1) if on_a_node % size == 0]
        raise ValueError(
            f"{kwargs}.tensor_parallel_size is {group}, but a node has slot.gpus / slot.nodes = {on_a_node} GPUs of "
            f"the slot: a tensor parallel group must fit inside one node; allowed: {_listed(allowed)}"
        )


def _check_backend(slot: SlotConfig, model: ModelConfig) -> None:
    """`distributed_executor_backend` follows from the slot's shape. Raises ValueError."""
    given, allowed = model.engine_kwargs.get("distributed_executor_backend"), slot.executor_backends
    if given is not None and given not in allowed:
        raise ValueError(
            f"models.{model.id}.engine_kwargs.distributed_executor_backend is {given!r}, but slot.gpus is "
            f"{slot.gpus:g} and slot.nodes is {slot.nodes}; allowed: {_listed(allowed)}"
        )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


# Small enough for two CPU cores; measured in shared notes: 27 tokens/s alone, 180 at eight at a time.
CPU_ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}


def parse_app(args: dict[str, Any]) -> AppConfig:
    """Read Serve's `args`. Raises ConfigError naming each wrong key."""
    return parse_strict(AppConfig, args, "args")
