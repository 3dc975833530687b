"""The process that keeps one forkserver for all slots of a node, for as long as any of them is there.

    python keeper.py ADDRESS GRACE_S MODULE

A slot that started the server by itself would take along, when it dies, the knowledge of whether the other slots'
engines still run. So the keeper (see `serve_app.keeping`) listens at ADDRESS, starts Python's forkserver there with
MODULE imported, and ends both once no slot has held ADDRESS.users for GRACE_S seconds. If the keeper is killed, the
server ends by itself. While it lives it holds ADDRESS.alive.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

from serve_app.keeping import go_on_alone, leave_terminal, wait_until_unused

# The server's own command line; `main` is what multiprocessing itself starts.
SERVER = "from multiprocessing.forkserver import main; main({listener}, {alive}, [{module!r}])"


def main(address: str, grace_s: float, module: str) -> None:
    """Return to the starter once the server can be connected to; the rest goes on in a process of its own."""
    told = go_on_alone()
    # In this order: at the end .alive is released first, so that whoever then gets .users sees that we are gone.
    with Path(f"{address}.users").open("r") as users, Path(f"{address}.alive").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        server, lifeline = _start(address, module)
        leave_terminal(f"{address}.log")
        os.write(told, b"1")
        os.close(told)
        wait_until_unused(users, grace_s, needed=lambda: server.poll() is None)
        Path(address).unlink(missing_ok=True)
        os.close(lifeline)
        server.wait()


def _start(address: str, module: str) -> tuple[subprocess.Popen[bytes], int]:
    """The server, and the pipe whose end tells it to end."""
    Path(address).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        alive, lifeline = os.pipe()
        fds = (listener.fileno(), alive)
        command = SERVER.format(listener=fds[0], alive=alive, module=module)
        with Path(f"{address}.log").open("w") as log:
            server = subprocess.Popen([sys.executable, "-c", command], pass_fds=fds, stdout=log, stderr=log)
        os.close(alive)
    return server, lifeline


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
