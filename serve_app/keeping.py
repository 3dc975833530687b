"""Processes that keep something for all users of a node, for as long as there is any, and then put it away.

A user that started such a thing by itself would take it along when it dies. So a keeper belongs to nobody: it leaves
its starter's session and holds on until no process has held a lock for some time. Locks are `flock`, which the system
releases however a process ends. Nothing but the standard library, so that a keeper is there at once, and small.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

POLL_S = 0.5


def go_on_alone() -> int:
    """Fork: only the child returns, in a session of its own. The process that called ends with status 0 once the child
    has written to the descriptor that is returned, with 1 if the child ends before.
    """
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        sys.exit(0 if os.read(ready, 1) else 1)
    os.close(ready)
    os.setsid()
    return told


def leave_terminal(log: str) -> None:
    """What the starter reads of us must end when it ends; from now on we write to the file `log`."""
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, file), (2, file)):
        os.dup2(source, target)


def wait_until_unused(users: IO[str], grace_s: float, needed: Callable[[], bool] = lambda: True) -> None:
    """Return once nobody has shared `users` for `grace_s` seconds, or `needed` says no.

    In the first case the lock is then ours: whoever comes late waits for it until this process ends.
    """
    used_s = time.monotonic()
    while needed():
        time.sleep(POLL_S)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            used_s = time.monotonic()
            continue
        if time.monotonic() - used_s > grace_s:
            return
        fcntl.flock(users, fcntl.LOCK_UN)


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock file `lock`; it is made if it was not there."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
