"""A process that forks another one from the node's server, for a test to kill: prints the child's pid, then waits."""

from __future__ import annotations

import os
import sys
import time

from serve_app.engine import forkserver


def main() -> None:
    forkserver.acquire()
    child = forkserver._ForkContext().Process(target=time.sleep, args=(600,))
    child.start()
    print("PID", child.pid, flush=True)  # noqa: T201
    sys.stdin.read()
    os._exit(0 if child.is_alive() else 1)  # without waiting for it


if __name__ == "__main__":
    main()
