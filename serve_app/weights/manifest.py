"""What a model's weight files are to be: made once by `serve-app prepare`, compared with what is read from then on.

The manifest lies beside the files and is copied with them. It has every tensor's type and shape, and checksums of every
16 MiB. They find what disks, networks and copying break; they do not protect against an attacker, who could write a
manifest too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.errors import BadCheckpoint, ChecksumMismatch
from serve_app.weights import checkpoint
from serve_app.weights.checkpoint import Checkpoint, Shard
from serve_app.weights.reading import ALGORITHM, PIECE_BYTES, Piece, for_each_piece, read_piece

NAME = "serve_app.weights.json"
_AGAIN = "if the file was changed on purpose, run `serve-app prepare` for the directory again"
_VERSION = {"version": 1, "checksum": ALGORITHM, "piece_bytes": PIECE_BYTES}


@dataclass(frozen=True)
class Manifest:
    """Of one directory; `digest` is its own checksum.

    Attributes:
        files: by name: `size`, `mtime_ns`, `tensors` (type and shape by name) and `pieces` (checksums).
    """

    path: Path
    digest: str
    files: Mapping[str, Any]

    def check_headers(self, shards: Sequence[Shard]) -> None:
        """Raises BadCheckpoint, naming the tensor if it is one, where a file has another size, type or shape."""
        for shard in shards:
            entry = self._entry(shard)
            found, wanted = _described(shard), entry["tensors"]
            for name in [*found, *wanted]:
                if found.get(name) != wanted.get(name):
                    said, is_now = _words(wanted.get(name)), _words(found.get(name))
                    raise BadCheckpoint(str(shard.path), f"{is_now}, but {NAME} says {said}; {_AGAIN}", name)
            if shard.size != entry["size"]:
                problem = f"it has {shard.size} bytes, but {NAME} says {entry['size']}; {_AGAIN}"
                raise BadCheckpoint(str(shard.path), problem)

    def check_piece(self, piece: Piece, checksum: str) -> None:
        """Raises ChecksumMismatch, which names the tensors in the piece."""
        shard = piece.shard
        if checksum == self._entry(shard)["pieces"][piece.index]:
            return
        names = shard.tensors_between(piece.begin, piece.end)
        more = f" or {len(names) - 3} more" if len(names) > 3 else ""
        raise ChecksumMismatch(
            str(shard.path),
            f"bytes {piece.begin} to {piece.end} are not those that {NAME} has the checksum of: get the file again; "
            f"{_AGAIN}",
            " or ".join(names[:3]) + more,
        )

    def _entry(self, shard: Shard) -> Any:
        entry = self.files.get(shard.path.name)
        if entry is None:
            raise BadCheckpoint(str(shard.path), f"{NAME} does not know it; {_AGAIN}")
        return entry


def read(directory: Path) -> Manifest | None:
    """The manifest of a model's directory; None where there is none. Raises BadCheckpoint if it is damaged."""
    path = directory / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise checkpoint.unreadable(path, error) from error
    try:
        values = json.loads(content)
        if {key: values[key] for key in _VERSION} != _VERSION:
            raise ValueError(f"written for { ({key: values[key] for key in _VERSION}) }, this version wants {_VERSION}")
        return Manifest(path, hashlib.sha256(content).hexdigest(), values["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(
            str(path), f"no usable manifest ({error!r}): delete it, or run `serve-app prepare`"
        ) from error


def write(directory: Path) -> Path | None:
    """Make the manifest of a model's directory, which reads all of its weights; None where there are no safetensors.

    What it knows already is kept where size and time of change are the same: a byte that was flipped meanwhile will be
    found, not accepted.

    Raises:
        BadCheckpoint: the files are incomplete, or contradict themselves.
        OSError: the directory cannot be written to.
    """
    files = checkpoint.find(directory)
    if not files:
        return None
    found = checkpoint.load(files)
    old = _known(directory)
    new = [shard for shard in found.shards if not _is_same(shard, old.get(shard.path.name))]
    if not new and set(old) == {shard.path.name for shard in found.shards}:
        return directory / NAME
    checksums = _checksums(new)
    entries = {
        shard.path.name: _entry(shard, checksums[shard.path]) if shard.path in checksums else old[shard.path.name]
        for shard in found.shards
    }
    unfinished = directory / f".{NAME}.{os.getpid()}"
    try:
        unfinished.write_text(json.dumps(_VERSION | {"files": entries}))
        return unfinished.replace(directory / NAME)
    finally:
        unfinished.unlink(missing_ok=True)


def _known(directory: Path) -> Mapping[str, Any]:
    try:
        found = read(directory)
    except BadCheckpoint:  # it is about to be replaced
        return {}
    return found.files if found else {}


def _is_same(shard: Shard, entry: Any) -> bool:
    return entry is not None and (entry["size"], entry["mtime_ns"]) == (shard.size, shard.path.stat().st_mtime_ns)


def _entry(shard: Shard, pieces: list[str]) -> dict[str, Any]:
    mtime_ns = shard.path.stat().st_mtime_ns
    return {"size": shard.size, "mtime_ns": mtime_ns, "tensors": _described(shard), "pieces": pieces}


def _checksums(shards: Sequence[Shard]) -> dict[Path, list[str]]:
    """By file, in the order of its pieces."""
    found: dict[tuple[Path, int], str] = {}

    def work(file: int, piece: Piece) -> None:
        with memoryview(bytearray(piece.end - piece.begin)) as buffer:
            found[piece.shard.path, piece.index] = read_piece(file, piece, buffer)

    for_each_piece(shards, work, "checksums of the weights")
    for shard in shards:
        shard.check_unchanged()
    return {shard.path: [found[key] for key in sorted(found) if key[0] == shard.path] for shard in shards}


def _described(shard: Shard) -> dict[str, list[Any]]:
    return {name: [tensor.dtype, list(tensor.shape)] for name, tensor in shard.tensors.items()}


def _words(described: Any) -> str:
    return f"{described[0]} of shape {described[1]}" if described else "not there"


def check(found: Checkpoint) -> Manifest | None:
    """The manifest beside these files, after comparing their headers with it."""
    manifest = read(found.shards[0].path.parent)
    if manifest is not None:
        manifest.check_headers(found.shards)
    return manifest
