"""The router in a proxy: whom it tells its need, and what it does before it knows the roles."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from ray.serve._private.common import ReplicaID

from serve_app.errors import UnknownModel
from serve_app.live import Hold
from serve_app.pool import api_keys, proxy
from serve_app.pool.back_pressure import PoolBackPressure
from serve_app.pool.dispatch import Dispatch, Ticket
from serve_app.pool.messages import ModelRole, RoleMap, Serving, Version
from serve_app.pool.router import LOOK_AGAIN_S, REPORT_S, PoolRouter

from .routing import SLOTS, Cluster, ask, route, soon

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    made = Cluster(monkeypatch)
    yield made
    for router in proxy.routers:
        router.stop()
    await asyncio.sleep(0.05)


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


def two_models(hold: Hold | None = None) -> RoleMap:
    """Slot a serves model red, which comes first, and b green, which has an adapter."""
    active = {"a": Serving("red", 10), "b": Serving("green", 10)}
    models = {"red": ModelRole(("red",)), "green": ModelRole(("green", "leaf"))}
    return RoleMap((1, 1), active, models, hold=hold or Hold())


@pytest.mark.parametrize("slots", [{}, {"a": "c", "b": "c"}])
async def test_requests_that_come_before_the_first_role_map_get_the_model_they_ask_for(
    cluster: Cluster, slots: dict[str, str]
) -> None:
    """A proxy that has just started does not know yet that there are several, nor perhaps that there is a slot."""
    router = cluster.router(slots)
    tasks = [asyncio.create_task(ask(router, name)) for name in ("red", "green", "leaf", "grey")]
    tasks.append(asyncio.create_task(ask(router, "")))
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    cluster.coordinator().publish(two_models())
    router.update_replicas(cluster.replicas({"a": "c", "b": "c"}))
    red, green, leaf, grey, unnamed = await asyncio.gather(*tasks, return_exceptions=True)
    assert (red, green, leaf, unnamed) == ("a", "b", "b", "a")
    assert isinstance(grey, UnknownModel)
    assert await ask(router, "leaf") == "b"


async def test_the_only_model_takes_every_name(cluster: Cluster) -> None:
    """Also one that the proxy has read before it knew that; its own server knows better what it has loaded."""
    router = cluster.router({"a": "c"})
    early = asyncio.create_task(ask(router, "loaded-later"))
    await asyncio.sleep(0.05)
    cluster.coordinator().publish(RoleMap((1, 1), {"a": Serving("m", 10)}, {"m": ModelRole(("m",))}))
    assert await early == "a"
    assert await ask(router, "loaded-later") == "a"


async def test_a_request_that_nobody_has_read_is_not_given_to_any_model(cluster: Cluster) -> None:
    """It had passed the middleware before Serve made the router; its client is told to come back."""
    early = asyncio.create_task(ask(None, "green", lambda: router))
    await asyncio.sleep(0)
    router = cluster.router({"a": "c", "b": "c"})
    cluster.coordinator().publish(two_models())
    with pytest.raises(PoolBackPressure) as refused:
        await early
    assert refused.value.retry_after_s == 1.0


async def test_those_that_wait_for_the_first_role_map_are_bounded_in_time(cluster: Cluster) -> None:
    router = cluster.router({"a": "c"})
    proxy.client_timeout_s.set(0.05)
    with pytest.raises(PoolBackPressure, match="no active slot had room in time"):
        await route(router)


async def test_where_nobody_asks_for_api_keys_nobody_is_let_in(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in the environment of a Serve that was started without our middleware: it must not be an open door."""
    router = cluster.router({"a": "c"})
    cluster.coordinator().publish(RoleMap((1, 1), {"a": Serving("m", 10)}, {"m": ModelRole(("m",))}))
    await asyncio.sleep(0.05)
    assert await route(router) == "a"
    monkeypatch.setenv("SERVE_APP_API_KEYS", "secret")
    with pytest.raises(PoolBackPressure, match="without serve_app's middleware"):
        await route(router)
    assert await ask(router, "m") == "a"


async def test_replicas_without_a_pool_take_whatever_comes(cluster: Cluster) -> None:
    """`pool: off` in an application that had one; there will be no role map."""
    early = asyncio.create_task(ask(cluster.router({}), "any"))
    await asyncio.sleep(0.05)
    proxy.routers[0].update_replicas(cluster.replicas({"a": ""}))
    assert await early == "a"


async def test_a_router_whose_place_another_one_has_taken_ends(cluster: Cluster) -> None:
    """Serve drops it without a word when an application is deleted and deployed again; it says no need any more."""
    coordinator = cluster.coordinator()
    coordinator.publish(asleep((1, 1)))
    old = cluster.router({"a": "c"})
    await soon(lambda: bool(coordinator.heard))
    [name] = {report.router for report in coordinator.heard}
    old.update_replicas([])
    forgotten = weakref.ref(old)
    cluster.router({"b": "c"})
    del old
    await asyncio.sleep(0.05)
    coordinator.heard.clear()
    await asyncio.sleep(3 * REPORT_S)
    gc.collect()
    assert coordinator.heard and name not in {report.router for report in coordinator.heard}
    assert forgotten() is None


async def test_a_router_whose_place_another_one_has_taken_first_serves_those_it_holds(cluster: Cluster) -> None:
    coordinator = cluster.coordinator()
    coordinator.publish(asleep((1, 1)))
    held = asyncio.create_task(route(cluster.router({"a": "c"})))
    await soon(lambda: any(report.needs for report in coordinator.heard))
    cluster.router({"a": "c"})
    await asyncio.sleep(2 * REPORT_S)
    coordinator.publish(RoleMap((1, 2), {"a": Serving("m", 10)}, {"m": ModelRole(("m",))}))
    assert await held == "a"


@pytest_asyncio.fixture
async def one_slot(cluster: Cluster) -> PoolRouter:
    """It takes one request at a time; of those that are held there may be 100."""
    models = {"m": ModelRole(("m",))}
    cluster.coordinator().publish(RoleMap((1, 1), {"a": Serving("m", 1)}, models, hold=Hold(max_held_requests=100)))
    return cluster.router({"a": "c"})


async def test_room_that_nobody_speaks_of_is_found(one_slot: PoolRouter) -> None:
    """What another proxy had in the slot is only ever heard of when it is asked; after a moment it is asked again."""
    await soon(lambda: one_slot.ready)
    one_slot.on_new_queue_len_info(ReplicaID("a", SLOTS), 1)
    held = asyncio.create_task(route(one_slot))
    await asyncio.sleep(0.05)
    assert not held.done()
    async with asyncio.timeout(2):
        assert await held == "a"


async def test_however_many_are_held_the_queue_is_looked_at_equally_often(
    one_slot: PoolRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them looking for all of them would take a core for a few hundred."""
    await soon(lambda: one_slot.ready)
    looks: list[float] = []
    release = Dispatch.release

    def counted(dispatch: Dispatch, now: float) -> list[Ticket]:
        looks.append(now)
        return release(dispatch, now)

    assert await route(one_slot) == "a"
    held = [asyncio.create_task(route(one_slot)) for _ in range(100)]
    await asyncio.sleep(0.05)
    monkeypatch.setattr(Dispatch, "release", counted)
    await asyncio.sleep(5 * LOOK_AGAIN_S)
    assert 1 <= len(looks) <= 6
    for task in held:
        task.cancel()


async def test_whoever_loses_its_place_to_another_key_is_told_soon(one_slot: PoolRouter) -> None:
    """Not only at its deadline."""
    await soon(lambda: one_slot.ready)
    api_keys.tenant.set("greedy")
    assert await route(one_slot) == "a"
    greedy = [asyncio.create_task(route(one_slot)) for _ in range(100)]
    await asyncio.sleep(0.05)
    api_keys.tenant.set("modest")
    modest = asyncio.create_task(route(one_slot))
    async with asyncio.timeout(2):
        with pytest.raises(PoolBackPressure, match="others hold fewer"):
            await greedy[-1]
    assert not modest.done() and not any(task.done() for task in greedy[:-1])
    for task in (*greedy, modest):
        task.cancel()


async def test_a_held_request_ends_at_its_deadline(one_slot: PoolRouter) -> None:
    await soon(lambda: one_slot.ready)
    assert await route(one_slot) == "a"
    proxy.client_timeout_s.set(0.2)
    with pytest.raises(PoolBackPressure, match="in time"):
        await route(one_slot)
