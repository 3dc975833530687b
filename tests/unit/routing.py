"""The router as Serve makes it in a proxy, between replicas and coordinators that are values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.request_router import RequestRouter

from serve_app.pool import naming, proxy
from serve_app.pool.messages import NeedReport, RoleMap, Version
from serve_app.pool.router import PoolRouter

SLOTS = DeploymentID("Slot", "default")


class Coordinator:
    """Hands out role maps as they are published, and keeps what routers say."""

    def __init__(self) -> None:
        self.heard: list[NeedReport] = []
        self.map: RoleMap | None = None
        self._news = asyncio.Event()
        self.watch = SimpleNamespace(remote=self._watch)
        self.need = SimpleNamespace(remote=self.heard.append)

    def publish(self, role_map: RoleMap) -> None:
        self.map = role_map
        self._news.set()

    def _watch(self, seen: Version) -> Awaitable[RoleMap]:
        async def newer() -> RoleMap:
            while self.map is None or self.map.version <= seen:
                self._news.clear()
                await self._news.wait()
            return self.map

        return newer()


class Cluster:
    """The coordinators that are there, by name; those that are not can be followed all the same."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.coordinators: dict[str, Coordinator] = {}
        patch.setattr(naming, "coordinator", self._coordinator)
        patch.setattr(naming, "coordinator_names", lambda application: sorted(self.coordinators))
        patch.setattr(proxy, "routers", [])
        patch.setattr(RequestRouter, "update_replicas", lambda router, replicas: None)

    def coordinator(self, name: str = "c") -> Coordinator:
        return self.coordinators.setdefault(name, Coordinator())

    def router(self, slots: dict[str, str]) -> PoolRouter:
        """A new one that Serve gives these replicas: the name of each one's coordinator."""
        made = PoolRouter(SLOTS, DeploymentHandleSource.PROXY, "actor")
        made.update_replicas([_replica(slot, coordinator) for slot, coordinator in slots.items()])
        return made

    def _coordinator(self, name: str) -> Coordinator:
        if name not in self.coordinators:
            raise ValueError(f"no actor {name}")
        return self.coordinators[name]


def _replica(slot: str, coordinator: str) -> Any:
    return SimpleNamespace(
        replica_id=ReplicaID(slot, SLOTS), replica_metadata={"coordinator": coordinator}, max_ongoing_requests=10
    )


async def route(router: PoolRouter) -> str:
    """The slot that a request in this context gets."""
    request = PendingRequest(args=[], kwargs={}, metadata=RequestMetadata("1", "1"))
    replica = await router._choose_replica_for_request(request)
    return replica.replica_id.unique_id


async def soon(true: Callable[[], bool]) -> None:
    """Wait until something is true: routers repeat what they say several times a second."""
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not become true")
