"""Ranks of a simulated engine whose slot spans nodes: one tiny Ray actor each, placed as vLLM's Ray executor does it.

So what such a slot reports is where processes really run, and a rank can die by itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.errors import EngineError
from serve_app.gpu import placed
from serve_app.gpu.placement import RankPlace


class SimulatedRanks:
    """Made empty; all methods but `check` are for the event loop."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._running: list[Any] = []

    async def start(self) -> tuple[str, ...]:
        """Start one actor for each bundle of this slot's placement group; returns their nodes, in rank order."""
        places = await asyncio.to_thread(placed.own_rank_places)
        kind = ray.remote(num_cpus=0, num_gpus=1)(_rank_class())
        self._actors = [kind.options(scheduling_strategy=_in_bundle(place)).remote() for place in places]
        self._running = [actor.run.remote() for actor in self._actors]
        return tuple(await asyncio.gather(*(actor.node.remote() for actor in self._actors)))

    def check(self) -> None:
        """Raise EngineError if one of them has died."""
        ended = ray.wait(self._running, timeout=0, fetch_local=False)[0] if self._running else []
        if ended:
            raise EngineError(f"simulated rank {self._running.index(ended[0])} died")

    def stop(self) -> None:
        actors, self._actors, self._running = self._actors, [], []
        for actor in actors:
            ray.kill(actor)


def _in_bundle(place: RankPlace) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placed.own_group(), placement_group_bundle_index=place.bundle)


def _rank_class() -> type:
    """Defined inside a function, so that Ray ships its code: importing this package costs each process a second."""

    class Rank:
        async def run(self) -> None:
            """Ends when the process does."""
            import asyncio

            await asyncio.Event().wait()

        async def node(self) -> str:
            import ray

            return str(ray.get_runtime_context().get_node_id())

    return Rank
