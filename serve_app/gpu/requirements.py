"""What a node must be and have so that a slot can start there and its tiers can work: facts in, findings out. Pure.

A slot runs `CHECKS` on its own node before its engine is built; `serve-app doctor` runs them on every node, and
`SURVEY_CHECKS` on what it has looked at for longer. One more check is one more function in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from serve_app.gpu.checks import cluster, hardware, memory, network, serving, software, storage
from serve_app.gpu.facts import Clock, Finding, Level, NodeFacts, Wanted

Check = Callable[[NodeFacts, Wanted], Finding]

CHECKS: tuple[Check, ...] = (
    software.check_driver,
    software.check_torch,
    software.check_vllm,
    software.check_bytecode,
    software.check_allocator,
    memory.check_host_ram,
    network.check_interface,
    network.check_topology,
)
SURVEY_CHECKS: tuple[Check, ...] = (
    hardware.check_leftovers,
    hardware.check_pcie,
    hardware.check_numa,
    hardware.check_limits,
    memory.check_shm,
    storage.check_model,
    storage.check_disk,
    software.check_caches,
    network.check_port,
    serving.check_environment,
    serving.check_api_keys,
)


def check(facts: NodeFacts, wanted: Wanted) -> list[Finding]:
    """Run all checks for which there are facts."""
    checks = CHECKS if facts.survey is None else CHECKS + SURVEY_CHECKS
    return [one(facts, wanted) for one in checks]


def check_cluster(
    nodes: Sequence[NodeFacts],
    wanted: Wanted,
    clocks: Mapping[str, Clock] = {},
    unreachable: Mapping[str, Sequence[str]] = {},
) -> list[Finding]:
    """What only all nodes together show; `clocks`, and whom a node does not reach, by node name."""
    return [
        cluster.check_gpus(nodes, wanted),
        cluster.check_versions(nodes, wanted),
        cluster.check_clocks(clocks),
        cluster.check_ports(unreachable),
    ]


def errors(findings: list[Finding]) -> tuple[str, ...]:
    """What is wrong and what to do about it, for an error message."""
    return tuple(f"{found.what}: {found.todo}" for found in findings if found.level is Level.ERROR)
