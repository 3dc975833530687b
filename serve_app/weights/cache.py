"""The node's weight cache: one file in shared memory for each model, which every engine of the node maps.

How it stays sound whoever dies when, in the order in which it matters:
- A file gets its name only once it is complete and verified (O_TMPFILE, then a link): what a killed process has read so
  far never had one, and the system frees it.
- Who uses a file shares its lock (`flock`), which the system releases however a process ends. Only a file that nobody
  has locked is ever removed.
- One process of the node fills at a time; the others wait for it, then find what it has made.
- A keeper removes everything once the last user has been gone for a while (see `keeper`).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from serve_app.errors import EngineError, NodeCacheFull
from serve_app.keeping import is_held
from serve_app.node_folder import node_folder
from serve_app.weights import keeper, manifest
from serve_app.weights.checkpoint import Checkpoint
from serve_app.weights.manifest import Manifest
from serve_app.weights.reading import Piece, for_each_piece, gb_per_s, read_piece

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Weights:
    """A model's weights in the cache; they stay there until `close`, or until this process ends.

    Attributes:
        key: equal for the same content of the same files.
        read_bytes: what this process has read of the files to fill the cache; 0 if it found them there.
        seconds: that reading them took, or waiting for another process that read them.
        verified: whether they were compared with a manifest.
    """

    checkpoint: Checkpoint
    key: str
    verified: bool
    read_bytes: int = 0
    seconds: float = 0.0
    _held: ExitStack = field(default_factory=ExitStack, repr=False)
    _file: IO[bytes] | None = field(default=None, repr=False)

    def mapped(self, access: int = mmap.ACCESS_COPY) -> mmap.mmap:
        """The image of all files (see `Checkpoint.offsets`). Pages are shared; a write makes a private copy of one."""
        assert self._file is not None, "closed"
        return mmap.mmap(self._file.fileno(), self.checkpoint.image_size, access=access)

    @property
    def attributes(self) -> dict[str, int | float | bool]:
        """What the stage says that filled the cache, or did not have to."""
        rate = {"gb_per_s": gb_per_s(self.read_bytes, self.seconds)} if self.read_bytes else {}
        return {"bytes": self.read_bytes, "cached": not self.read_bytes, "verified": self.verified} | rate

    def close(self) -> None:
        """From now on they may be removed, though what is mapped stays readable. Idempotent."""
        self._file = None
        self._held.close()


class NodeCache:
    """The cache of this user on this node; any number of processes use it at once.

    Args:
        max_bytes: the most that it may hold; None: half of what the shared memory can hold.
        keep_s: how long everything stays after the last user has gone, in seconds.
        memory: where the weights lie. locks: where the locks lie; None: this user's folder of the node.
    """

    def __init__(
        self, max_bytes: int | None, keep_s: float, memory: Path = SHARED_MEMORY, locks: Path | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._memory = memory
        self._locks = str((locks or node_folder()) / "weights")

    def acquire(self, checkpoint: Checkpoint) -> Weights:
        """Find these weights in the cache, or read them into it. Blocks, for minutes if a large model is read.

        Raises:
            BadCheckpoint: a file is not what it should be; nothing of it stays in memory.
            NodeCacheFull: they have no place.
            EngineError: the cache cannot be used on this machine.
        """
        expected = manifest.check(checkpoint)
        key = checkpoint.key(expected.digest if expected else "")
        with ExitStack() as held:
            held.enter_context(self._joined())
            folder, begin_s, read_bytes = node_folder(self._memory), time.monotonic(), 0
            file = _find(folder / key, checkpoint.image_size)
            if file is None:
                with self._filling():
                    file = _find(folder / key, checkpoint.image_size)  # read by the one that we waited for
                    if file is None:
                        file, read_bytes = self._fill(folder / key, checkpoint, expected), checkpoint.size
            held.enter_context(file)
            took_s = time.monotonic() - begin_s
            return Weights(checkpoint, key, expected is not None, read_bytes, took_s, held.pop_all(), file)

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Be one of the users, for whom the keeper keeps everything; start the keeper if there is none."""
        with Path(f"{self._locks}.users").open("a+") as users:
            fcntl.flock(users, fcntl.LOCK_SH)  # a keeper that is about to end is waited for here
            with Path(f"{self._locks}.start").open("w") as one_at_a_time:
                fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
                if not is_held(Path(f"{self._locks}.alive")):
                    self._start_keeper()
            yield

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """Be the only one who fills the cache of this node."""
        with Path(f"{self._locks}.fill").open("w") as one_at_a_time:
            try:
                fcntl.flock(one_at_a_time, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process of this node, which reads weights into the cache")
                fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            yield

    def _start_keeper(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        folder = str(node_folder(self._memory))
        command = [sys.executable, keeper.__file__, self._locks, folder, str(self._keep_s)]
        if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode:
            raise EngineError(f"the node's weight cache has no keeper: it cannot be started; see {self._locks}.log")

    def _fill(self, path: Path, checkpoint: Checkpoint, expected: Manifest | None) -> IO[bytes]:
        """Read all files into memory that gets the name `path` once all is well; the caller then has its lock."""
        self._make_room(path.parent, checkpoint.image_size)
        with ExitStack() as on_failure:
            file = on_failure.enter_context(_nameless(path.parent))
            fcntl.flock(file, fcntl.LOCK_SH)
            try:
                file.truncate(checkpoint.image_size)
                with mmap.mmap(file.fileno(), checkpoint.image_size) as image, memoryview(image) as target:
                    _read(checkpoint, expected, target)
            except OSError as error:
                used = sum(size for _, size in _entries(path.parent))
                raise NodeCacheFull(checkpoint.image_size, used, f"{self._memory}: {error.strerror}") from error
            # Python follows the link in /proc only if a directory is given too, which the absolute path makes void.
            os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno())
            on_failure.pop_all()
            return file

    def _make_room(self, folder: Path, needed: int) -> None:
        """Remove what was used longest ago, until there is room within the bound and in the machine's memory."""
        room = os.statvfs(folder)
        size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        bound = size // 2 if self._max_bytes is None else self._max_bytes
        entries = _entries(folder)
        used = sum(size for _, size in entries)
        for entry, entry_size in entries:
            enough = used + needed <= bound and needed <= free
            never = needed > min(bound, size)
            if not enough and not never and keeper.remove_unused(entry):
                used, free = used - entry_size, free + entry_size
        if used + needed > bound:
            raise NodeCacheFull(needed, used, f"slot.node_cache.max_bytes allows {bound / 1e9:.2f} GB in all")
        if needed > free:
            raise NodeCacheFull(needed, used, f"{self._memory} has {free / 1e9:.2f} GB free of {size / 1e9:.2f}")


def bytes_on_node(memory: Path = SHARED_MEMORY) -> int:
    """What the cache of this user holds on this node."""
    return sum(size for _, size in _entries(node_folder(memory)))


def _find(path: Path, size: int) -> IO[bytes] | None:
    """The model's file with its lock shared, and noted as used now; None if it is not there."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)
    found = os.fstat(file.fileno())
    if found.st_nlink == 0:  # it was removed between the two calls
        file.close()
        return None
    assert found.st_size == size, f"{path} has {found.st_size} bytes"
    os.utime(file.fileno())
    return file


def _nameless(folder: Path) -> IO[bytes]:
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o400)
    except OSError as error:
        raise EngineError(
            f"no file can be made in {folder} ({error.strerror}): set slot.node_cache.enabled to false"
        ) from error
    return os.fdopen(file, "r+b", buffering=0)


def _read(checkpoint: Checkpoint, expected: Manifest | None, target: memoryview) -> None:
    offsets = {shard.path: offset for shard, offset in zip(checkpoint.shards, checkpoint.offsets, strict=True)}

    def work(file: int, piece: Piece) -> None:
        begin = offsets[piece.shard.path] + piece.begin
        with target[begin : begin + piece.end - piece.begin] as into:
            checksum = read_piece(file, piece, into, hashed=expected is not None)
        if expected is not None:
            expected.check_piece(piece, checksum)

    for_each_piece(checkpoint.shards, work, f"weights of {checkpoint.shards[0].path.parent.name}")
    for shard in checkpoint.shards:
        shard.check_unchanged()


def _entries(folder: Path) -> list[tuple[Path, int]]:
    """What is in the cache, with its bytes, the one that was used longest ago first."""
    found: list[tuple[Path, os.stat_result]] = []
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has just removed it
            found.append((entry, entry.stat()))
    return [(entry, stat.st_size) for entry, stat in sorted(found, key=lambda item: item[1].st_mtime_ns)]
