"""What each model's engine takes of a slot, and what a slot has for all of them: for `pool/holdings.py`. Blocks."""

from __future__ import annotations

import math

import pynvml

from serve_app import engine as engines
from serve_app.config import AppConfig, ModelConfig, SlotConfig, Tier
from serve_app.gpu import nvml
from serve_app.live import LiveSettings
from serve_app.pool.holdings import Budget, ModelCost

# An awake engine without a set KV cache is given at least this share of a GPU for it, so that it can serve.
LEAST_KV_SHARE = 0.1


def costs(config: AppConfig, live: LiveSettings | None) -> list[ModelCost]:
    """In the order of the configuration; a model whose weights are not on this node yet counts as if it had none.

    Args:
        live: None where the settings are not known: then all standbys sleep at tier `host`.
    """
    total = _gpu_bytes(config.slot)
    return [
        _cost(model, config.slot, live.model(model.id).tier if live else Tier.HOST, total) for model in config.served
    ]


def of_slot(slot: SlotConfig) -> Budget:
    """The budget of one slot: `slot.host_ram_gb`, where it is set, and its GPUs."""
    return Budget(math.inf if slot.host_ram_gb is None else slot.host_ram_gb * 1e9, _gpu_bytes(slot))


def _cost(model: ModelConfig, slot: SlotConfig, tier: Tier, gpu_bytes: float) -> ModelCost:
    weights = engines.weights_bytes(model) or 0
    # On CPU an engine's weights are in host memory whether it is awake or not; from tier `disk` they are read again.
    host = 0 if tier is Tier.DISK else weights
    if math.isinf(gpu_bytes):
        return ModelCost(model.id, host, engine=model.engine_id)
    asleep = slot.asleep_gpu_gb * 1e9
    kv = model.engine_kwargs.get("kv_cache_memory_bytes") or gpu_bytes * LEAST_KV_SHARE
    return ModelCost(model.id, host, asleep, asleep + weights / model.world_size + kv, model.engine_id)


def _gpu_bytes(slot: SlotConfig) -> float:
    """Of each GPU of this slot what is its own; infinite on CPU, and where no driver tells (simulated engines)."""
    if not slot.gpus:
        return math.inf
    try:
        sizes = [gpu.total for gpu in nvml.read(nvml.visible())]
    except pynvml.NVMLError:
        return math.inf
    return min(sizes, default=math.inf) * min(1.0, slot.gpus)
