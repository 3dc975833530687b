"""What vLLM's scheduler reports of itself: kept for `Engine.load`, and as metrics."""

from __future__ import annotations

import importlib
from typing import Any

import ray


class LastStats:
    """What the scheduler reported last."""

    waiting = 0
    kv_use = 0.0


def stat_logger(stats: LastStats) -> Any:
    """A vLLM stat logger that keeps the scheduler's last report in `stats`; vLLM adds its own loggers to it."""
    base: Any = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase

    class LastStatsLogger(base):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                stats.waiting = scheduler_stats.num_waiting_reqs
                stats.kv_use = scheduler_stats.kv_cache_usage

        def log_engine_initialized(self) -> None:
            pass

    return LastStatsLogger


def prometheus_loggers() -> list[Any]:
    """vLLM's own metrics through Ray, as `ray_vllm_*` with the slot as `ReplicaId` and the model as `model_name`.

    With it vLLM leaves out the one for `/metrics`, which a proxy would send to any one slot. None outside of an actor.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return []
    return [importlib.import_module("vllm.v1.metrics.ray_wrappers").RayPrometheusStatLogger]
