"""The router as Serve makes it in a proxy, between replicas and coordinators that are values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

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
        made.update_replicas(self.replicas(slots))
        return made

    def replicas(self, slots: dict[str, str]) -> list[Any]:
        return [_replica(slot, coordinator) for slot, coordinator in slots.items()]

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


async def ask(router: PoolRouter | None, model: str, later: Callable[[], PoolRouter] | None = None) -> str:
    """The slot that an HTTP request for a model gets, through what every proxy does with it.

    Args:
        later: which router it finds, if that is made only after the request has come.
    """
    slots: list[str] = []

    async def routed(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.02 if later else 0)
        slots.append(await route(later() if later else cast("PoolRouter", router)))

    body = json.dumps({"model": model} if model else {}).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(f"nothing is answered here: {message}")

    await proxy.PoolMiddleware(routed)(scope, receive, send)
    return slots[0]


async def soon(true: Callable[[], bool]) -> None:
    """Wait until something is true: routers repeat what they say several times a second."""
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not become true")
