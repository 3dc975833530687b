"""`Pool`: a tiny Serve deployment that owns the live settings and the operator's verbs. No request waits for it.

Its `user_config` changes without touching a slot; the slot deployment's own would take its slots out of every router
while they are being updated.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray

from serve_app.config import AppConfig
from serve_app.errors import Refused
from serve_app.live import parse_live
from serve_app.pool import naming
from serve_app.pool.lifecycle import State

log = logging.getLogger("ray.serve")

# A coordinator that has just been restarted gets the settings within this long.
REPEAT_S = 0.5


class PoolControl:
    """Serve calls `reconfigure` with the `user_config`; everything else is for `serve-app`."""

    def __init__(self, app: dict[str, Any]) -> None:
        self._app = AppConfig.model_validate(app)
        self._live: dict[str, Any] = {}
        self._frozen: bool | None = None  # this replica does not know; the one before it may have frozen the pool
        self._app_name = _app_name()
        self._repeating: asyncio.Task[None] | None = None

    async def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Take new live settings. Raises ConfigError, which Serve reports as the deployment's state."""
        self._live = parse_live(user_config, self._app).model_dump(mode="json")
        await self._hand_over()
        if self._repeating is None:
            self._repeating = asyncio.get_running_loop().create_task(self._repeat())

    async def settings(self) -> dict[str, Any]:
        """The live settings in force."""
        return self._live

    async def freeze(self, frozen: bool) -> str:
        """Stop (or resume) all automatic role changes; running ones end."""
        self._frozen = frozen
        await self._hand_over()
        return "frozen: no automatic promotion or demotion" if frozen else "unfrozen"

    async def operate(self, verb: str, slot: str | None, model: str = "") -> str:
        """Promote or drain one slot by hand; without a name, promote any standby that holds `model`. Raises Refused.

        Args:
            model: what to promote it for; empty: what it has served last.
        """
        others: list[str] = []
        for name in naming.coordinator_names(self._app_name):
            coordinator = naming.coordinator(name)
            slots = (await coordinator.status.remote())["slots"]
            chosen = _first_standby(slots, model) if slot is None else slot
            if chosen in [known["slot"] for known in slots]:  # two coordinators in a rollout: each has its own slots
                return await coordinator.operate.remote(verb, chosen, model)
            others += [f"{known['slot']} ({known['state']})" for known in slots]
        there_are = f"there are: {', '.join(others) or 'no slots'}"
        raise Refused(f"no slot is standby; {there_are}" if slot is None else f"no slot {slot}; {there_are}")

    async def status(self) -> list[dict[str, Any]]:
        """One entry per coordinator (two during a rollout)."""
        names = naming.coordinator_names(self._app_name)
        return [await naming.coordinator(name).status.remote() for name in names]

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            try:
                await self._hand_over()
            except Exception as error:  # Ray's head may be away for a while; new coordinators wait for us all the same
                log.warning("the settings cannot be handed over, trying again: %s", error)

    async def _hand_over(self) -> None:
        """To every coordinator; as long as we do not know whether the pool is frozen, each keeps what it has."""
        names, found = naming.coordinator_names(self._app_name), list[bool]()
        for name in names:
            try:
                coordinator = naming.coordinator(name)
                if self._frozen is None:
                    found.append((await coordinator.status.remote(ledger=False))["frozen"])
                frozen = found[-1] if self._frozen is None else self._frozen
                await coordinator.configure.remote(self._live, frozen)
            except (ValueError, ray.exceptions.RayError) as error:
                log.debug("coordinator %s is not there: %s", name, error)
        if self._frozen is None and names and len(found) == len(names):
            self._frozen = any(found)


def _app_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().app_name)


def _first_standby(slots: list[dict[str, Any]], model: str) -> str | None:
    standbys = [slot for slot in slots if slot["state"] == State.STANDBY and not slot["pending"]]
    holding = [slot for slot in standbys if not model or model in [engine["model"] for engine in slot["engines"]]]
    return next((slot["slot"] for slot in holding), None)
