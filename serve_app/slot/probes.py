"""What only several nodes together show: whose clock is off, and who cannot reach whom. A small actor on each node."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.gpu.facts import Clock, RayNode

# For the actors to start; for one answer; for one connection.
START_S, ANSWER_S, CONNECT_S = 10.0, 3.0, 2.0
CLOCK_QUESTIONS = 3
_THREADS = 32


@dataclass(frozen=True)
class Between:
    """What was found between the nodes, all by Ray's id.

    Attributes:
        clocks: each node's against this machine's.
        unreachable: the nodes to which a node gets no connection.
    """

    clocks: Mapping[str, Clock] = field(default_factory=dict)
    unreachable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def by_name(self, names: Mapping[str, str]) -> Between:
        """The same by the nodes' names instead of their ids."""
        return Between(
            {names[node_id]: clock for node_id, clock in self.clocks.items()},
            {names[node_id]: tuple(names[other] for other in others) for node_id, others in self.unreachable.items()},
        )


class Probe:
    """Listens on a port that the system chooses, as NCCL, gloo and Serve's replicas do."""

    def __init__(self) -> None:
        # Nobody accepts: the system itself completes connections until the backlog is full.
        self._listening = socket.create_server(("", 0), backlog=1024)

    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def now(self) -> float:
        return time.time()

    def cannot_reach(self, targets: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Those of the (address, port) pairs that cannot be connected to."""
        with ThreadPoolExecutor(_THREADS) as threads:
            reached = threads.map(_connects, targets.values())
            return tuple(name for name, good in zip(targets, reached, strict=True) if not good)


def between(nodes: Mapping[str, RayNode]) -> Between:
    """Compare clocks and try connections among these nodes. Blocks for seconds; silent nodes are left out."""
    # A runtime_env of its own keeps it out of the spare worker with vLLM imported, which is for the node's next slot.
    remote = ray.remote(num_cpus=0, runtime_env={"env_vars": {"SERVE_APP_TASK": "probe"}})(Probe)
    probes = {
        node_id: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()
        for node_id in nodes
    }
    try:
        ports = _answers({node_id: probe.port.remote() for node_id, probe in probes.items()}, START_S)
        clocks = {node_id: _clock(probes[node_id]) for node_id in ports}
        targets = {node_id: (nodes[node_id].address, port) for node_id, port in ports.items()}
        tries = {node_id: probes[node_id].cannot_reach.remote(_without(targets, node_id)) for node_id in ports}
        # One thread may have to wait for several connections in turn.
        missed = _answers(tries, ANSWER_S + CONNECT_S * (1 + len(targets) // _THREADS))
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return Between(
        {node_id: clock for node_id, clock in clocks.items() if clock},
        {node_id: others for node_id, others in missed.items() if others},
    )


def _clock(probe: Any) -> Clock | None:
    """Ask a few times; the quickest answer counts, and half its time is how exactly it is known."""
    best: Clock | None = None
    for _ in range(CLOCK_QUESTIONS):
        before = time.time()
        try:
            there = ray.get(probe.now.remote(), timeout=ANSWER_S)
        except RayError:  # GetTimeoutError is one
            return best
        half = (time.time() - before) / 2
        if best is None or half < best.error_s:
            best = Clock(ahead_s=there - before - half, error_s=half)
    return best


def _answers(asked: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """What comes in time, by node."""
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    found: dict[str, Any] = {}
    for node_id, answer in asked.items():
        try:
            found[node_id] = ray.get(answer, timeout=0)
        except RayError:
            continue
    return found


def _without(targets: Mapping[str, tuple[str, int]], node_id: str) -> dict[str, tuple[str, int]]:
    return {other: target for other, target in targets.items() if other != node_id}


def _connects(target: tuple[str, int]) -> bool:
    try:
        socket.create_connection(target, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
