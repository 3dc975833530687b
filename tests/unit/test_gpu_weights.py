"""What `benchmarks.gpu.weights` makes of an engine's stages."""

from __future__ import annotations

import pytest

from benchmarks.gpu.weights import loaded
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
