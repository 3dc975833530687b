"""`PoolPolicy`: Serve's autoscaling policy. It repeats what the coordinators say and never blocks or raises.

Serve creates it once in the controller and calls it at every control-loop tick; an exception here would wedge the
whole control plane, and a wait would slow every other application.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from serve_app.pool import naming
from serve_app.pool.messages import PoolTarget

log = logging.getLogger("ray.serve")

# How often the coordinators are looked up and asked; the answer of the last round is used meanwhile.
ASK_S = 0.5


class PoolPolicy:
    """Target count of slots: the sum over coordinators; the current target while any of them is blind or silent."""

    def __init__(self) -> None:
        self._asked: list[ray.ObjectRef[PoolTarget]] = []
        self._asked_at = 0.0
        self._target: int | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        try:
            self._collect()
            self._ask(context.app_name, context.target_num_replicas)
        except Exception as error:
            log.warning("pool policy keeps the current target: %s", error)
            self._asked, self._target = [], None
        target = self._target if self._target is not None else context.target_num_replicas
        return max(1, target), context.policy_state or {}

    def _collect(self) -> None:
        if not self._asked or len(ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[0]) < len(self._asked):
            return
        refs, self._asked = self._asked, []
        answers = [ray.get(ref) for ref in refs]
        # A blind coordinator knows nothing yet, and two of them mean a rollout: never shrink or grow then.
        self._target = answers[0].slots if len(answers) == 1 and not answers[0].blind else None

    def _ask(self, app_name: str, current: int) -> None:
        if self._asked or time.monotonic() - self._asked_at < ASK_S:
            return
        self._asked_at = time.monotonic()
        self._asked = [naming.coordinator(name).target.remote(current) for name in naming.coordinator_names(app_name)]
        if not self._asked:
            self._target = None
