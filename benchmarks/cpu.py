"""Where a server's CPU time goes: by process, named for what it does on the way of a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.processes import Identity, cpu_s, descendants, parent

# How the titles of Ray's processes begin; what an actor runs now follows.
TITLES = {"ray::ProxyActor": "proxy", "ray::ServeReplica:default:Slot": "replica", "haproxy": "haproxy"}
API_SERVER, ENGINE, OTHER = "api_server", "engine_core", "other"
Reading = dict[Identity, float]


class CpuByRole:
    """Reads the CPU seconds of a process and all its descendants.

    Args:
        pid: `serve run` or `vllm serve`.
        plain: it is `vllm serve`: the API server itself, with the engine's processes below it.
        engines: processes of engines that are not below it: our slots fork theirs from a server of the node's own.
    """

    def __init__(self, pid: int, *, plain: bool, engines: Iterable[int] = ()) -> None:
        self._pid, self._plain, self._engines = pid, plain, frozenset(engines)
        self._roles: dict[int, str] = {}

    def read(self) -> Reading:
        family = descendants(self._pid).union(*(descendants(pid) for pid in self._engines if cpu_s(pid)))
        parents = {pid: parent(pid) for pid, _ in family}
        for pid, _ in family:
            role = self._role(pid, parents)
            if role != OTHER or pid not in self._roles:  # a title that was seen once counts: Ray changes them
                self._roles[pid] = role
        return {(pid, start): cpu_s(pid) for pid, start in family}

    def since(self, before: Reading) -> dict[str, float]:
        """CPU seconds by role since `before` was read."""
        used: dict[str, float] = {}
        for identity, seconds in self.read().items():
            role = self._roles[identity[0]]
            used[role] = used.get(role, 0.0) + seconds - before.get(identity, 0.0)
        return {role: round(seconds, 3) for role, seconds in used.items()}

    def _role(self, pid: int, parents: Mapping[int, int]) -> str:
        """By title, or as a descendant of whatever owns the engine: vLLM names its processes only on some systems."""
        if pid in self._engines:
            return ENGINE
        if self._plain:
            return API_SERVER if pid == self._pid else ENGINE
        named = next((role for title, role in TITLES.items() if _title(pid).startswith(title)), None)
        if named is not None:
            return named
        above = parents.get(pid, 0)
        while above in parents:
            if above in self._engines:
                return ENGINE
            if self._roles.get(above) == "replica" or _title(above).startswith("ray::ServeReplica:default:Slot"):
                return ENGINE
            above = parents[above]
        return OTHER


def _title(pid: int) -> str:
    try:
        first = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
    return first.rpartition("/")[2] if first.startswith("/") else first
