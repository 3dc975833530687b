"""A checkpoint's tensors as views into the cache: nothing is copied until a model takes its part."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from serve_app.weights.cache import Weights
from serve_app.weights.checkpoint import ITEM_BYTES, Tensor

_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip


def tensors(weights: Weights, image: mmap.mmap) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """File, name and view of each tensor in `image` (`weights.mapped()`).

    A view keeps the mapping alive, and writing to it changes no file.
    """
    for shard, offset in zip(weights.checkpoint.shards, weights.checkpoint.offsets, strict=True):
        for name, tensor in shard.tensors.items():
            yield shard.path, name, _view(image, offset + tensor.begin, tensor)


def _view(image: object, begin: int, tensor: Tensor) -> torch.Tensor:
    dtype, size = _TYPES[tensor.dtype], tensor.end - tensor.begin
    if size == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    if begin % ITEM_BYTES[tensor.dtype]:  # safetensors allows it, processors do not
        flat = torch.frombuffer(image, dtype=torch.uint8, count=size, offset=begin).clone().view(dtype)
    else:
        flat = torch.frombuffer(image, dtype=dtype, count=size // dtype.itemsize, offset=begin)
    return flat.view(tensor.shape)
