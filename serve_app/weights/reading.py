"""Reading weight files: in pieces, several at a time, each byte once, with checksums made while the bytes are in cache.

The kernel copies from the page cache or the disk straight into the target, without the interpreter's lock; so do the
checksums. How many readers a disk needs is found by experience, not by the processor: waiting costs nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
from tqdm import tqdm

from serve_app.errors import BadCheckpoint
from serve_app.weights.checkpoint import Shard, unreadable

PIECE_BYTES = 16 << 20
"""What one reader takes at a time, and what one checksum of a manifest covers."""
ALGORITHM = "xxh3_128"
_STEP_BYTES = 1 << 20  # read and hashed before the next: fits a processor's own cache
_READERS = 16
# A load that is over sooner needs no bar.
_QUIET_S = 2.0


@dataclass(frozen=True)
class Piece:
    """A part of a file: bytes `begin` to `end`."""

    shard: Shard
    index: int
    begin: int
    end: int


def for_each_piece(shards: Sequence[Shard], work: Callable[[int, Piece], None], title: str) -> None:
    """Call `work` with an open file and a piece of it, for all pieces of all files, on several threads.

    A bar on standard error shows how far it is, after two seconds. The first error ends it.

    Raises:
        BadCheckpoint: a file cannot be read, or what `work` raises.
    """
    pieces = [piece for shard in shards for piece in _pieces(shard)]
    readers = min(_READERS, 2 * len(os.sched_getaffinity(0)), max(1, len(pieces)))
    total = sum(shard.size for shard in shards)
    with _opened(shards) as files, ThreadPoolExecutor(readers, "weights") as pool:
        futures = {pool.submit(work, files[piece.shard.path], piece): piece for piece in pieces}
        try:
            with tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=_QUIET_S, mininterval=1) as bar:
                for future in as_completed(futures):
                    future.result()
                    bar.update(futures[future].end - futures[future].begin)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def gb_per_s(size: int, seconds: float) -> float:
    """The rate as stages say it: 10^9 bytes a second, three digits."""
    return float(f"{size / 1e9 / seconds:.3g}")


def read_piece(file: int, piece: Piece, into: memoryview, hashed: bool = True) -> str:
    """Read a piece into memory of its size; return its checksum (empty unless `hashed`).

    Raises:
        BadCheckpoint: the file cannot be read, or ends too early.
        OSError: ENOSPC, if there is no memory for it: `into` may be part of a file in shared memory.
    """
    checksum = xxhash.xxh3_128()
    at, size = 0, piece.end - piece.begin
    while at < size:
        with into[at : at + _STEP_BYTES] as step:  # closed at once: an error must not keep the memory from going
            count = _read_some(file, step, piece.begin + at, piece.shard.path)
            if hashed:
                with step[:count] as done:
                    checksum.update(done)
        at += count
    return checksum.hexdigest() if hashed else ""


def _read_some(file: int, into: memoryview, begin: int, path: Path) -> int:
    try:
        count = os.preadv(file, [into], begin)
    except OSError as error:
        if error.errno == errno.EFAULT:  # no page could be had for what was read
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise unreadable(path, error) from error
    if count == 0:
        raise BadCheckpoint(str(path), f"truncated while it was read, at byte {begin}")
    return count


def _pieces(shard: Shard) -> Iterator[Piece]:
    for index, begin in enumerate(range(0, shard.size, PIECE_BYTES)):
        yield Piece(shard, index, begin, min(begin + PIECE_BYTES, shard.size))


@contextmanager
def _opened(shards: Sequence[Shard]) -> Iterator[dict[Path, int]]:
    files: dict[Path, int] = {}
    try:
        for shard in shards:
            try:
                files[shard.path] = os.open(shard.path, os.O_RDONLY)
            except OSError as error:
                raise unreadable(shard.path, error) from error
        yield files
    finally:
        for file in files.values():
            os.close(file)
