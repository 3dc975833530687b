"""Keep a rank on the processors, and so in the memory, that its GPU hangs on.

Linux takes new pages from the node of the processor that touches them first, so a process that runs on the right node
also pins its memory there. On machines with one node nothing is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from serve_app.gpu import nvml

SYSTEM = Path("/sys")


def bind_to(uuid: str, system: Path = SYSTEM) -> int | None:
    """Keep the calling thread, and those it starts later, on the processors of this GPU's node.

    Returns:
        The node; None where there is only one, where it is not known, or where none of its processors is allowed.

    Raises:
        pynvml.NVMLError: no driver, or no such GPU.
    """
    if len(list((system / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    node = node_of(nvml.pci_address(uuid), system)
    if node is None:
        return None
    cpus = processors(node, system) & os.sched_getaffinity(0)
    if not cpus:
        return None
    os.sched_setaffinity(0, cpus)
    return node


def node_of(pci_address: str, system: Path = SYSTEM) -> int | None:
    """The NUMA node of a PCI device; None if the system does not say (virtual machines often do not)."""
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors(node: int, system: Path = SYSTEM) -> set[int]:
    """The processors of a node; empty if there is no such node."""
    try:
        text = (system / f"devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return set()
    return set(parse_list(text))


def parse_list(text: str) -> Iterable[int]:
    """Linux's lists of numbers, as `0-3,8`. Pure."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
