"""Promotions under way, each as one trace: from the need to the moment when every router knows.

The coordinator opens the span, the slot's stages become its children, and `promotion.publish` ends it. The same times
complete the ledger's entry, which the slot can only fill for its own part.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from serve_app.pool.book import PoolBook
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Command, ModelNeed, Transition, Verb, Version
from serve_app.pool.view import SlotView
from serve_app.telemetry import spans
from serve_app.telemetry.spans import OpenSpan
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord


@dataclass
class _Promotion:
    """Wall-clock times in seconds since the Unix epoch."""

    span: OpenSpan
    model: str
    needed_s: float
    decided_s: float
    active_s: float = 0.0
    published: Version = (0, 0)
    linked: set[str] = field(default_factory=set)

    def link(self, traces: Iterable[str]) -> None:
        """Point at requests that wait, each once."""
        for trace in sorted(set(traces) - self.linked):
            self.span.link(trace)
            self.linked.add(trace)

    def seen_from_outside(self, end_s: float) -> Transition:
        """The whole promotion, with the stages that the slot knows nothing of."""
        decide = StageRecord(Stage.DECIDE, self.needed_s, self.decided_s - self.needed_s, done=True)
        publish = StageRecord(Stage.PUBLISH, self.active_s, end_s - self.active_s, done=True)
        whole_s = end_s - self.needed_s
        return Transition(str(Stage.PROMOTION), self.needed_s, whole_s, self.model, stages=(decide, publish))


class Promotions:
    """Follows the promotions of one coordinator."""

    def __init__(self) -> None:
        self._running: dict[str, _Promotion] = {}

    def open(self, book: PoolBook, slot: str, command: Command) -> Command:
        """Called for each new command; a promotion's gets the trace that the slot continues."""
        if command.verb is not Verb.PROMOTE:
            return command
        decided_s = time.time()
        # Not by how long they said they had waited: the way from the router to here is part of the decision's time.
        oldest = [need.oldest_at_s for need in _needs(book, command.model) if need.oldest_at_s]
        needed_s = min([decided_s, *oldest])
        attributes: dict[str, spans.Attribute] = {
            "slot": slot,
            "model": command.model,
            "reason": command.reason,
            "tier": next((str(e.tier) for e in book.slots[slot].engines if e.model == command.model), ""),
            "hot": True,
            "standbys_before": sum(1 for seen in book.view().slots if seen.is_standby),
        }
        span = spans.open_span(Stage.PROMOTION, attributes, start_s=needed_s)
        decide = spans.open_span(Stage.DECIDE, {"slot": slot}, parent=span.traceparent, start_s=needed_s)
        decide.end(end_s=decided_s)
        self._running[slot] = _Promotion(span, command.model, needed_s, decided_s)
        return replace(command, traceparent=span.traceparent)

    def follow(self, book: PoolBook) -> None:
        """Called at every step: ends the promotions that all routers know of, and those that failed.

        Requests that began to wait after the decision (a promotion for load comes before anything is held) wait for
        it all the same.
        """
        for slot, promotion in list(self._running.items()):
            promotion.link(trace for need in _needs(book, promotion.model) for trace in need.traces)
            record, view = book.slots.get(slot), book.slot_view(slot)
            if record is None or view is None or not _on_its_way(view):
                error = record.report.error if record else "the slot died"
                promotion.span.end(error=error or "given up")
                del self._running[slot]
            elif slot in book.role_map.active:
                self._published(book, slot, promotion)

    def _published(self, book: PoolBook, slot: str, promotion: _Promotion) -> None:
        now = time.time()
        if not promotion.active_s:
            promotion.active_s, promotion.published = now, book.role_map.version
        if any(router.need.seen < promotion.published for router in book.routers.values()):
            return
        publish = spans.open_span(
            Stage.PUBLISH, {"slot": slot}, parent=promotion.span.traceparent, start_s=promotion.active_s
        )
        publish.end({"routers": len(book.routers)}, end_s=now)
        promotion.span.end(end_s=now)
        del self._running[slot]
        book.entries.complete(slot, promotion.seen_from_outside(now))


def _on_its_way(view: SlotView) -> bool:
    return view.is_active or view.is_coming or (view.state is State.STANDBY and view.pending is not None)


def _needs(book: PoolBook, model: str) -> list[ModelNeed]:
    """What routers hold for a model."""
    return [need for router in book.routers.values() for name, need in router.need.needs.items() if name in (model, "")]
