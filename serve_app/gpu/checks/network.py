"""Which network the ranks use, and whether clients can come in."""

from __future__ import annotations

from serve_app.errors import InterfaceNotFound
from serve_app.gpu import nccl
from serve_app.gpu.facts import Finding, HttpPort, Level, NodeFacts, Wanted

# Interfaces that lead to no other node: loopback, and those of containers on this one.
_INWARD = ("lo", "docker", "veth", "br-", "virbr", "cni")


def check_interface(facts: NodeFacts, wanted: Wanted) -> Finding:
    """NCCL and gloo must find the interface that they are told to use, on this node."""
    settings = wanted.slot.nccl
    try:
        added = nccl.environment(settings, facts.network, facts.environment)
    except InterfaceNotFound as missing:
        what, _, todo = missing.problems[0].partition(": ")
        level = Level.ERROR if wanted.slot.gpus > 1 and facts.ray.gpus else Level.WARNING
        return Finding("interface", level, what, todo)
    overridden = nccl.overridden(settings, facts.environment)
    if overridden:
        what = f"the node's environment overrides slot.nccl: {', '.join(overridden)}"
        return Finding("interface", Level.WARNING, what, "remove the setting or the variable")
    interface = facts.environment.get(nccl.INTERFACE) or added[nccl.INTERFACE]
    used = nccl.matching(interface, facts.network.interfaces)
    inward = [name for name in used if name.startswith(_INWARD)]
    if wanted.slot.nodes > 1 and inward:
        what = f"{nccl.INTERFACE}={interface} means {', '.join(used)}: {', '.join(inward)} leads to no other node"
        return Finding("interface", Level.ERROR, what, "set slot.nccl.interface to the one between the nodes")
    return Finding("interface", Level.OK, f"{nccl.INTERFACE}={interface}")


def check_topology(facts: NodeFacts, wanted: Wanted) -> Finding:
    """NCCL ignores a topology file that is not there, and is slow then."""
    if facts.topo_file_found is False:
        what = f"slot.nccl.topo_file {wanted.slot.nccl.topo_file} is not on this node"
        return Finding("topology", Level.ERROR, what, "put it there, or remove the setting")
    return Finding("topology", Level.OK, wanted.slot.nccl.topo_file or "NCCL finds it out by itself")


def check_port(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Serve's proxy listens on every node; where it does already, it must be one that runs our middleware."""
    if facts.survey is None:
        return Finding("port", Level.OK, "not looked at")
    port, state = wanted.http_port, facts.survey.http
    if state is HttpPort.TAKEN:
        what = f"port {port} is used by a process that is not Serve's proxy"
        return Finding("port", Level.ERROR, what, "end that process, or set http_options.port")
    if state is HttpPort.PLAIN:
        what = f"Serve's proxy on port {port} does not run serve_app's middleware"
        todo = "start Serve anew with the environment of controller_options in configs/cpu.yaml (`serve shutdown`)"
        return Finding("port", Level.ERROR, what, todo)
    return Finding("port", Level.OK, f"port {port}: {'a proxy answers' if state is HttpPort.OURS else 'free'}")
