"""The coordinator's metrics: what its book says now, as values (pure), and what has happened, counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from serve_app.config import Tier
from serve_app.pool import decide
from serve_app.pool.book import PoolBook
from serve_app.pool.capacity import Trouble
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Transition
from serve_app.pool.view import SlotView
from serve_app.telemetry import metrics
from serve_app.telemetry.metrics import Metric
from serve_app.telemetry.stages import Stage

LEAVING, LENT, FENCED = "leaving", "lent", "fenced"
# A promotion whose publishing has not been heard of for this long will not be completed (a restarted coordinator).
SETTLE_S = 10.0
_SERVING = (State.PROMOTING, State.ACTIVE, State.DRAINING)
_GPU_STATES = {State.ACTIVE: "active", State.STANDBY: "standby", State.STARTING: "starting"}
_GONE = (State.RETIRING, State.FAILED)
# Words of the reasons that `decide` gives for people, and what they are counted as.
_REASONS = {
    "held": "held",
    "late arrivals": "late",
    "min_active": "minimum",
    "in flight": "load",
    "least busy": "load",
    "operator": "operator",
}


class Sample(NamedTuple):
    """A gauge's value; labels without the application."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


def samples(book: PoolBook, gpus: float, pending: Mapping[str, float]) -> Iterator[Sample]:
    """Everything that is true now.

    Args:
        gpus: of one slot. pending: by reason, for how many seconds slots have had no place.
    """
    view = book.view()
    yield from _by_role(view.slots, list(book.models))
    yield Sample(metrics.SLOTS_WANTED, (), decide.wanted_slots(view, book.live))
    lent = {name for name, record in book.slots.items() if record.report.flex_in_flight}
    for state, count in _by_gpu_state(view.slots, lent).items():
        yield Sample(metrics.GPUS, (state,), count * gpus)
    for trouble in Trouble:
        yield Sample(metrics.SLOT_PENDING_SECONDS, (str(trouble),), pending.get(str(trouble), 0.0))
    yield Sample(metrics.GOLDEN_FAILED, (), book.golden_failed)
    yield Sample(metrics.BREAKER_OPEN, (), book.breaker_open)
    yield Sample(metrics.FROZEN, (), book.frozen)
    yield from _sleeping(book)
    yield from _unused(book)
    yield from _last_stages(book)


def reason_class(reason: str) -> str:
    """One of a few words for what a promotion was for: a reason in full would make a series of its own each time."""
    return next((kind for word, kind in _REASONS.items() if word in reason), "other")


def durations(done: Transition) -> dict[Stage, float]:
    """Seconds by stage, the whole among them; of several ranks the slowest, and repeated stages of one added up."""
    by_rank: dict[tuple[Stage, int], float] = {}
    for record in done.stages:
        by_rank[record.stage, record.rank] = by_rank.get((record.stage, record.rank), 0.0) + record.duration_s
    found: dict[Stage, float] = {}
    for (name, _), seconds in by_rank.items():
        found[name] = max(found.get(name, 0.0), seconds)
    return found | {Stage(done.kind): done.duration_s}


def _by_role(slots: Iterable[SlotView], models: list[str]) -> Iterator[Sample]:
    serving = [(str(state), model) for state in _SERVING for model in models]
    others = [(str(state), "") for state in State if state not in _SERVING]
    counts = Counter({labels: 0 for labels in [*serving, *others, (LEAVING, "")]})
    counts.update(_role(slot) for slot in slots)
    return (Sample(metrics.SLOTS, labels, count) for labels, count in counts.items())


def _role(slot: SlotView) -> tuple[str, str]:
    if slot.leaving:
        return LEAVING, ""
    return str(slot.state), slot.model if slot.state in _SERVING else ""


def _by_gpu_state(slots: Iterable[SlotView], lent: Set[str]) -> dict[str, int]:
    counts = Counter(dict.fromkeys([*_GPU_STATES.values(), LENT, FENCED, "changing", LEAVING], 0))
    counts.update(_gpu_state(slot, lent) for slot in slots)
    return dict(counts)


def _gpu_state(slot: SlotView, lent: Set[str]) -> str:
    if slot.leaving or slot.state in _GONE:
        return LEAVING
    if slot.state is State.STANDBY and slot.slot in lent:
        return LENT
    if slot.is_fenced:
        return FENCED
    return _GPU_STATES.get(slot.state, "changing")


def _sleeping(book: PoolBook) -> Iterator[Sample]:
    for name, record in book.slots.items():
        for engine in record.engines:
            if engine.tier in (Tier.HOST, Tier.DISK):
                yield Sample(metrics.SLEEPING_BYTES, (name, engine.model, "host"), engine.host_bytes)
                if engine.device_bytes:
                    yield Sample(metrics.SLEEPING_BYTES, (name, engine.model, "gpu"), max(engine.device_bytes))


def _unused(book: PoolBook) -> Iterator[Sample]:
    for name, record in book.slots.items():
        for engine in record.engines:
            if engine.unused:
                cached, fragmented = (max(of_ranks) for of_ranks in zip(*engine.unused, strict=True))
                yield Sample(metrics.UNUSED_BYTES, (name, engine.model, "cached"), cached)
                yield Sample(metrics.UNUSED_BYTES, (name, engine.model, "fragmented"), fragmented)


def _last_stages(book: PoolBook) -> Iterator[Sample]:
    """Not of demotions, for which nobody waits."""
    last = {
        (slot, transition.kind): transition
        for slot, transition in book.entries.ledger
        if slot in book.slots and transition.kind != Stage.DEMOTION
    }
    for (slot, kind), transition in last.items():
        for name, seconds in durations(transition).items():
            yield Sample(metrics.LAST_STAGE_SECONDS, (slot, book.slots[slot].report.node, str(name), kind), seconds)


class Happened:
    """Counts what the ledger and the meter have that they had not the last time.

    Args:
        since_s: wall clock; what ended before was counted by another coordinator.
    """

    def __init__(self, application: str, since_s: float) -> None:
        self._application, self._since_s = application, since_s
        self._seen: set[tuple[str, str, float]] = set()
        self._slot_s: dict[str, float] = {}

    def update(self, book: PoolBook, gpus: float, now_s: float) -> None:
        entries = {(slot, done.kind, _began(done)): done for slot, done in book.entries.ledger}
        settled = {key for key, done in entries.items() if _is_whole(done, now_s)}
        for key in settled - self._seen:
            if entries[key].start_s + entries[key].duration_s >= self._since_s:
                self._count(entries[key])
        self._seen = settled
        self._count_standby(book.meter.slot_s, gpus)

    def _count(self, done: Transition) -> None:
        here, outcome = self._application, "failed" if done.error else "ok"
        if done.kind == Stage.PROMOTION:
            metrics.PROMOTIONS.add(1, here, outcome, reason_class(done.reason), done.model)
            metrics.PROMOTION_SECONDS.observe(done.duration_s, here, done.model)
        elif done.kind == Stage.COLD_START:
            metrics.COLD_STARTS.add(1, here, outcome)
        for name, seconds in durations(done).items():
            metrics.STAGE_SECONDS.observe(seconds, here, str(name), done.kind)
        for record in done.stages:
            if record.stage is Stage.WEIGHTS_CACHE and "cached" in record.attributes:
                metrics.NODE_CACHE_LOADS.add(1, here, "hit" if record.attributes["cached"] else "miss")
                metrics.NODE_CACHE_READ.add(float(record.attributes.get("bytes", 0)), here)

    def _count_standby(self, slot_s: Mapping[str, float], gpus: float) -> None:
        for model, seconds in slot_s.items():
            more = seconds - self._slot_s.get(model, 0.0)
            metrics.STANDBY_SECONDS.add(more, self._application, model)
            metrics.STANDBY_GPU_SECONDS.add(more * gpus, self._application, model)
        self._slot_s = dict(slot_s)


def _began(done: Transition) -> float:
    """When the slot began it, which stays when the coordinator adds what happened around it."""
    return next((record.start_s for record in done.stages if record.stage == done.kind), done.start_s)


def _is_whole(done: Transition, now_s: float) -> bool:
    """Whether nothing will be added any more: a promotion's publishing comes after the slot's own part."""
    if done.kind != Stage.PROMOTION or done.error or any(record.stage is Stage.PUBLISH for record in done.stages):
        return True
    return now_s - (done.start_s + done.duration_s) > SETTLE_S
