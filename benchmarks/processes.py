"""A server as a subprocess: started with a log file, stopped together with everything that it has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
POLL_S = 0.1
PR_SET_PDEATHSIG = 1  # of prctl(2)
# (pid, start time in clock ticks since boot): a pid alone may have been given to somebody else meanwhile.
Identity = tuple[int, str]


class Server:
    """One command and its descendants.

    Args:
        log: a file for its output.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.command, self._log = command, log
        with log.open("w") as output:
            # A session of its own: Ctrl-C in the terminal must reach the benchmark alone, which then stops this.
            self._process = subprocess.Popen(
                command,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_interrupt_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises RuntimeError, with the end of its log, if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.command} ended with {self._process.returncode}:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def cpu_s(self) -> float:
        """CPU seconds that it and its descendants have used so far."""
        return sum(cpu_s(pid) for pid, _ in descendants(self.pid))

    def stop(self, grace_s: float = 30) -> None:
        """Interrupt it as Ctrl-C would, then kill what is left of it and of its descendants."""
        family = descendants(self.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        kill(family)
        self._process.wait()


def exit_when_terminated() -> None:
    """Make SIGTERM (of `timeout`, say) leave through all context managers, which stop what runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def descendants(pid: int) -> set[Identity]:
    """The process and all that it has started, directly or not."""
    stats = {int(entry.name): stat for entry in PROC.iterdir() if entry.name.isdigit() and (stat := _stat(entry))}
    family, found = {pid}, {pid}
    while found:
        found = {child for child, stat in stats.items() if int(stat[1]) in found} - family
        family |= found
    return {(member, stats[member][19]) for member in family if member in stats}


def parent(pid: int) -> int:
    """0 if the process is gone."""
    stat = _stat(PROC / str(pid))
    return int(stat[1]) if stat else 0


def kill(family: Iterable[Identity], patience_s: float = 10) -> None:
    """Kill those that still live, and wait until they are gone."""
    deadline = time.monotonic() + patience_s
    while (left := [pid for pid, start in family if _lives(pid, start)]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _interrupt_with_parent() -> None:
    """In the child: be interrupted when the benchmark dies, even by SIGKILL (Linux only).

    A shell that runs a benchmark in the background has it ignore interrupts, which children would inherit.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def _stat(entry: Path) -> list[str]:
    """The fields of proc(5)'s stat from the third on: state, parent, ...; empty if the process is gone."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _lives(pid: int, start: str) -> bool:
    stat = _stat(PROC / str(pid))
    return bool(stat) and stat[0] not in "ZX" and stat[19] == start


def cpu_s(pid: int) -> float:
    """CPU seconds that this one process has used so far; 0 if it is gone."""
    stat = _stat(PROC / str(pid))
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") if stat else 0.0
