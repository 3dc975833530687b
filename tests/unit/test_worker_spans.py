"""Below which span of the slot a worker's stage is put, though it is told of later."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine import worker_spans
from serve_app.engine.worker_spans import WorkerSpans
from serve_app.telemetry.spans import OpenSpan
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord


class Slot:
    """Notes spans at times of its own, and says what the parent of each exported one was."""

    def __init__(self, patch: pytest.MonkeyPatch, nodes: int = 1) -> None:
        self.now, self.current = 0.0, ""
        self.parents: list[str] = []
        patch.setattr(worker_spans.time, "time", lambda: self.now)
        patch.setattr(worker_spans.spans, "current_traceparent", lambda: self.current)
        patch.setattr(worker_spans.spans, "open_span", self._open)
        self.spans = WorkerSpans(nodes)

    def begin(self, stage: Stage, at_s: float, span: str) -> None:
        self.now, self.current = at_s, span
        self.spans.note(stage)

    def export(self, *records: tuple[Stage, float]) -> list[str]:
        self.parents = []
        self.spans.export(StageRecord(stage, start_s, 0.1, rank=0) for stage, start_s in records)
        return self.parents

    def _open(self, _: str, attributes: dict[str, Any], *, parent: str, start_s: float) -> OpenSpan:
        assert attributes["rank"] == 0 and start_s
        self.parents.append(parent)
        return OpenSpan(None)


def test_what_ran_before_a_stage_of_the_slot_is_not_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the start are told of after the first sleep, which has copies of its own."""
    slot = Slot(monkeypatch)
    slot.begin(Stage.ENGINE_CORE, 10, "start")
    slot.begin(Stage.WEIGHTS_COPY, 30, "first wake")
    slot.begin(Stage.WEIGHTS_COPY, 40, "second wake")
    copies = [(Stage.WEIGHTS_COPY, at_s) for at_s in (15.0, 30.1, 40.2)]
    assert slot.export(*copies, (Stage.GRAPH_CAPTURE, 20.0)) == ["start", "first wake", "second wake", "start"]
    assert slot.export((Stage.WEIGHTS_COPY, 50.0)) == ["start"], "spans that are over stay"


def test_a_clock_of_another_node_may_be_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second; on one node there is one clock."""
    for nodes, parent in ((1, "start"), (2, "wake")):
        slot = Slot(monkeypatch, nodes)
        slot.begin(Stage.ENGINE_CORE, 10, "start")
        slot.begin(Stage.WAKE_KV, 30, "wake")
        assert slot.export((Stage.WAKE_KV, 29.5)) == [parent]
