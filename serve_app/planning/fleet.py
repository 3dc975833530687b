"""The slots that exist, and what they cost: whatever decides about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.live import LiveSettings
from serve_app.planning.loop import Loop
from serve_app.planning.service import Engine, pace
from serve_app.planning.slots import Slot
from serve_app.planning.times import Times
from serve_app.pool.lifecycle import Event, State


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    Attributes:
        models: id -> what clients may call it; a slot holds those that it is given.
        hard: requests that a slot may be given at once.
        existing: slots that the nodes which are there can hold; one beyond them waits `node_lead_s` for a node first.
        routers: proxies that requests come through, in turn.
    """

    models: Mapping[str, tuple[str, ...]]
    live: LiveSettings
    times: Times
    hard: int
    existing: int
    node_lead_s: float = 0.0
    routers: int = 1


@dataclass(frozen=True)
class Level:
    """How many slots are in which state from `at_s` on."""

    at_s: float
    slots: Mapping[State, int]


@dataclass
class Fleet:
    """Attributes: slot_s: seconds of all slots so far, from when they are asked for, nodes on their way included."""

    loop: Loop
    setup: Setup
    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])
    levels: list[Level] = field(default_factory=list[Level])
    slot_s: float = 0.0
    made: int = 0
    starts: int = 0
    _paid_s: float = 0.0

    def __post_init__(self) -> None:
        self._pace = pace(self.setup.times.token_s, self.setup.hard)

    def add(self, models: tuple[str, ...], duration_s: float) -> Slot:
        """A new slot that will have started after `duration_s`, or later if it needs a node first."""
        self._pay()
        live, times = self.setup.live, self.setup.times
        lead_s = self.setup.node_lead_s if len(self.slots) >= self.setup.existing else 0.0
        slot = Slot(
            f"s{self.made:05d}", models, {m: live.model(m).tier for m in models}, self.setup.hard, self.loop.now
        )
        self.made += 1
        assert times.prefill_token_s is not None  # `plan` and `scale` have looked for what is missing
        slot.engine = Engine(self._pace, times.prefill_token_s, times.prefill_request_s)
        slot.begin(Event.STARTED, self.loop.now, lead_s + duration_s)
        self.slots[slot.name] = slot
        return slot

    def remove(self, slot: Slot) -> None:
        self._pay()
        slot.alive = False
        self.slots.pop(slot.name, None)
        self.note()

    def note(self) -> None:
        """Write down how many slots are in which state, if that has changed."""
        counts = Counter(slot.state for slot in self.slots.values())
        if not self.levels or self.levels[-1].slots != counts:
            self.levels.append(Level(self.loop.now, counts))

    def closed(self) -> float:
        """Seconds of all slots until now."""
        self._pay()
        return self.slot_s

    def _pay(self) -> None:
        self.slot_s += (self.loop.now - self._paid_s) * len(self.slots)
        self._paid_s = self.loop.now
