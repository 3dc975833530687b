"""What `benchmarks.gpu.weights` makes of an engine's stages."""

from __future__ import annotations

import pytest

from benchmarks.gpu.weights import differences, loaded
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord


def test_the_slowest_rank_decides_and_reading_counts_apart() -> None:
    """The rate is of the whole model, though each rank takes a part of it."""
    records = [
        StageRecord(Stage.WEIGHTS_CACHE, 0.0, 4.0),
        StageRecord(Stage.WEIGHTS_LOAD, 5.0, 1.0, rank=0),
        StageRecord(Stage.WEIGHTS_LOAD, 5.0, 2.0, rank=1),
    ]
    found = loaded(records, size=16_000_000_000)
    assert found == pytest.approx({"bytes": 16e9, "load_s": 2.0, "gb_per_s": 8.0, "files_to_parameters_s": 6.0})


def test_the_rate_of_copies_is_the_slowest_gpus_own() -> None:
    """Whatever else the stage around them took."""
    copies = [
        StageRecord(Stage.WEIGHTS_COPY, 5.0, 0.5, {"gb_per_s": rate, "bytes": 8e9}, rank=rank)
        for rank, rate in enumerate((50.0, 44.0))
    ]
    found = loaded([StageRecord(Stage.WEIGHTS_LOAD, 5.0, 2.0), *copies], size=16_000_000_000)
    assert (found["copy_gb_per_s"], found["gb_per_s"]) == (44.0, 8.0)


def test_logprobs_are_compared_with_those_of_vllms_own_loader() -> None:
    """At every start and wake; a format that failed has none."""
    loads = [
        {"format": "node_cache", "valid": True, "logprobs": [[-1.0, -2.0], [-1.0, -2.5]]},
        {"format": "auto", "valid": True, "logprobs": [[-1.0, -2.0]]},
        {"format": "instanttensor", "valid": False},
    ]
    assert differences(loads) == {"node_cache": 0.5, "auto": 0.0}
    assert differences(loads[2:]) == {}
