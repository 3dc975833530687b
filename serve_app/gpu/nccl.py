"""How NCCL is told what to use: settings and a node's network in, environment variables out. Pure.

Names and values are NCCL's (user guide, "Environment Variables"), gloo's (one or more exact interface names) and
PyTorch's (ProcessGroupNCCL.hpp). All ranks of a slot get them: vLLM's own processes inherit the slot's environment,
and its Ray executor gives each Ray worker what the driver has and the worker's node does not set itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.config import NcclConfig
from serve_app.errors import InterfaceNotFound

INTERFACE = "NCCL_SOCKET_IFNAME"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# PyTorch's watchdog is itself watched, and blocked for seconds where host memory is pinned (11 s for 16 GB) or kernels
# are loaded: a shorter limit than this would end healthy processes.
_LEAST_HEARTBEAT_S = 60


@dataclass(frozen=True)
class Network:
    """One node's network.

    Attributes:
        node: host name, for messages.
        address: under which Ray knows the node; empty where Ray does not run.
        interfaces: name -> IP addresses, of those that are up.
    """

    node: str
    address: str
    interfaces: Mapping[str, Sequence[str]]


def matching(pattern: str, interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    """The interfaces that NCCL would use for this value of NCCL_SOCKET_IFNAME, in the order given.

    `^` and `=` stand before the whole list: `eth,ib` means these prefixes, `=eth0,eth1` exactly these two, `^docker,lo`
    all but these prefixes. Interfaces without an address, or only with IPv6's loopback one, do not count.
    """
    excluding, names = pattern.startswith("^"), pattern.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    listed = [name for name in names.split(",") if name]
    return [
        name
        for name, addresses in interfaces.items()
        if set(addresses) - {"::1"}
        and any(name == entry if exact else name.startswith(entry) for entry in listed) is not excluding
    ]


def environment(settings: NcclConfig, network: Network, present: Mapping[str, str]) -> dict[str, str]:
    """The variables to add on the driver's node to those that are `present`, which stay.

    Without `interface` it is exactly the one that carries Ray's node address. Ray workers on other nodes get the same
    name; where theirs is called otherwise they end with InterfaceNotFound (see `of_rank`), and `interface` must say
    what fits all nodes: a prefix, or a list.

    Raises:
        InterfaceNotFound: no interface of this node matches, whoever named it.
    """
    pattern = present.get(INTERFACE) or settings.interface or _of_ray(network)
    names = _found(pattern, network, _said_by(settings, present))
    wanted = {
        INTERFACE: pattern,
        GLOO_INTERFACE: _preferred(names, network),
        # vLLM would ask for the route to a public address, which a node without one does not have.
        "VLLM_HOST_IP": network.address,
    }
    if settings.timeout_s is not None:
        wanted["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(max(settings.timeout_s, _LEAST_HEARTBEAT_S))
    wanted |= _told(settings)
    added = {name: value for name, value in wanted.items() if value and not present.get(name)}
    _check_gloo({**present, **added}, network)
    return added


def of_rank(network: Network, present: Mapping[str, str]) -> dict[str, str]:
    """What a rank must change of its environment, which may come from a driver on another node.

    Gloo knows no prefixes: where the driver's interface is not here, the first one is taken that NCCL would use.

    Raises:
        InterfaceNotFound: this node has no interface that matches NCCL_SOCKET_IFNAME.
    """
    if INTERFACE not in present:
        return {}
    names = _found(present[INTERFACE], network, INTERFACE)
    given = present.get(GLOO_INTERFACE, "").split(",")
    return {} if set(given) <= set(network.interfaces) else {GLOO_INTERFACE: _preferred(names, network)}


def overridden(settings: NcclConfig, present: Mapping[str, str]) -> list[str]:
    """The settings that do nothing because the environment says something else, as `VARIABLE=value`."""
    told = _told(settings) | ({INTERFACE: settings.interface} if settings.interface else {})
    return [f"{name}={present[name]}" for name, value in told.items() if present.get(name, value) != value]


def _told(settings: NcclConfig) -> dict[str, str]:
    """What the settings say as it stands, without a look at the node."""
    told = {
        "NCCL_NET_GDR_LEVEL": settings.gpu_direct_level,
        "NCCL_NVLS_ENABLE": None if settings.nvls is None else str(int(settings.nvls)),
        "NCCL_TOPO_FILE": settings.topo_file,
        "NCCL_DEBUG": settings.debug,
    }
    return {name: value for name, value in told.items() if value is not None}


def _of_ray(network: Network) -> str:
    for name, addresses in network.interfaces.items():
        if network.address in addresses:
            return f"={name}"
    address = network.address or "no address"
    raise InterfaceNotFound(network.node, address, "Ray's node address", tuple(network.interfaces))


def _found(pattern: str, network: Network, setting: str) -> list[str]:
    names = matching(pattern, network.interfaces)
    if not names:
        raise InterfaceNotFound(network.node, pattern, setting, tuple(network.interfaces))
    return names


def _said_by(settings: NcclConfig, present: Mapping[str, str]) -> str:
    if present.get(INTERFACE):
        return f"{INTERFACE} in its environment"
    return "slot.nccl.interface" if settings.interface else "Ray's node address"


def _preferred(names: list[str], network: Network) -> str:
    """One name for gloo: the one that Ray uses, else the first that leads out of the node."""
    with_ray = [name for name in names if network.address in network.interfaces[name]]
    outward = [name for name in names if not name.startswith("lo")]
    return (with_ray or outward or names)[0]


def _check_gloo(effective: Mapping[str, str], network: Network) -> None:
    for name in effective[GLOO_INTERFACE].split(","):
        if name not in network.interfaces:
            setting = f"{GLOO_INTERFACE} in its environment"
            raise InterfaceNotFound(network.node, name, setting, tuple(network.interfaces))
