"""What standbys cost, shared out by model: the time for which a slot stood by, split among the models it held. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serve_app.config import Tier
from serve_app.pool.lifecycle import State
from serve_app.pool.view import SlotView


@dataclass
class StandbyMeter:
    """Slot-seconds by model; times the GPUs of a slot, these are GPU-seconds."""

    slot_s: dict[str, float] = field(default_factory=dict[str, float])
    _last_s: float | None = None
    _standing: list[Mapping[str, Tier]] = field(default_factory=list[Mapping[str, Tier]])
    _shares: dict[str, float] = field(default_factory=dict[str, float])

    def update(self, slots: Iterable[SlotView], now: float) -> None:
        """Add the time since the last call; `now` in seconds of a monotonic clock."""
        passed, self._last_s = now - (now if self._last_s is None else self._last_s), now
        state = State.STANDBY
        standing = [slot.holds for slot in slots if slot.state is state and not slot.leaving]
        if standing != self._standing:
            self._standing, self._shares = standing, _shares(standing)
        for model, share in self._shares.items():
            self.slot_s[model] = self.slot_s.get(model, 0.0) + passed * share


def _shares(standing: Iterable[Mapping[str, Tier]]) -> dict[str, float]:
    """Slots by model, each split among the models that it holds."""
    shares: dict[str, float] = {}
    for holds in standing:
        for model in holds:
            shares[model] = shares.get(model, 0.0) + 1 / len(holds)
    return shares
