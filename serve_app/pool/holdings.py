"""Which models a slot holds engines for: spread over the slots, within the memory of one. Pure.

A slot decides this once, when it starts. Models that the fewest other slots hold come first, so that each is held
somewhere before any is held twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.errors import ServeAppError


@dataclass(frozen=True)
class ModelCost:
    """What the engine of one model takes of a slot, in bytes.

    Attributes:
        host_bytes: of host memory while it sleeps. asleep_bytes, awake_bytes: of each GPU.
        engine: id of the engine; models that share one have the same, and cost what the largest of them costs.
    """

    model: str
    host_bytes: float = 0.0
    asleep_bytes: float = 0.0
    awake_bytes: float = 0.0
    engine: str = ""


@dataclass(frozen=True)
class Budget:
    """What one slot has for all its engines, in bytes; of each GPU."""

    host_bytes: float = math.inf
    gpu_bytes: float = math.inf


@dataclass(frozen=True)
class Holdings:
    """The outcome. `left_out`: why each of the other models is not held."""

    models: tuple[str, ...]
    left_out: Mapping[str, str]


class NothingFits(ServeAppError):
    """Not even one model fits into a slot's budget."""

    http_status = 503


def choose(costs: Sequence[ModelCost], budget: Budget, held: Mapping[str, int]) -> Holdings:
    """The models that a new slot holds.

    Args:
        costs: of all models, in the order of the configuration.
        held: by model, how many other slots hold it.

    Raises:
        NothingFits: with what each model would take.
    """
    chosen: list[ModelCost] = []
    left_out: dict[str, str] = {}
    for cost in sorted(costs, key=lambda cost: held.get(cost.model, 0)):  # stable: else in the order given
        why = _too_much([*chosen, cost], budget)
        if why:
            left_out[cost.model] = why
        else:
            chosen.append(cost)
    if not chosen:
        raise NothingFits("; ".join(f"models.{model}: {why}" for model, why in left_out.items()))
    names = {cost.model for cost in chosen}
    return Holdings(tuple(cost.model for cost in costs if cost.model in names), left_out)


def _too_much(models: Sequence[ModelCost], budget: Budget) -> str:
    """Why their engines do not fit together, empty if they do: any one of them may be awake, the others asleep."""
    engines = _engines(models)
    host = sum(cost.host_bytes for cost in engines)
    if host > budget.host_bytes:
        return (
            f"{host / 1e9:.1f} GB of host memory for {len(engines)} engines, a slot has {_gigabytes(budget.host_bytes)}"
        )
    asleep = sum(cost.asleep_bytes for cost in engines)
    gpu = max(asleep - cost.asleep_bytes + cost.awake_bytes for cost in engines)
    if gpu > budget.gpu_bytes:
        return f"{gpu / 1e9:.1f} GB of each GPU for {len(engines)} engines, it has {_gigabytes(budget.gpu_bytes)}"
    return ""


def _engines(models: Sequence[ModelCost]) -> list[ModelCost]:
    """What each engine takes, whichever of its models' weights it has."""
    sharing: dict[str, list[ModelCost]] = {}
    for cost in models:
        sharing.setdefault(cost.engine or cost.model, []).append(cost)
    return [
        ModelCost(
            name,
            max(cost.host_bytes for cost in costs),
            max(cost.asleep_bytes for cost in costs),
            max(cost.awake_bytes for cost in costs),
        )
        for name, costs in sharing.items()
    ]


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"
