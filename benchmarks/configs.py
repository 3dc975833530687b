"""The Serve config files that benchmarks start: one model, one shape of slot, with and without the pool."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import serve_app
from serve_app.config import CPU_ENGINE, DEFAULT_MODEL

Config = dict[str, Any]

# Serve's autoscaler, as it is where only the bounds are set (Ray 2.60's own defaults).
DEFAULT_AUTOSCALING: Config = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
# Serve's autoscaler, as fast as its settings allow (measured: 0.13 s from burst to a raised target; 40 s by default).
FASTEST_AUTOSCALING: Config = {
    "min_replicas": 1,
    "max_replicas": 2,
    "upscale_delay_s": 0,
    "downscale_delay_s": 2,
    "metrics_interval_s": 0.1,
    "look_back_period_s": 0.5,
    "aggregation_function": "max",
}


@dataclass(frozen=True)
class Shape:
    """What a slot is, the same for everything that is compared.

    Attributes:
        hard: requests that a slot is given at once, and that its engine runs at once.
        cpus: what Ray reserves; slots share the machine's cores.
        source: directory of the model's files; empty: as `model` says.
        gpus: of one slot; 0 runs on CPU.
        more: further settings of the slot, word for word.
    """

    model: str = DEFAULT_MODEL
    source: str = ""
    engine: str = "vllm"
    engine_kwargs: Config = field(default_factory=lambda: dict(CPU_ENGINE))
    hard: int = 8
    cpus: float = 0.5
    gpus: float = 0
    more: Config = field(default_factory=dict)


def vllm_shape(hard: int, max_model_len: int, streams: int = 1) -> Shape:
    """The package's own default for CPUs, with `hard` requests at once, and KV cache for `streams` of full length."""
    # In float32: 46 KB a token.
    memory = {"kv_cache_memory_bytes": max(256 << 20, streams * max_model_len * (46 << 10) * 5 // 4)}
    return Shape(engine_kwargs=CPU_ENGINE | {"max_num_seqs": hard, "max_model_len": max_model_len} | memory, hard=hard)


def simulated_shape(hard: int, start_s: float) -> Shape:
    """Costs no CPU time; `start_s` is how long a cold start lasts."""
    times = {"start_s": start_s, "max_num_seqs": hard}
    return Shape(model="simulated", engine="simulated", engine_kwargs=times, hard=hard, cpus=0.1)


def pool(shape: Shape, active: int, standby: int, tier: str = "host") -> Config:
    """A pool of a constant number of slots, in which nothing but a held request asks for a promotion."""
    total = active + standby
    live = {
        # No refill in the background: with it, the next repetition would begin while a slot is being started.
        "slots": {"min": total, "max": total, "standby": standby, "demote_after_s": 0.5},
        "models": {shape.model: {"min_active": active, "tier": tier}},
        # As late as can be: by default a slot that is 80 % full would have been joined before the burst.
        "promote_when": {"in_flight": shape.hard},
    }
    environment = {"runtime_env": {"env_vars": dict(serve_app.SERVE_ENVIRONMENT)}}
    return _file(_args(shape), [{"name": "Pool", "user_config": live}]) | {"controller_options": environment}


def shared(models: list[Config], shape: Shape, slots: int) -> Config:
    """A pool of a constant number of slots that several models share; none of them need be active.

    Args:
        models: entries of `args.models`. shape: of a slot; its own model is not used.
    """
    live = {"slots": {"min": slots, "max": slots, "standby": 1, "demote_after_s": 1, "keep_model_s": 1}}
    environment = {"runtime_env": {"env_vars": dict(serve_app.SERVE_ENVIRONMENT)}}
    args = _args(shape) | {"models": models}
    return _file(args, [{"name": "Pool", "user_config": live}]) | {"controller_options": environment}


def plain(shape: Shape, *, forkserver: bool, autoscaling: Config | None) -> Config:
    """`pool: off`: Serve alone, its own processes as they are without us.

    Args:
        forkserver: False: every engine process starts as vLLM starts it by itself.
        autoscaling: None: one replica. Without a `target_ongoing_requests` of its own, that of a full slot.
    """
    args = _args(shape) | {"pool": False}
    args["slot"] |= {"forkserver": forkserver, "spare_worker": False}
    slot: Config = {"name": "Slot"}
    if autoscaling is not None:
        # One replica is enough for a full slot; a single request more asks for the second one.
        slot["autoscaling_config"] = {"target_ongoing_requests": shape.hard} | autoscaling
    return _file(args, [slot])


def _args(shape: Shape) -> Config:
    model = {
        "id": shape.model,
        "source": shape.source,
        "engine": shape.engine,
        "engine_kwargs": shape.engine_kwargs,
    }
    # Streams of a benchmark are cut off by its client; nobody has to wait for them.
    slot = {"cpus": shape.cpus, "gpus": shape.gpus, "max_ongoing_requests": shape.hard, "shutdown_grace_s": 5}
    return {"models": [model], "slot": slot | shape.more}


def _file(args: Config, deployments: list[Config]) -> Config:
    application = {
        "name": "default",
        "route_prefix": "/",
        "import_path": "serve_app:app",
        "args": args,
        "deployments": deployments,
    }
    return deepcopy({"applications": [application]})
