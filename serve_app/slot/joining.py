"""The last step of a slot's start: to take over, where it is needed, before Serve counts it as running.

As soon as a new version's slot runs, Serve stops the next old one. A slot that had yet to wake up by then would leave
nobody to serve; so it wakes up first.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from serve_app.errors import EngineError
from serve_app.pool.lifecycle import Lifecycle, State

# A coordinator that does not say in this time whether the slot is needed keeps it from nothing.
PATIENCE_S = 30.0
_POLL_S = 0.05


class Asked(Protocol):
    """Who knows whether the slot is needed; None: nobody can tell yet."""

    async def is_needed(self) -> bool | None: ...


async def join(life: Lifecycle, link: Asked, patience_s: float = PATIENCE_S) -> None:
    """Return once the slot is active, or as a standby that is not needed now.

    Raises:
        EngineError: its first promotion failed.
    """
    deadline = asyncio.get_running_loop().time() + patience_s
    while life.state in (State.STANDBY, State.PROMOTING):
        needed = await link.is_needed() if life.state is State.STANDBY else True
        late = asyncio.get_running_loop().time() > deadline
        if needed is False or (life.state is State.STANDBY and late):
            return
        await asyncio.sleep(_POLL_S)
    if life.state is State.FAILED:
        raise EngineError(f"slot {life.slot} could not be promoted; history: {life.history()}")
