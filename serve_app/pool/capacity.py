"""How many slots the nodes that exist have room for, and what is missing where one has no place. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Resource name -> amount.
Resources = dict[str, float]
# What a message names first.
_ORDER = ("GPU", "CPU", "memory")
# Of counts: nothing is known to limit them.
NO_LIMIT = 1 << 30
# A message lists so many nodes, the fullest first.
_LISTED = 8


@dataclass(frozen=True)
class Node:
    """One live node: what it has in all, and what nobody has reserved."""

    name: str
    total: Resources
    free: Resources


class Trouble(StrEnum):
    """Why a slot that Serve wants is not placed."""

    INFEASIBLE = "infeasible"
    """The nodes that exist could not hold it even if they were empty."""
    WAITING = "waiting"
    """They could, but others hold what it needs."""


@dataclass(frozen=True)
class Shortage:
    trouble: Trouble
    message: str


@dataclass(frozen=True)
class Outlook:
    """What the nodes that exist now mean for the number of slots.

    Attributes:
        room: slots that would fit now, beside all those that Serve had already asked for.
        asked: how many these were, with and without a place; without it there are not more by now.
        possible: slots that the nodes could hold if they were empty.
        shortage: why slots that Serve has asked for are not placed.
    """

    room: int = NO_LIMIT
    possible: int = NO_LIMIT
    shortage: Shortage | None = None
    asked: int = NO_LIMIT

    def room_beside(self, asked: int) -> int:
        """What is left of the room when Serve has asked for so many slots: those that are new have taken their part."""
        return max(0, self.room - max(0, asked - self.asked))


def outlook(slot: Sequence[Resources], nodes: Sequence[Node], most: int, placed: int, unplaced: int) -> Outlook:
    """Look at the nodes; counts of slots end at `most`, the largest that matters.

    Args:
        slot: what each of a slot's nodes must have; two parts of one slot never share a node.
        placed, unplaced: slots that Serve has asked for, with and without a place.
    """
    free = room(slot, (node.free for node in nodes), most + unplaced)
    possible = room(slot, (node.total for node in nodes), most)
    return Outlook(max(0, free - unplaced), possible, shortage(slot, nodes, placed, unplaced))


def room(slot: Sequence[Resources], nodes: Iterable[Resources], most: int) -> int:
    """How many slots fit into what the nodes have, at most `most`; first fit, the largest part first."""
    left = [dict(node) for node in nodes]
    count = 0
    while count < most and _take(slot, left):
        count += 1
    return count


def _take(slot: Sequence[Resources], nodes: list[Resources]) -> bool:
    """Take one slot out of `nodes`; False if it does not fit."""
    used: set[int] = set()
    for part in sorted(slot, key=lambda part: -sum(part.values())):
        for index, node in enumerate(nodes):
            if index not in used and _has(node, part):
                used.add(index)
                for name, amount in part.items():
                    node[name] = node.get(name, 0.0) - amount
                break
        else:
            return False
    return True


def _has(node: Resources, part: Resources) -> bool:
    return all(node.get(name, 0.0) + 1e-6 >= amount for name, amount in part.items())


def shortage(slot: Sequence[Resources], nodes: Sequence[Node], placed: int, unplaced: int) -> Shortage | None:
    """Why `unplaced` slots that Serve has asked for have no place beside the `placed` ones; None if all have one."""
    if unplaced <= 0:
        return None
    wanted, totals = placed + unplaced, [node.total for node in nodes]
    possible = room(slot, totals, wanted)
    if possible >= wanted:
        return Shortage(Trouble.WAITING, _waiting(slot, nodes, unplaced))
    name = _scarcest(slot, totals, wanted)
    has = sorted((node[name] for node in totals if node.get(name, 0.0) > 0), reverse=True)
    have = f"the nodes have {_and([_amount(name, amount) for amount in has])}" if has else f"no node has any {name}"
    said = f"{_needs(slot, name)}; {have}"
    if possible:
        return Shortage(Trouble.INFEASIBLE, f"{said}: room for {possible} of {wanted} slots")
    missing = _missing(slot, totals, name)
    return Shortage(Trouble.INFEASIBLE, f"{said}: {_are_missing(name, missing) if missing else _jointly(slot)}")


def _waiting(slot: Sequence[Resources], nodes: Sequence[Node], unplaced: int) -> str:
    left = [node.free for node in nodes]
    name = _scarcest(slot, left, unplaced)
    free = [f"{_amount(name, node.free[name])} on {node.name}" for node in nodes if node.free.get(name, 0.0) > 1e-6]
    enough = ", enough by our count: `ray status` may say why" if room(slot, left, unplaced) >= unplaced else ""
    return f"{_needs(slot, name)}; free: {_and(free) or 'nothing'}{enough}"


def _needs(slot: Sequence[Resources], name: str) -> str:
    parts = [part[name] for part in slot if part.get(name, 0.0) > 0]
    where = "one node" if len(parts) == 1 else f"{len(parts)} nodes with {_amount(name, min(parts))} each"
    return f"a slot needs {_amount(name, sum(parts))} x {name} on {where}"


def _scarcest(slot: Sequence[Resources], nodes: Sequence[Resources], most: int) -> str:
    """The resource to name: the one that by itself leaves room for the fewest slots."""
    names = sorted({name for part in slot for name in part}, key=_ORDER.index)
    return min(names, key=lambda name: room([{name: part[name]} for part in slot if name in part], nodes, most))


def _missing(slot: Sequence[Resources], nodes: Sequence[Resources], name: str) -> float:
    """How much of one resource the best nodes lack for one slot."""
    wanted = sorted((part.get(name, 0.0) for part in slot), reverse=True)
    has = sorted((node.get(name, 0.0) for node in nodes), reverse=True) + [0.0] * len(wanted)
    lacking = sum(max(0.0, want - have) for want, have in zip(wanted, has, strict=False))
    return lacking if lacking > 1e-6 else 0.0


def _are_missing(name: str, amount: float) -> str:
    if name == "memory":
        return f"{_amount(name, amount)} are missing"
    return (
        f"{_amount(name, amount)} {name} is missing" if amount == 1 else f"{_amount(name, amount)} {name}s are missing"
    )


def _jointly(slot: Sequence[Resources]) -> str:
    all_of_it = " and ".join(f"{_amount(name, amount)} x {name}" for name, amount in slot[0].items())
    return f"no {'node has' if len(slot) == 1 else f'{len(slot)} nodes have'} {all_of_it} at once"


def _amount(name: str, amount: float) -> str:
    return f"{amount / 1e9:.4g} GB" if name == "memory" else f"{amount:.4g}"


def _and(words: Sequence[str]) -> str:
    if len(words) > _LISTED:
        words = [*words[:_LISTED], f"{len(words) - _LISTED} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
