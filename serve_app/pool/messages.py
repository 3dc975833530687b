"""What slots, routers, the coordinator and the policy tell each other. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from serve_app.config import Tier
from serve_app.engine.base import EngineLoad, Fingerprint, Unused
from serve_app.live import Hold, Verify
from serve_app.pool.lifecycle import State
from serve_app.telemetry.tracing import StageRecord

# (coordinator epoch, n): later is greater, also across a coordinator's restart.
Version = tuple[int, int]


class Verb(StrEnum):
    """What a coordinator can tell a slot."""

    PROMOTE = "promote"
    DRAIN = "drain"
    KEEP = "keep"
    SHUT = "shut"
    """Permission to shut the gate as soon as nothing is in flight: all routers have seen the drain."""
    RETIER = "retier"
    RETIRE = "retire"


@dataclass(frozen=True)
class Command:
    """One order to one slot. `op` grows with every command of a coordinator; slots repeat idempotently.

    Attributes:
        model: which one to become active for (`promote`), or for which one the slot is taken over (`drain`).
        tiers: how warm each model's engine is kept while it does not serve.
    """

    epoch: int
    op: int
    verb: Verb
    model: str = ""
    tiers: Mapping[str, Tier] = field(default_factory=dict[str, Tier])
    verify: Verify = Verify.ENFORCE
    tolerance: float = 0.2
    wake_s: float = 60
    verify_s: float = 30
    sleep_s: float = 60
    drain_s: float = 600
    reason: str = ""
    traceparent: str = ""
    """The span that the coordinator opened for what this command begins; empty without tracing."""


@dataclass(frozen=True)
class Transition:
    """One finished cold start, promotion or demotion with its stages: a row group of the ledger."""

    kind: str
    start_s: float
    duration_s: float
    model: str = ""
    reason: str = ""
    error: str = ""
    stages: tuple[StageRecord, ...] = ()

    def is_same(self, other: Transition) -> bool:
        """Whether both tell of one event; what was added around it later may differ."""
        mine, theirs = self.start_s + self.duration_s, other.start_s + other.duration_s
        overlap = min(mine, theirs) - max(self.start_s, other.start_s)
        # Sums of wall-clock times are exact to microseconds only, so what lies inside the other one does so nearly.
        inside = overlap >= 0.99 * min(self.duration_s, other.duration_s) > 0
        return self == other or (self.kind == other.kind and inside)


@dataclass(frozen=True)
class EngineReport:
    """One of a slot's engines.

    Attributes:
        tier: how warm it is now, `ready` while it is awake; None before it has started, and once it has ended.
        host_bytes, device_bytes, pids, unused: see `engine.base.EngineMemory`.
        wake_s: what it took to wake up last, from the tier it sleeps at; 0 before that.
        error: why this slot cannot serve this model any more.
        lent: its engine has the weights of another model now, with which it shares it; then memory is counted there.
    """

    model: str
    tier: Tier | None
    host_bytes: int = 0
    device_bytes: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    wake_s: float = 0.0
    error: str = ""
    lent: bool = False
    unused: tuple[Unused, ...] = ()


@dataclass(frozen=True)
class SlotReport:
    """What a slot says of itself, several times a second and at every change.

    Attributes:
        seq: grows with every report of this process; an older one than the last seen is dropped.
        op: (epoch, number) of the last command taken or refused.
        model: which one it serves, becomes active for, or has served last.
        in_flight: requests inside the gate; at_gate: requests that wait outside it, most of them for `gate_model`.
        flex_hard: requests of `service_tier: flex` that it takes while it is an awake standby, as settings have it;
            flex_model: whose it takes now, empty if it takes none; flex_in_flight: those inside, not in `in_flight`.
        load: of the engine that is awake.
        lag_s: how late the slot's event loop runs; a busy slot is not a dead one.
        hard: requests it may be given at once. actor: the name of its Ray actor.
        fenced: who holds the GPUs that Ray gave to it, as long as it waits for them before its engine can start.
        gpus: their UUIDs; empty on CPU and where only its workers, on several nodes, know theirs.
        ranks: the node of each rank, in rank order: where it will run until the engine has started, then where it does.
        engines: one for each model that it holds, in the order of the configuration.
        transitions: those finished since the last report that arrived.
    """

    slot: str
    seq: int
    state: State
    since_s: float
    model: str
    hard: int
    op: tuple[int, int] = (0, 0)
    in_flight: int = 0
    at_gate: int = 0
    gate_model: str = ""
    flex_hard: int = 0
    flex_model: str = ""
    flex_in_flight: int = 0
    load: EngineLoad = EngineLoad()
    lag_s: float = 0.0
    stage: str = ""
    error: str = ""
    golden_failed: bool = False
    actor: str = ""
    pid: int = 0
    node: str = ""
    ranks: tuple[str, ...] = ()
    engines: tuple[EngineReport, ...] = ()
    history: str = ""
    transitions: tuple[Transition, ...] = ()
    fenced: str = ""
    gpus: tuple[str, ...] = ()


class Wish(NamedTuple):
    """Since when Serve has wanted a slot, and what it waited for before it was placed.

    Attributes:
        since_s: wall clock; 0: not known.
        waited_for: `node`: no node could hold it; `resources`: others held what it needs; empty: it fitted at once.
    """

    since_s: float = 0.0
    waited_for: str = ""


@dataclass(frozen=True)
class Welcome:
    """What a starting slot needs to know to finish an engine: the verified fingerprint, and how strict to be."""

    anchor: Fingerprint
    verify: Verify
    tolerance: float
    tier: Tier


class Serving(NamedTuple):
    """What a slot that may be routed to does: the model it serves, and how many requests it may be given at once."""

    model: str
    hard: int


@dataclass(frozen=True)
class ModelRole:
    """What routers need to know of one model.

    Attributes:
        names: what clients may call it.
        usable: standbys that could become active for it, and slots that are about to; need goes where there are some,
            and stays there while it is being answered.
        takeable: active slots of other models that it may be given, or is about to be; the second choice, as they must
            drain first.
        on_demand: no slot need be active (`min_active: 0`): the first request wakes a standby.
    """

    names: tuple[str, ...] = ()
    usable: int = 0
    takeable: int = 0
    on_demand: bool = False


@dataclass(frozen=True)
class RoleMap:
    """Which slots may be routed to, for routers. A slot that is not in `active` takes nothing new.

    Attributes:
        active: by slot.
        models: by id, in the order of the configuration.
        stages: state and stage of slots that are not active, for /health/ready.
        traces: active slot -> traceparent of its last promotion, for held requests to link to.
        retry_after_s: when a request that could not be held should come back.
        flex: standbys that serve requests of `service_tier: flex`, by slot; None where that means nothing.
    """

    version: Version = (0, 0)
    active: dict[str, Serving] = field(default_factory=dict[str, Serving])
    models: dict[str, ModelRole] = field(default_factory=dict[str, ModelRole])
    stages: dict[str, str] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    hold: Hold = field(default_factory=Hold)
    retry_after_s: float = 5.0
    flex: dict[str, Serving] | None = None


@dataclass(frozen=True)
class ModelNeed:
    """What a router holds for one model.

    Attributes:
        waiting: requests. oldest_at_s: when the oldest arrived, wall clock of the router's node.
        traces: traceparents of some of them, for the promotion to link to.
    """

    waiting: int
    oldest_at_s: float = 0.0
    traces: tuple[str, ...] = ()


@dataclass(frozen=True)
class NeedReport:
    """A router's need, as a level.

    Attributes:
        router: who says it; seq: grows, an older one than the last seen is dropped.
        needs: by model id, or by what the client called it while the router knows no models; "" for no model named.
        seen: the newest version of the role map it has acted on.
        slots: the replicas that Serve has told it of; died: those whose actor it found dead.
    """

    router: str
    seq: int
    needs: Mapping[str, ModelNeed]
    seen: Version
    slots: frozenset[str] = frozenset()
    died: frozenset[str] = frozenset()

    @property
    def waiting(self) -> int:
        """Requests it holds, for all models."""
        return sum(need.waiting for need in self.needs.values())


@dataclass(frozen=True)
class PoolTarget:
    """What the coordinator tells the autoscaling policy: how many slots of its own there should be."""

    slots: int
    blind: bool
