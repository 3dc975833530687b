"""What slots have finished, for the ledger: each transition once, a promotion with what happened around it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from serve_app.pool import eta
from serve_app.pool.messages import Transition

# Transitions kept, over all slots.
LEDGER_LENGTH = 200


@dataclass
class Entries:
    """By slot, in the order in which they were heard of.

    Attributes:
        typical_s: what each stage takes, from all that is kept.
        _finishing: what is known of promotions whose slot has not reported them yet.
    """

    ledger: deque[tuple[str, Transition]] = field(default_factory=lambda: deque(maxlen=LEDGER_LENGTH))
    typical_s: dict[str, float] = field(default_factory=dict[str, float])
    _finishing: dict[str, Transition] = field(default_factory=dict[str, Transition])

    def add(self, slot: str, transition: Transition) -> None:
        """Once: a report whose answer was lost comes twice."""
        around = self._finishing.get(slot)
        if around is not None and around.kind == transition.kind and transition.start_s >= around.start_s:
            transition = _merged(transition, self._finishing.pop(slot))
        if not any(name == slot and transition.is_same(known) for name, known in self.ledger):
            self.ledger.append((slot, transition))
            self.typical_s = eta.typical_s(known for _, known in self.ledger)

    def complete(self, slot: str, around: Transition) -> None:
        """Add what happened outside the slot to its own entry, or wait for that."""
        self._finishing[slot] = around
        for index, (name, transition) in enumerate(self.ledger):
            if name == slot and transition.kind == around.kind and transition.start_s >= around.start_s:
                self.ledger[index] = (slot, _merged(transition, self._finishing.pop(slot)))
                return


def _merged(inner: Transition, around: Transition) -> Transition:
    """A slot's part of a promotion inside the whole of it."""
    stages = sorted((*around.stages, *inner.stages), key=lambda record: record.start_s)
    return replace(inner, start_s=around.start_s, duration_s=around.duration_s, stages=tuple(stages))
