"""How fast a disk is read when nothing of it is in the page cache: O_DIRECT, bounded in bytes and time."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from serve_app.gpu.facts import Disk

MOST_BYTES = 1 << 30
MOST_S = 5.0
SCRATCH_BYTES = 256 << 20
# Large enough for an NVMe drive's full speed; O_DIRECT wants it aligned, which an anonymous mapping is.
_CHUNK = 8 << 20


def measure(files: list[Path], scratch: Path) -> Disk:
    """Read the largest of `files`, or where there is none a file written for it below `scratch`. Never raises.

    Takes at most MOST_S seconds for reading, and what writing SCRATCH_BYTES takes where that is needed.
    """
    try:
        if files:
            largest = max(files, key=lambda file: file.stat().st_size)
            return Disk(str(largest.parent), read_rate(largest))
        return Disk(str(scratch), _scratch_rate(scratch))
    except OSError as error:
        return Disk(str(files[0].parent if files else scratch), trouble=error.strerror or str(error))


def read_rate(file: Path, most_bytes: int = MOST_BYTES, most_s: float = MOST_S) -> float:
    """Bytes a second of reading the beginning of a file. Raises OSError, also where O_DIRECT is not supported."""
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _CHUNK) as buffer:
            done, begin = 0, time.perf_counter()
            while done < most_bytes and time.perf_counter() - begin < most_s:
                got = os.preadv(descriptor, [buffer], done)
                done += got
                if got < _CHUNK:
                    break
            return done / max(time.perf_counter() - begin, 1e-9)
    finally:
        os.close(descriptor)


def _scratch_rate(folder: Path) -> float:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".doctor-{os.getpid()}"
    try:
        with file.open("wb") as written:
            block = os.urandom(1 << 20)  # a disk that compresses must not look faster than it is
            for _ in range(SCRATCH_BYTES >> 20):
                written.write(block)
            written.flush()
            os.fsync(written.fileno())
        return read_rate(file)
    finally:
        file.unlink(missing_ok=True)
