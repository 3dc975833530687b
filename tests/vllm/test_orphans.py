"""What is left on a machine when processes that own engines are killed: nothing of theirs, and all of the others'."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.engine import forkserver, processes


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_nothing_outlives_a_killed_owner(tiny_llama: Path) -> None:
    """After SIGKILL of the process that owns engines, EngineCores (forked and spawned) end."""
    command = [sys.executable, "-m", "tests.vllm.owner", str(tiny_llama)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        lines = iter(owner.stdout.readline, "")
        pids = next([int(pid) for pid in line.split()[1:]] for line in lines if line.startswith("PIDS"))
        owner.kill()
    assert len(pids) == 2
    assert eventually(lambda: not processes.members(pids), 5)


def share() -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "tests.vllm.sharer"]
    sharer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert sharer.stdout is not None
    return sharer, int(sharer.stdout.readline().split()[1])


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_slots_share_one_server_and_none_takes_it_along() -> None:
    """Two processes fork from the same server; when one is killed, only its own child ends; then the server does."""
    (first, first_child), (second, second_child) = share(), share()
    server = parent(first_child)
    assert parent(second_child) == server
    first.kill()
    first.wait()
    assert eventually(lambda: not processes.members([first_child]), 5)
    assert processes.members([second_child, server]) != []
    second.communicate("", timeout=30)
    assert second.returncode == 0, "its child had ended"
    assert eventually(lambda: not processes.members([server, second_child]), forkserver.GRACE_S + 30)
