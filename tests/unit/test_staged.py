"""What a worker concludes from a reduction; that it runs for real is in tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from serve_app.engine.staged import StagedWorker
from serve_app.errors import EngineError


def test_wrong_sum_names_rank_group_and_both_numbers() -> None:
    """A group that lost a rank, or has one twice, must not serve."""
    worker = StagedWorker()
    worker.rank = 1
    group = SimpleNamespace(world_size=2, ranks=[0, 1])
    worker._check_sum("tensor", torch.tensor([2.0]), group)
    with pytest.raises(EngineError, match=r"rank 1 on .*: .* tensor parallel ranks \[0, 1\] gives 1 instead of 2"):
        worker._check_sum("tensor", torch.tensor([1.0]), group)
