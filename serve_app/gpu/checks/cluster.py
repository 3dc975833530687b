"""What only all nodes together show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_app.gpu.facts import Clock, Finding, Level, NodeFacts, Wanted

# Ages of needs, the ledger and traces compare the nodes' clocks; beyond this they mislead.
CLOCKS_APART_S = 0.5


def check_gpus(nodes: Sequence[NodeFacts], wanted: Wanted) -> Finding:
    """They must hold a slot, and should hold all that always exist."""
    gpus, slot = sum(facts.ray.gpus for facts in nodes), wanted.slot.gpus
    what = f"all nodes together have {gpus:g} GPUs, a slot takes {slot:g}"
    if gpus < slot:
        todo = "add nodes with GPUs, or lower slot.gpus; a node's GPUs count once Ray offers them (`ray status`)"
        return Finding("gpus", Level.ERROR, what, todo)
    if gpus < slot * wanted.least_slots:
        todo = f"lower slots.min from {wanted.least_slots}, or add nodes: the slots beyond wait for GPUs"
        return Finding("gpus", Level.WARNING, what, todo)
    return Finding("gpus", Level.OK, what)


def check_versions(nodes: Sequence[NodeFacts], wanted: Wanted) -> Finding:
    """Ranks of one slot exchange Python objects, and all slots are verified against the first one."""
    found: dict[str, list[str]] = {}
    for facts in nodes:
        if wanted.runs_on_gpus_of(facts):
            found.setdefault(facts.software.versions, []).append(facts.network.node)
    if len(found) < 2:
        return Finding("versions", Level.OK, "the same on all nodes with GPUs")
    level = Level.ERROR if wanted.slot.nodes > 1 else Level.WARNING
    what = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(found.items()))
    return Finding("versions", level, what, "use one image for all nodes")


def check_clocks(clocks: Mapping[str, Clock]) -> Finding:
    """Each against the clock of the machine that asks, as exactly as the answer's way allows."""
    apart = {node: clock for node, clock in clocks.items() if abs(clock.ahead_s) - clock.error_s > CLOCKS_APART_S}
    if apart:
        what = ", ".join(f"{node} is {clock.ahead_s:+.1f} s" for node, clock in sorted(apart.items()))
        todo = "run NTP there (chrony): times in ledger and traces are off by as much"
        return Finding("clocks", Level.WARNING, f"{what} from this machine's clock", todo)
    most = max((abs(clock.ahead_s) + clock.error_s for clock in clocks.values()), default=0.0)
    return Finding("clocks", Level.OK, f"at most {most:.3f} s apart" if clocks else "one machine")


def check_ports(unreachable: Mapping[str, Sequence[str]]) -> Finding:
    """Ranks, and proxies and slots, connect to ports that the system chooses: a firewall must let them all through."""
    if not unreachable:
        return Finding("ports", Level.OK, "every node reaches every other one")
    what = "; ".join(
        f"{node} gets no connection to {', '.join(others)}" for node, others in sorted(unreachable.items())
    )
    return Finding("ports", Level.ERROR, what, "open all TCP ports between the nodes (security group, network policy)")
