"""Engines: what a slot owns. `create` is the only way to make one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve_app.engine.base import ALONE, Siblings
from serve_app.errors import ConfigError

if TYPE_CHECKING:
    from serve_app.config import ModelConfig, SlotConfig
    from serve_app.engine.base import Engine


def create(model: ModelConfig, slot: SlotConfig, siblings: Siblings = ALONE) -> Engine:
    """Make the engine that `model.engine` names; it is not started yet. Heavy imports happen only for the one asked.

    Raises:
        ConfigError: no such engine.
    """
    if model.engine == "vllm":
        from serve_app.engine.vllm import VllmEngine

        return VllmEngine(model, slot, siblings)
    if model.engine == "simulated":
        from serve_app.engine.simulated import SimulatedEngine

        return SimulatedEngine(model, slot)
    raise ConfigError(f"models.{model.id}.engine: '{model.engine}' is unknown; allowed: vllm, simulated")


def weights_bytes(model: ModelConfig) -> int | None:
    """What the weights of all ranks take, in bytes; None while that is not known on this node."""
    if model.engine == "simulated":
        from serve_app.engine.simulated import simulated_times

        return simulated_times(model).weights_bytes
    from serve_app import models

    return models.weights_bytes(model)
