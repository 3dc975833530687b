"""`Pool` hands the settings over again and again, whatever happens to coordinators and to its own replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.pool import control, naming
from serve_app.pool.control import PoolControl

APP = {"models": [{"id": "m", "engine": "simulated"}]}


class Call:
    def __init__(self, method: Any) -> None:
        self._method = method

    async def remote(self, *args: Any, **named: Any) -> Any:
        return self._method(*args, **named)


class Coordinator:
    """What `Pool` says to one, and asks it."""

    def __init__(self, *, frozen: bool = False) -> None:
        self.frozen, self.told = frozen, 0
        self.configure, self.status = Call(self._configure), Call(lambda ledger: {"frozen": self.frozen})

    def _configure(self, live: dict[str, Any], frozen: bool) -> None:
        self.frozen, self.told = frozen, self.told + 1


class Cluster(dict[str, Coordinator]):
    """Coordinators by name; `away`: Ray does not say which there are; `lost`: listed, but not to be reached."""

    away = False
    lost: str = ""

    def names(self, _: str) -> list[str]:
        if self.away:
            raise TimeoutError("no answer from the head node")
        return sorted(self)

    def find(self, name: str) -> Coordinator:
        if name == self.lost:
            raise ValueError(name)
        return self[name]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(naming, "coordinator_names", cluster.names)
    monkeypatch.setattr(naming, "coordinator", cluster.find)
    monkeypatch.setattr(control, "_app_name", lambda: "default")
    monkeypatch.setattr(control, "REPEAT_S", 0.01)
    return cluster


@pytest.fixture
async def pool(cluster: Cluster) -> AsyncIterator[PoolControl]:
    """A new replica."""
    yield PoolControl(APP)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_hand_over_goes_on_after_ray_did_not_answer(cluster: Cluster, pool: PoolControl) -> None:
    """A coordinator that comes with the head node's return gets the settings."""
    cluster["old"] = Coordinator()
    await pool.reconfigure({})
    cluster.away = True
    await asyncio.sleep(0.05)
    cluster.away, cluster["new"] = False, Coordinator()
    await asyncio.sleep(0.1)
    assert cluster["new"].told > 0


@pytest.mark.parametrize("lost", ["", "a", "b"])
async def test_new_replica_leaves_the_pool_as_frozen_as_it_is(cluster: Cluster, pool: PoolControl, lost: str) -> None:
    """In a rollout one coordinator may know of no freeze, or not be reached at first; then all are frozen."""
    cluster |= {"a": Coordinator(), "b": Coordinator(frozen=True)}
    cluster.lost = lost
    await pool.reconfigure({})
    await asyncio.sleep(0.05)
    assert cluster["b"].frozen
    cluster.lost = ""
    await asyncio.sleep(0.1)
    assert (cluster["a"].frozen, cluster["b"].frozen) == (True, True)
    await pool.freeze(False)
    assert (cluster["a"].frozen, cluster["b"].frozen) == (False, False)
    await asyncio.sleep(0.05)
    assert (cluster["a"].frozen, cluster["b"].frozen) == (False, False)


async def test_operators_word_counts_before_a_coordinator_has_been_asked(cluster: Cluster, pool: PoolControl) -> None:
    """Who unfreezes means it."""
    await pool.freeze(False)
    cluster["a"] = Coordinator(frozen=True)
    await pool.reconfigure({})
    assert not cluster["a"].frozen
