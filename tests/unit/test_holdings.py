"""Which models a slot holds, and what standbys cost by model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import Tier
from serve_app.pool.holdings import Budget, ModelCost, NothingFits, choose
from serve_app.pool.lifecycle import State
from serve_app.pool.meter import StandbyMeter
from serve_app.pool.view import SlotView

GB = 1e9
A, B, C = (ModelCost(name, 16 * GB, 2.5 * GB, 30 * GB) for name in "abc")


def test_without_a_limit_a_slot_holds_every_model() -> None:
    """In the order of the configuration."""
    assert choose([A, B, C], Budget(), {"a": 9}).models == ("a", "b", "c")


@pytest.mark.parametrize(
    ("budget", "held", "models"),
    [
        (Budget(host_bytes=40 * GB), {}, ("a", "b")),
        (Budget(host_bytes=40 * GB), {"a": 1, "b": 1}, ("a", "c")),
        (Budget(host_bytes=40 * GB), {"a": 2, "b": 1}, ("b", "c")),
        (Budget(gpu_bytes=33 * GB), {}, ("a", "b")),
        (Budget(gpu_bytes=35 * GB), {}, ("a", "b", "c")),
        (Budget(host_bytes=16 * GB), {"a": 1}, ("b",)),
    ],
)
def test_a_slot_holds_what_fits_and_what_the_fewest_others_hold(
    budget: Budget, held: dict[str, int], models: tuple[str, ...]
) -> None:
    """Any of its engines may be awake while the others sleep."""
    assert choose([A, B, C], budget, held).models == models


def test_what_is_left_out_is_said_with_the_figures() -> None:
    """For the log; and where nothing fits, as the error."""
    left = choose([A, B, C], Budget(host_bytes=40 * GB), {}).left_out
    assert left == {"c": "48.0 GB of host memory for 3 engines, a slot has 40.0 GB"}
    with pytest.raises(NothingFits, match=r"models\.a: 30\.0 GB of each GPU for 1 engines, it has 24\.0 GB; models\.b"):
        choose([A, B], Budget(gpu_bytes=24 * GB), {})


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 12))
def test_every_model_is_held_somewhere_before_any_is_held_twice(models: int, fit: int, slots: int) -> None:
    """Slots that start one after the other, each with room for `fit` engines."""
    costs = [ModelCost(str(n), host_bytes=GB) for n in range(models)]
    held: Counter[str] = Counter()
    for _ in range(slots):
        held.update(choose(costs, Budget(host_bytes=fit * GB), held).models)
    counts = [held[cost.model] for cost in costs]
    assert max(counts) - min(counts) <= 1


def test_the_time_of_a_standby_is_shared_out_among_the_models_that_it_holds() -> None:
    """Active slots cost nothing here: they serve."""
    meter = StandbyMeter()
    slots = [
        SlotView("a", State.STANDBY, holds={"x": Tier.HOST, "y": Tier.HOST}),
        SlotView("b", State.STANDBY, holds={"y": Tier.DISK}),
        SlotView("c", State.ACTIVE, holds={"x": Tier.READY}),
        SlotView("d", State.STANDBY, holds={"x": Tier.HOST}, leaving=True),
    ]
    for now in (100.0, 104.0):
        meter.update(slots, now)
    assert meter.slot_s == {"x": 2.0, "y": 6.0}
