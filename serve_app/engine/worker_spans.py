"""Spans of what the workers did, below those of the slot's stages in which they did it.

The slot exports them (see `staged.py`), some time after they ended: by then the same stage may have run again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from serve_app.telemetry import spans
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord

# By how much the clocks of nodes may differ, in seconds.
_CLOCKS_S = 1.0


class _Begun(NamedTuple):
    at_s: float  # wall clock
    traceparent: str


class WorkerSpans:
    """Args: nodes: how many the workers run on."""

    def __init__(self, nodes: int) -> None:
        self._slack_s = _CLOCKS_S if nodes > 1 else 0.0
        self._begun: dict[Stage, list[_Begun]] = {}  # since the last export

    def note(self, stage: Stage) -> None:
        """The current span is where the workers' part of this stage belongs."""
        self._begun.setdefault(stage, []).append(_Begun(time.time(), spans.current_traceparent()))

    def export(self, records: Iterable[StageRecord]) -> None:
        """One span for each."""
        for record in records:
            span = spans.open_span(
                record.stage,
                record.attributes | {"rank": record.rank},
                parent=self._parent(record),
                start_s=record.start_s,
            )
            span.end(end_s=record.start_s + record.duration_s)
        self._begun = {Stage.ENGINE_CORE: self._begun.get(Stage.ENGINE_CORE, [])}

    def _parent(self, record: StageRecord) -> str:
        """The last span of its stage that had begun by then; the engine's start, if none had."""
        latest_s = record.start_s + self._slack_s
        fitting = [span for span in self._begun.get(record.stage, []) if span.at_s <= latest_s]
        fitting = fitting or self._begun.get(Stage.ENGINE_CORE, [])
        return fitting[-1].traceparent if fitting else ""
