"""A model's safetensors files: which ones there are, what is in them, and whether they fit together.

Only headers are read here; a file begins with the header's length in 8 bytes, then the header as JSON, then the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.errors import BadCheckpoint

# Bytes of one element, by the names that safetensors gives to types.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
# Mistral's own format first, as vLLM does: such a directory often holds the weights a second time, as `model*`.
_KINDS = (
    ("consolidated.safetensors.index.json", "consolidated*.safetensors"),
    ("model.safetensors.index.json", "*.safetensors"),
)
_LARGEST_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in its file.

    Attributes:
        dtype: as safetensors names it. begin, end: bytes from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        identity: changes whenever the file is written or replaced, though its size and time of change may stay.
        tensors: by name, in the order of their data.
    """

    path: Path
    size: int
    identity: tuple[int, ...]
    tensors: Mapping[str, Tensor]

    def tensors_between(self, begin: int, end: int) -> list[str]:
        """Names of the tensors with bytes in this part of the file."""
        return [name for name, tensor in self.tensors.items() if tensor.begin < end and tensor.end > begin]

    def check_unchanged(self) -> None:
        """Raises BadCheckpoint if the file is another one than when its header was read."""
        try:
            now = _identity(self.path.stat())
        except OSError as error:
            raise unreadable(self.path, error) from error
        if now != self.identity:
            raise BadCheckpoint(str(self.path), "it was changed while it was read: start again once it is complete")


@dataclass(frozen=True)
class Checkpoint:
    """The files of one model, which are loaded together."""

    shards: tuple[Shard, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(shard.size for shard in self.shards)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each file begins in one image of them all: at pages, so that tensors are aligned as in their file."""
        offsets, at = [], 0
        for shard in self.shards:
            offsets.append(at)
            at += -(-shard.size // mmap.PAGESIZE) * mmap.PAGESIZE
        return tuple(offsets)

    @property
    def image_size(self) -> int:
        """Bytes of that image."""
        return self.offsets[-1] + self.shards[-1].size

    def key(self, manifest: str) -> str:
        """Equal only for the same files with the same content; `manifest` says what that is to be (empty: unknown)."""
        parts = [(shard.path.name, shard.size, shard.identity) for shard in self.shards]
        return hashlib.sha256(repr((parts, manifest)).encode()).hexdigest()[:32]


def find(directory: Path) -> list[Path]:
    """The safetensors files that vLLM reads of a model: some hold their weights twice. Empty if there are none.

    Raises:
        BadCheckpoint: the index cannot be read.
    """
    for index_name, pattern in _KINDS:
        found = sorted(directory.glob(pattern))
        if not found:
            continue
        index = _weight_map(directory / index_name)
        return [directory / name for name in sorted(set(index.values()))] if index else found
    return []


def load(files: Iterable[Path]) -> Checkpoint:
    """Read and check the headers of these files, and the index beside them.

    Raises:
        BadCheckpoint: a file is missing, truncated or contradicts itself, or the index names what is not there.
    """
    paths = sorted(files)
    if not paths:
        raise BadCheckpoint("*.safetensors", "there is none")
    indexes = list(_indexes_of(paths))
    for index, weight_map in indexes:
        _check_files(index, weight_map, paths)
    checkpoint = Checkpoint(tuple(map(read_header, paths)))
    for index, weight_map in indexes:
        _check_tensors(index, weight_map, checkpoint)
    return checkpoint


def read_header(path: Path) -> Shard:
    """Raises BadCheckpoint unless the header describes exactly the bytes that the file has."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if found.st_size < 8 or length > min(found.st_size - 8, _LARGEST_HEADER):
                raise BadCheckpoint(
                    str(path), f"it has {found.st_size} bytes, too few for its header of {length}: truncated, or no "
                    "safetensors file"
                )  # fmt: skip
            header = json.loads(file.read(length))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise BadCheckpoint(str(path), f"its header is no JSON: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor(path, name, entry, 8 + length)
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_extent(path, ordered, 8 + length, found.st_size)
    return Shard(path, found.st_size, _identity(found), ordered)


def unreadable(path: Path, error: OSError) -> BadCheckpoint:
    """What the operating system says about a file, as an error of ours."""
    return BadCheckpoint(str(path), f"it cannot be read: {error.strerror or error}")


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _tensor(path: Path, name: str, entry: Any, data: int) -> Tensor:
    try:
        dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(str(path), f"its entry in the header is damaged: {entry!r:.200}", name) from error
    if dtype not in ITEM_BYTES:
        raise BadCheckpoint(str(path), f"its type {dtype!r} is unknown; known: {', '.join(ITEM_BYTES)}", name)
    wanted = math.prod(shape) * ITEM_BYTES[dtype]
    if min(shape, default=0) < 0 or begin < 0 or end - begin != wanted:
        raise BadCheckpoint(
            str(path), f"{dtype} of shape {list(shape)} takes {wanted} bytes, but it has {end - begin}", name
        )
    return Tensor(dtype, shape, data + begin, data + end)


def _check_extent(path: Path, tensors: Mapping[str, Tensor], data: int, size: int) -> None:
    """The data follow each other without gaps, and the file ends with them."""
    at = data
    for name, tensor in tensors.items():
        if tensor.begin != at:
            raise BadCheckpoint(str(path), f"its data begin at byte {tensor.begin}, where {at} is free", name)
        at = tensor.end
        if at > size:
            raise BadCheckpoint(str(path), f"truncated: it ends at byte {size}, the tensor's data at {at}", name)
    if at != size:
        raise BadCheckpoint(str(path), f"{size - at} bytes after its last tensor belong to none")


def _weight_map(index: Path) -> dict[str, str]:
    """File by tensor; empty where there is no index."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(str(index), f"it is no index of safetensors files: {error!r}") from error


def _indexes_of(paths: Sequence[Path]) -> Iterator[tuple[Path, dict[str, str]]]:
    """The indexes beside these files that name any of them."""
    for folder in {path.parent for path in paths}:
        for name, _ in _KINDS:
            weight_map = _weight_map(folder / name)
            if {folder / file for file in weight_map.values()} & set(paths):
                yield folder / name, weight_map


def _check_files(index: Path, weight_map: Mapping[str, str], paths: Sequence[Path]) -> None:
    for name, file in weight_map.items():
        if index.parent / file not in paths or not (index.parent / file).exists():
            raise BadCheckpoint(str(index.parent / file), f"missing, though {index.name} names it", name)


def _check_tensors(index: Path, weight_map: Mapping[str, str], checkpoint: Checkpoint) -> None:
    shards = {shard.path: shard for shard in checkpoint.shards}
    for name, file in weight_map.items():
        if name not in shards[index.parent / file].tensors:
            raise BadCheckpoint(str(index.parent / file), f"not in this file, though {index.name} says so", name)
