"""The router in a proxy: whom it tells its need, and what it does before it knows the roles."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.pool.messages import ModelRole, RoleMap, Version

from .routing import Cluster, route, soon

pytestmark = pytest.mark.asyncio


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def asleep(version: Version, usable: int = 1) -> RoleMap:
    """Nobody is active for model m, and so many standbys can be."""
    return RoleMap(version, {}, {"m": ModelRole(("m",), usable)})


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
async def test_a_dead_coordinator_keeps_no_need_from_another_one(cluster: Cluster, order: tuple[str, str]) -> None:
    """In a rollout Serve does not recreate the old version's, whose last word was that it had a standby."""
    old, new = cluster.coordinator("old"), cluster.coordinator("new")
    old.publish(asleep((1, 1)))
    new.publish(asleep((2, 1), usable=0))
    router = cluster.router({"a": order[0], "b": order[1]})
    held = asyncio.create_task(route(router))
    await soon(lambda: bool(old.heard) and set(old.heard[-1].needs) == {"m"})
    assert new.heard and not new.heard[-1].needs
    del cluster.coordinators["old"]
    await soon(lambda: set(new.heard[-1].needs) == {"m"})
    held.cancel()
