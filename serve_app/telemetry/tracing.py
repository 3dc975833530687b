"""One context manager per stage: it makes the span and the ledger's record from one place."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_app.telemetry import spans
from serve_app.telemetry.spans import Attribute
from serve_app.telemetry.stages import Stage


@dataclass
class StageRecord:
    """One stage of a transition: a row of the ledger.

    Attributes:
        start_s: wall clock, seconds since the Unix epoch; duration_s: seconds.
        rank: -1 for the slot itself, else the rank of the worker it ran in.
        error: empty, or what went wrong. done: it has ended.
    """

    stage: Stage
    start_s: float
    duration_s: float = 0.0
    attributes: dict[str, Attribute] = field(default_factory=dict)
    rank: int = -1
    error: str = ""
    done: bool = False


# The list that stages of the current cold start, promotion or demotion are written to; None outside of one.
_records: contextvars.ContextVar[list[StageRecord] | None] = contextvars.ContextVar("stage_records", default=None)


@contextmanager
def recording() -> Iterator[list[StageRecord]]:
    """Collect the records of all stages inside, in order of their start."""
    records: list[StageRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


@contextmanager
def stage(
    name: Stage, *, start_s: float | None = None, parent: str = "", **attributes: Attribute
) -> Iterator[StageRecord]:
    """Run the body as stage `name`; attributes known only later go into the yielded record's `attributes`.

    Args:
        start_s: wall clock, for a stage that began before anyone could record it; None: now.
        parent: traceparent of a stage in another process that is the same one; then only the record is made here,
            and the stages inside become children of that span.
    """
    begin = time.time() if start_s is None else start_s
    record = StageRecord(name, begin, attributes=dict(attributes))
    _keep(record)
    with spans.remote_parent(parent) if parent else _span(record):
        try:
            yield record
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            record.duration_s = time.time() - begin
            record.done = True


def past(name: Stage, start_s: float, end_s: float, **attributes: Attribute) -> None:
    """Record a stage that is over already, between two wall-clock times."""
    _keep(StageRecord(name, start_s, max(0.0, end_s - start_s), dict(attributes), done=True))
    spans.open_span(name, attributes, start_s=start_s).end(end_s=max(start_s, end_s))


def keep(records: list[StageRecord]) -> None:
    """Add the records of another process, which exported their spans itself, to the current transition."""
    for record in records:
        _keep(record)


def _keep(record: StageRecord) -> None:
    records = _records.get()
    if records is not None:
        records.append(record)


@contextmanager
def _span(record: StageRecord) -> Iterator[None]:
    span = spans.open_span(record.stage, record.attributes, start_s=record.start_s)
    try:
        with spans.current(span):
            yield
    finally:
        span.end(record.attributes, record.error)
