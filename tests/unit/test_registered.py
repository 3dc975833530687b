"""Which copies from registered memory are rows of bytes; that they arrive needs a GPU (tests/gpu/test_weights.py)."""

from __future__ import annotations

import ctypes

import pytest
import torch

from serve_app.weights.registered import Rows, as_rows


def _carry_out(rows: Rows, target: torch.Tensor, source: torch.Tensor) -> None:
    """What the copy engine does."""
    for row in range(rows.height):
        into, out_of = (tensor.data_ptr() + row * pitch for tensor, pitch in _pitches(rows, target, source))
        ctypes.memmove(into, out_of, rows.width)


def _pitches(rows: Rows, target: torch.Tensor, source: torch.Tensor) -> tuple[tuple[torch.Tensor, int], ...]:
    return (target, rows.target_pitch), (source, rows.source_pitch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize(
    ("target_part", "source_part"),
    [
        ((slice(None), slice(None)), (slice(None), slice(None))),
        ((slice(2, 4), slice(None)), (slice(4, 6), slice(None))),  # a rank's rows into a fused parameter
        ((slice(None), slice(0, 4)), (slice(None), slice(4, 8))),  # a rank's columns
    ],
)
def test_a_ranks_part_of_a_matrix_is_rows_of_bytes(
    dtype: torch.dtype, target_part: tuple[slice, slice], source_part: tuple[slice, slice]
) -> None:
    source = torch.randn(6, 8).to(dtype)[source_part]
    target = torch.zeros(6, 8).to(dtype)[target_part]
    rows = as_rows(target, source)
    assert rows is not None
    _carry_out(rows, target, source)
    assert target.float().equal(source.float())


def test_vectors_and_single_numbers_too() -> None:
    """Norms, and the scales of an fp8 model."""
    assert as_rows(torch.zeros(5), torch.ones(5)) == Rows(1, 20, 20, 20)
    assert as_rows(torch.zeros(()), torch.ones(())) == Rows(1, 4, 4, 4)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(4), torch.ones(4, dtype=torch.bfloat16)),  # a conversion
        (torch.zeros(4, 4), torch.ones(4)),  # spread over rows
        (torch.zeros(4, 4), torch.ones(4, 4).t()),  # transposed
        (torch.zeros(2, 4, 4), torch.ones(2, 4, 8).narrow(2, 0, 4)),  # a part of each expert
        (torch.zeros(0, 4), torch.ones(0, 4)),
    ],
)
def test_what_is_more_than_that_is_left_to_pytorch(target: torch.Tensor, source: torch.Tensor) -> None:
    assert as_rows(target, source) is None
