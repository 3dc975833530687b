"""The cold baseline: Ray Serve's autoscaler without a pool, in virtual time.

Its rule is requests (running and held) over `target_ongoing_requests`, rounded up. A new replica serves once it has
started from scratch. It goes again when it has been too many for Serve's downscale delay. Up, there is no delay but
`trigger_s`, as with Serve's fastest settings: with its defaults it would be slower still.
"""

from __future__ import annotations

import math

from serve_app.planning.fleet import Fleet
from serve_app.planning.loop import Loop
from serve_app.planning.slots import Slot
from serve_app.planning.traffic import Traffic
from serve_app.pool.lifecycle import Event, State
from serve_app.pool.messages import Serving

# Serve's own default.
DOWNSCALE_DELAY_S = 600.0


class Autoscaled:
    """Replicas of one model between `least` and `most`, after Serve's rule."""

    def __init__(self, loop: Loop, fleet: Fleet, traffic: Traffic, least: int, most: int, ongoing: int) -> None:
        self.loop, self.fleet, self.traffic = loop, fleet, traffic
        self.least, self.most, self.ongoing = least, most, ongoing
        self.promotions = 0
        self._model = next(iter(fleet.setup.models))
        self._surplus_s: float | None = None
        traffic.on_load = self._load_changed
        traffic.on_need = self._look

    def begin(self) -> None:
        """So many replicas as there must be have long been there."""
        for _ in range(self.least):
            self._serve(self.fleet.add((self._model,), 0.0))

    def _load_changed(self, slot: Slot, change: int) -> None:
        if slot.state is State.DRAINING and not slot.busy:
            self._remove(slot)
        self._look()

    def _look(self) -> None:
        """Compare what is wanted with what there is."""
        slots = [slot for slot in self.fleet.slots.values() if slot.state is not State.DRAINING]
        held = sum(len(router.held) for router in self.traffic.routers)
        load = held + sum(len(slot.busy) for slot in slots)
        wanted = min(max(math.ceil(load / self.ongoing), self.least), self.most)
        if wanted > len(slots):
            for _ in range(wanted - len(slots)):
                self._start()
        if wanted >= len(slots):
            self._surplus_s = None
        elif self._surplus_s is None:
            self._surplus_s = self.loop.now
            self.loop.at(self.loop.now + DOWNSCALE_DELAY_S, self._shrink, self.loop.now)

    def _shrink(self, since_s: float) -> None:
        """Serve takes the newest first; it ends once its requests have."""
        if self._surplus_s != since_s:
            return
        slots = [slot for slot in self.fleet.slots.values() if slot.state is State.ACTIVE]
        if len(slots) > self.least:
            slots[-1].life.apply(Event.DRAIN, self.loop.now)
            self._route()
            if not slots[-1].busy:
                self._remove(slots[-1])
        self._surplus_s = None
        self._look()

    def _start(self) -> None:
        times = self.fleet.setup.times
        slot = self.fleet.add((self._model,), times.trigger_s + (times.stock_start_s or times.cold_start_s or 0.0))
        self.fleet.starts += 1
        self.fleet.note()
        self.loop.at(slot.ends_s, self._serve, slot)

    def _serve(self, slot: Slot) -> None:
        if not slot.alive:
            return
        for event in (Event.STARTED, Event.PROMOTE, Event.PROMOTED):
            slot.life.apply(event, self.loop.now)
        self._route()
        self.traffic.release()

    def _remove(self, slot: Slot) -> None:
        self.fleet.remove(slot)
        self._route()

    def _route(self) -> None:
        active = {
            name: Serving(self._model, slot.hard)
            for name, slot in self.fleet.slots.items()
            if slot.state is State.ACTIVE
        }
        for router in self.traffic.routers:
            router.dispatch.set_roles(active)
            router.hear_list(self.fleet.slots)
        self.fleet.note()
