"""An engine's processes as the operating system sees them: one Linux process group per EngineCore.

Workers forked by a forkserver are not descendants of their EngineCore, so that a walk over children misses them; the
group has them all, and whatever they start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05


def members(groups: Iterable[int]) -> list[int]:
    """Pids of the living processes of these groups; a group's leader counts before it has joined its group."""
    wanted = set(groups)
    if not wanted:
        return []
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and _belongs(entry, wanted)]


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory that the processes hold, in bytes; pages shared by n processes count 1/n each. Gone processes are 0."""
    return sum(_pss(pid) for pid in pids)


def end(groups: Iterable[int], grace_s: float) -> None:
    """Wait up to `grace_s` seconds for the groups to end by themselves, then kill what is left. Blocks."""
    wanted = set(groups)
    deadline = time.monotonic() + grace_s
    while (left := members(wanted)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = members(wanted)


def _belongs(entry: Path, groups: set[int]) -> bool:
    try:
        # The name in parentheses may itself hold spaces and parentheses; after it: state, parent, group.
        state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:  # ended while we looked
        return False
    return state not in "ZX" and (int(group) in groups or int(entry.name) in groups)


def _pss(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
