"""A slot's cold starts, promotions and demotions, recorded stage by stage and kept until the coordinator has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve_app.pool.messages import Transition
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord, recording, stage

# Transitions kept: for a coordinator that cannot be reached now, and for one that has just been restarted.
KEPT = 16


class Transitions:
    """One at a time; written on the slot's loop, read on the link's thread: attributes are replaced, never changed.

    Args:
        on_end: called when a transition has ended, whether it failed or not.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.unsent: tuple[Transition, ...] = ()
        self._kept: tuple[Transition, ...] = ()
        self._running: list[StageRecord] = []
        self._on_end = on_end

    @contextmanager
    def run(
        self, kind: Stage, model: str = "", reason: str = "", *, start_s: float | None = None, parent: str = ""
    ) -> Iterator[None]:
        """Record the body as a transition.

        Args:
            model: which one it is about; a cold start is about all that the slot holds.
            start_s: wall clock, if it began before; parent: traceparent of the span that another process opened for it.
        """
        begin, error = time.time() if start_s is None else start_s, ""
        try:
            with recording() as records:
                self._running = records
                with stage(kind, start_s=begin, parent=parent, model=model, reason=reason):
                    yield
        except BaseException as failure:
            error = str(failure) or type(failure).__name__
            raise
        finally:
            done = Transition(str(kind), begin, time.time() - begin, model, reason, error, tuple(self._running))
            self.unsent = (*self.unsent, done)[-KEPT:]
            self._kept = (*self._kept, done)[-KEPT:]
            self._running = []
            self._on_end()

    @property
    def current_stage(self) -> str:
        """The innermost stage that runs now; empty between transitions."""
        running = [record.stage for record in list(self._running) if not record.done]
        return str(running[-1]) if running else ""

    def acknowledge(self, transitions: tuple[Transition, ...]) -> None:
        """The coordinator has these."""
        self.unsent = tuple(transition for transition in self.unsent if transition not in transitions)

    def repeat(self) -> None:
        """Another coordinator knows none of them: send what is kept again."""
        self.unsent = self._kept
