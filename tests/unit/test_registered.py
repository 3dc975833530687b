"""Which copies from registered memory are rows of bytes; that they arrive needs a GPU (tests/gpu/test_weights.py)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve_app import cuda
from serve_app.weights import checkpoint, registered, views
from serve_app.weights.cache import NodeCache, Weights
from serve_app.weights.registered import DirectCopies, Rows, as_rows


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


class Event:
    """As torch's, of a GPU that is done with everything at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        pass


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device on which the copy engine is memmove."""
    monkeypatch.setattr(
        cuda, "driver", lambda: SimpleNamespace(cuMemHostRegister_v2=lambda *_: 0, cuMemHostUnregister=lambda *_: 0)
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))

    def copy(target: int, source: int, rows: Rows, _: int) -> None:
        for row in range(rows.height):
            ctypes.memmove(target + row * rows.target_pitch, source + row * rows.source_pitch, rows.width)

    monkeypatch.setattr(registered, "_copy", copy)
    return torch.device("cpu")


def _cached(cache: NodeCache, folder: Path, value: float, size: int) -> Weights:
    """Weights of a model whose only tensor has this value everywhere."""
    folder.mkdir()
    save_file({"w": torch.full((size,), value)}, folder / "model.safetensors")
    return cache.acquire(checkpoint.load(checkpoint.find(folder)))


@pytest.mark.parametrize("size_of_second", [1 << 22, 1 << 21])
def test_models_whose_views_lie_at_the_same_address_in_turn_are_told_apart(
    processor: torch.device, tmp_path: Path, size_of_second: int
) -> None:
    """The kernel gives a mapping the address of the one before: a fine-tune's weights must not be those of its base."""
    for folder in ("memory", "locks"):
        (tmp_path / folder).mkdir()
    cache = NodeCache(None, 0, tmp_path / "memory", tmp_path / "locks")
    copies = DirectCopies(processor)
    both = [_cached(cache, tmp_path / "a", 1.0, 1 << 22), _cached(cache, tmp_path / "b", 2.0, size_of_second)]
    sources = [copies.add(weights) for weights in both]
    for turn in (0, 1, 0, 1, 1, 0):
        weights, image = both[turn], both[turn].mapped()
        sources[turn].hand_out(image)
        with copies:
            for _, _, tensor in views.tensors(weights, image):
                assert sources[turn].find(tensor) and not sources[1 - turn].find(tensor)
                loaded = torch.zeros(tensor.shape).copy_(tensor)
        assert loaded.unique().tolist() == [turn + 1.0]
        del image, tensor
    for weights in both:
        weights.close()
