"""Which slots are going or cut off, though nobody says so. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from serve_app.pool.records import SlotRecord

# A slot that all routers have lost from their lists for this long is being removed by Serve.
ABSENT_S = 1.0
# A slot that has been silent for this long while others spoke is cut off, though Ray believes in its node for another
# minute. Not less: a slot that compiles or reads weights may keep its heartbeat from running for seconds.
SILENT_S = 10.0


def notice_vanished(slots: Mapping[str, SlotRecord], lists: Sequence[Collection[str]], now: float) -> None:
    """Serve removes a slot without telling it; routers see it go. An empty list is a controller that restarts.

    Args:
        lists: what each router has been told of, without those that have been told of nothing.
    """
    seen = frozenset[str]().union(*lists)
    for name, record in slots.items():
        present = name in seen
        record.listed = record.listed or present
        if present or not lists or not record.listed:
            record.absent_since_s = None
            record.set_leaving(record.leaving and not present)
            continue
        record.absent_since_s = now if record.absent_since_s is None else record.absent_since_s
        record.set_leaving(now - record.absent_since_s >= ABSENT_S)


def notice_silent(slots: Iterable[SlotRecord]) -> None:
    """Nobody is routed to a slot that is cut off. Compared with the others: we may have been the late one."""
    records = list(slots)
    newest = max((record.heard_s for record in records), default=0.0)
    for record in records:
        record.set_silent(newest - record.heard_s > SILENT_S)
