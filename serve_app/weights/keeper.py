"""The process that puts the node's weight cache away once nobody uses it.

    python keeper.py LOCKS FOLDER KEEP_S

When no process has shared LOCKS.users for KEEP_S seconds, everything in FOLDER is removed, and FOLDER itself. While it
lives the keeper holds LOCKS.alive. If it is killed, the next user of the cache starts another, which owns what is
there.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

from serve_app.keeping import go_on_alone, leave_terminal, wait_until_unused


def main(locks: str, folder: Path, keep_s: float) -> None:
    """Return to the starter at once; the rest goes on in a process of its own."""
    told = go_on_alone()
    # In this order: at the end .alive is released first, so that whoever then gets .users sees that we are gone.
    with Path(f"{locks}.users").open("r") as users, Path(f"{locks}.alive").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        leave_terminal(f"{locks}.log")
        os.write(told, b"1")
        os.close(told)
        wait_until_unused(users, keep_s)
        for entry in folder.glob("*"):
            remove_unused(entry)
        with suppress(OSError):  # something is still used: by processes that see other locks than ours
            folder.rmdir()


def remove_unused(entry: Path) -> bool:
    """Remove a model's weights unless a process uses them; tell whether they are gone."""
    try:
        with entry.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entry.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
