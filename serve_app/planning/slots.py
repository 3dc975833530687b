"""A simulated slot: what slot/deployment.py does with commands and requests, with measured durations.

It uses the real state machine. A request that reaches it while its gate is shut, or for another model than it serves,
breaks an invariant of the design, and the simulation with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from serve_app.config import Tier
from serve_app.errors import IllegalTransition
from serve_app.planning.requests import Request
from serve_app.planning.service import Engine
from serve_app.pool.lifecycle import GATE_OPEN, Event, Lifecycle, State
from serve_app.pool.messages import Command, EngineReport, SlotReport, Verb


class InvariantBroken(AssertionError):
    """The pool did what the design rules out."""


class Slot:
    """One slot with an engine for each of `models`, at most one of them awake.

    Attributes:
        ends_s: when the start, wake or sleep under way ends. stream_event: the number of the newest forecast of the
            next end of a stream; an older one is void.
        busy: requests inside the gate, those whose prompt is not done included.
    """

    def __init__(self, name: str, models: Sequence[str], tiers: Mapping[str, Tier], hard: int, now: float) -> None:
        self.name, self.models, self.hard = name, tuple(models), hard
        self.life = Lifecycle(name, now)
        self.tiers = dict(tiers)
        self.model = self.models[0] if self.models else ""
        self.awake = False
        self.op = (0, 0)
        self.seq = 0
        self.busy: set[Request] = set()
        self.may_shut = False
        self.ends_s = float("inf")
        self.task: Event | None = None
        self.stream_event = 0
        self.alive = True
        self.engine: Engine | None = None
        self._engines: tuple[EngineReport, ...] | None = None

    @property
    def state(self) -> State:
        return self.life.state

    def begin(self, task: Event, now: float, duration_s: float) -> None:
        self.task, self.ends_s = task, now + duration_s

    def task_ends(self, now: float) -> None:
        """The start, wake or sleep under way is over."""
        task, self.task, self.ends_s = self.task, None, float("inf")
        if task is None or not self.life.allows(task):
            raise InvariantBroken(f"{self.name}: {task} while {self.state}")
        self.life.apply(task, now)
        self.awake = task is Event.PROMOTED
        self._engines = None

    def take(self, command: Command, now: float, wake_s: Mapping[Tier, float], sleep_s: float) -> bool:
        """Obey a command once; True if it was new. What has become illegal meanwhile is refused, as a slot does."""
        order = (command.epoch, command.op)
        if order <= self.op:
            return False
        self.op = order
        with suppress(IllegalTransition):
            self._obey(command, now, wake_s, sleep_s)
        return True

    def _obey(self, command: Command, now: float, wake_s: Mapping[Tier, float], sleep_s: float) -> None:
        match command.verb:
            case Verb.PROMOTE:
                self.life.apply(Event.PROMOTE, now)
                self.model = command.model
                self.begin(Event.PROMOTED, now, wake_s[self.tiers[command.model]])
            case Verb.DRAIN:
                self.life.apply(Event.DRAIN, now)
                self.may_shut = False
            case Verb.KEEP:
                self.life.apply(Event.KEEP, now)
                self.may_shut = False
            case Verb.SHUT:
                self.may_shut = self.state is State.DRAINING
                self.shut_if_idle(now, sleep_s)
            case Verb.RETIER:
                self.life.apply(Event.RETIER, now)
                self.tiers = dict(command.tiers)
                self.begin(Event.ASLEEP, now, sleep_s)
            case Verb.RETIRE:
                self.life.apply(Event.RETIRE, now)

    def shut_if_idle(self, now: float, sleep_s: float) -> bool:
        if not self.may_shut or self.state is not State.DRAINING or self.busy:
            return False
        self.may_shut = False
        self.life.apply(Event.SHUT, now)
        self.begin(Event.ASLEEP, now, sleep_s)
        return True

    def enter(self, request: Request) -> None:
        if self.life.state not in GATE_OPEN or request.model != self.model:
            raise InvariantBroken(f"{self.name} is {self.state} for {self.model}, got a request for {request.model}")
        if len(self.busy) >= self.hard:
            raise InvariantBroken(f"{self.name} got more than {self.hard} requests")
        self.busy.add(request)

    def report(self) -> SlotReport:
        self.seq += 1
        if self._engines is None:
            self._engines = tuple(EngineReport(model, self._tier(model)) for model in self.models)
        return SlotReport(
            slot=self.name,
            seq=self.seq,
            state=self.life.state,
            since_s=self.life.since_s,
            model=self.model,
            hard=self.hard,
            op=self.op,
            in_flight=len(self.busy),
            engines=self._engines if self.life.state is not State.STARTING else (),
        )

    def _tier(self, model: str) -> Tier:
        return Tier.READY if self.awake and model == self.model else self.tiers[model]
