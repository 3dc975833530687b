"""`PoolRouter`: Serve's request router in every proxy and handle; a thin adapter around `Dispatch`.

Requests that no active slot has room for are held here, in the caller's own coroutine: `choose_replicas` would not do,
because Serve swallows what it raises and does not call it at all while there are no replicas.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from typing import Any

from ray.actor import ActorHandle
from ray.serve._private.common import DeploymentHandleSource, ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve_app.errors import Overloaded, UnknownModel
from serve_app.live import Hold
from serve_app.pool import api_keys, body_model, naming, proxy
from serve_app.pool.back_pressure import PoolBackPressure
from serve_app.pool.body_model import Asked
from serve_app.pool.dispatch import Dispatch, Ticket
from serve_app.pool.held import Held
from serve_app.pool.messages import ModelNeed, NeedReport, Serving
from serve_app.pool.roles import Roles
from serve_app.pool.router_metrics import RouterMetrics
from serve_app.telemetry import spans

log = logging.getLogger("ray.serve")

# Need is repeated at least this often: it is the router's lease with the coordinator.
REPORT_S = 0.25
# Held requests are normally woken when something changes; what is known of other proxies only ages.
LOOK_AGAIN_S = 0.1
RETRY_WATCH_S = 0.1
RETRY_UNREAD_S, RETRY_UNGUARDED_S = 1.0, 60.0
DISCOVER_S = 1.0
# Of the requests that wait, so many are linked to the promotion they wait for.
MAX_LINKS = 8


class PoolRouter(RequestRouter):
    """Routes to active slots, and requests of `service_tier: flex` to awake standbys.

    All state is touched on the router's own event loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_been_ready = False
        self.stages: dict[str, str] = {}
        self._router_id = uuid.uuid4().hex[:12]
        self._dispatch = Dispatch()
        self._flex = Dispatch(Hold(max_held_requests=0))  # what finds no standby free is refused at once
        self._flex_requests: Counter[str] = Counter()  # by Serve's id of the request: how often it was placed there
        self._roles = Roles()
        self._models: dict[str, tuple[str, ...]] = {}
        self._knows_models = False
        self._knows_flex = False
        self._seq = 0
        self._by_name: dict[str, RunningReplica] = {}
        self._died: frozenset[str] = frozenset()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._held: dict[Ticket, Held] = {}
        self._tell = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._stopped = False
        self._metrics = RouterMetrics(self.app_name)
        if self._handle_source == DeploymentHandleSource.PROXY:
            proxy.add_router(self)
            spans.configure("proxy", self._router_id)

    @property
    def deployment(self) -> str:
        """The deployment it routes to, by application and name."""
        return str(self._deployment_id)

    @property
    def has_replicas(self) -> bool:
        return bool(self._by_name)

    @property
    def models(self) -> dict[str, tuple[str, ...]]:
        """The models of this pool, each with what clients may call it; read from other threads."""
        return self._models

    @property
    def reads_bodies(self) -> bool:
        """Whether what a request's body asks for matters, or may once the roles are known; read from other threads."""
        return len(self._models) > 1 or self._knows_flex or not self._knows_models

    @property
    def ready(self) -> bool:
        """Whether a request would be served: by an active slot, or by a standby; read from other threads."""
        return bool(self._dispatch.routable) or self._roles.on_demand()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list has changed: follow the coordinators that these replicas belong to."""
        super().update_replicas(replicas)
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._died &= frozenset(self._by_name)
        self._follow({str(replica.replica_metadata.get("coordinator", "")) for replica in replicas} - {""})
        if not self._tasks:
            loop = self._event_loop
            self._tasks = [loop.create_task(self._report()), loop.create_task(self._discover())]
        self._apply()

    def stop(self) -> None:
        """A newer one has taken its place: end its tasks, once nobody waits in it any more; from any thread."""
        if self._tasks:
            self._event_loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._held:
            self._event_loop.call_later(REPORT_S, self._stop)
            return
        self._stopped = True  # cancelled in the moment in which it is woken, `wait_for` returns all the same
        for task in (*self._tasks, *self._watchers.values()):
            task.cancel()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A request or probe found the actor dead, before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._died |= {replica_id.unique_id}
        self._apply()

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        for dispatch in (self._dispatch, self._flex):
            dispatch.observed(replica_id.unique_id, num_ongoing_requests, time.monotonic())

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica took the request; comes right after `on_new_queue_len_info`, which refusals have too."""
        super().on_request_routed(pending_request, replica_id, result)
        for dispatch in (self._dispatch, self._flex):
            dispatch.accepted(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called once for every replica we chose, from whatever thread saw the end."""
        self._event_loop.call_soon_threadsafe(self._finished, replica_id.unique_id, internal_request_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's own loop is not used; see `_choose_replica_for_request`."""
        raise NotImplementedError

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """An active slot for this request, held for as long as the bounds allow.

        Raises:
            PoolBackPressure: too many are held, the request's deadline passed, or nobody has looked at its API key.
            UnknownModel: the pool has no model of that name; `proxy` answers then, as Serve passes on no 404.
        """
        if self._handle_source == DeploymentHandleSource.PROXY and proxy.is_unguarded():
            raise PoolBackPressure(proxy.UNGUARDED, RETRY_UNGUARDED_S)
        now = time.monotonic()
        arrived = now - max(0.0, time.time() - pending_request.created_at)
        timeout = min(self._dispatch.hold.max_hold_s, proxy.client_timeout_s.get())
        routed = proxy.routed.get() or proxy.Routed()
        asked = proxy.requested.get()
        ticket = Ticket(
            arrived, arrived + timeout, session=pending_request.metadata.session_id, tenant=api_keys.tenant.get()
        )
        routed.application, routed.held_s = self.app_name, routed.held_s or 0.0  # a retry was held before
        try:
            while True:
                ticket.model = self._model_of(asked, routed)
                if asked and asked.flex and self._knows_flex:
                    return self._choose_standby(ticket, pending_request.metadata.internal_request_id, routed)
                self._dispatch.offer(ticket, time.monotonic())
                if ticket.slot is None:
                    await self._hold(ticket, routed)
                replica = self._by_name.get(ticket.slot or "")
                if replica is not None:
                    routed.slot = ticket.slot or ""
                    return replica
                self._dispatch.give_up(ticket)  # its slot has vanished since, or only now the models are known
        except Overloaded as refused:
            self._give_up(ticket)
            self._metrics.shed(refused, routed.model)
            raise PoolBackPressure(str(refused), refused.retry_after_s) from None
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise

    def _choose_standby(self, ticket: Ticket, request: str, routed: proxy.Routed) -> RunningReplica:
        """An awake standby with room for a flex request. Raises PoolBackPressure, as OpenAI's 429 for this tier."""
        routed.path = "flex"
        try:
            routed.slot = self._flex.offer(ticket, time.monotonic()) or ""
        except Overloaded:
            refused = Overloaded(body_model.NO_STANDBY, self._flex.retry_after_s)
            self._metrics.shed(refused, routed.model)
            raise PoolBackPressure(str(refused), refused.retry_after_s, 429) from None
        self._flex_requests[request] += 1
        return self._by_name[routed.slot]  # who is not there is not present in `_flex` either

    def _model_of(self, asked: Asked | None, routed: proxy.Routed) -> str:
        """The id of the model that a client asks for; the first model if it names none.

        Until the models are known it is what the client calls it: no slot is active then, and `_learn_models` has
        everybody ask again.

        Raises:
            UnknownModel.
            Overloaded: the proxy has not looked, not knowing yet that it matters.
        """
        if asked is None and len(self._models) > 1:
            raise Overloaded("this proxy has only just heard of these models", RETRY_UNREAD_S)
        name = asked.model if asked else ""
        if not self._models:  # replicas of `pool: off` take whatever comes
            return "" if self._knows_models else name
        if not name or len(self._models) == 1:  # whether that is the only one's name, its own server says
            found = next(iter(self._models))
        else:
            found = next((model for model, names in self._models.items() if name in names), "")
        if not found:
            routed.unknown_model = f"The model `{name}` does not exist; there are: {', '.join(self._models)}"
            raise UnknownModel(routed.unknown_model)
        routed.model = found  # not what a client made up: that would be a series of metrics each
        return found

    async def _hold(self, ticket: Ticket, routed: proxy.Routed) -> None:
        """Wait until the ticket is placed, or raise Overloaded at its deadline; either way note for how long."""
        held = self._held[ticket] = Held(ticket.arrived_s, ticket.model)
        cold = not self._dispatch.serves(ticket.model) and not self._roles.usable(ticket.model)
        routed.path = "cold" if cold else "held"
        self._tell.set()
        if self._looking is None or self._looking.done():
            self._looking = self._event_loop.create_task(self._look_again())
        try:
            try:
                await asyncio.wait_for(held.woken.wait(), ticket.deadline_s - time.monotonic())
            except TimeoutError:
                if not held.woken.is_set():
                    raise Overloaded("no active slot had room in time", self._dispatch.retry_after_s) from None
            if ticket.evicted:
                raise Overloaded("others hold fewer requests than this API key", self._dispatch.retry_after_s)
            held.end(ticket.slot or "", self._roles.trace(ticket.slot or ""))
        except BaseException as error:
            held.end("", "", str(error) or type(error).__name__)
            raise
        finally:
            self._held.pop(ticket, None)
            routed.held_s = time.monotonic() - ticket.arrived_s

    async def _look_again(self) -> None:
        """As long as requests are held, one look for all of them: a slot may have room, or a queue be full, unheard."""
        while self._held:
            await asyncio.sleep(LOOK_AGAIN_S)
            self._release()
            for ticket, held in self._held.items():
                if ticket.evicted:
                    held.woken.set()

    def _give_up(self, ticket: Ticket) -> None:
        self._dispatch.give_up(ticket)
        self._tell.set()
        self._release()

    def _finished(self, slot: str, request: str) -> None:
        if self._flex_requests[request] > 0:
            self._flex.finished(slot)
            self._flex_requests -= Counter([request])  # forgets those that have ended
            return
        self._dispatch.finished(slot)
        self._release()

    def _apply(self) -> None:
        """Hand roles and replicas to the dispatch object, and place who can be placed now."""
        newest = self._roles.newest()
        if newest is not None:
            self._dispatch.hold = newest.hold
            self._dispatch.retry_after_s = self._flex.retry_after_s = newest.retry_after_s
        self.stages, self._models = self._roles.stages(), self._roles.models()
        self._dispatch.set_roles(self._roles.active() | self._plain())
        flex = self._roles.flex()
        self._knows_flex = flex is not None
        self._flex.set_roles(flex or {})
        for dispatch in (self._dispatch, self._flex):
            dispatch.set_present(set(self._by_name) - self._died)
        self.has_been_ready = self.has_been_ready or self.ready
        self._learn_models()
        self._release()
        self._tell.set()

    def _learn_models(self) -> None:
        """Once it is known which models there are, those who came before ask again: only now they can ask for one."""
        knew, self._knows_models = self._knows_models, bool(self._models or (self._by_name and not self._watchers))
        for ticket, held in self._held.items() if self._knows_models and not knew else ():
            self._dispatch.give_up(ticket)
            held.woken.set()

    def _plain(self) -> dict[str, Serving]:
        """Replicas without a coordinator: `pool: off`, in an application that had a pool before."""
        plain = {name: r for name, r in self._by_name.items() if not r.replica_metadata.get("coordinator")}
        only = next(iter(self._roles.models()), "")
        return {name: Serving(only, replica.max_ongoing_requests) for name, replica in plain.items()}

    def _release(self) -> None:
        for ticket in self._dispatch.release(time.monotonic()):
            self._held[ticket].woken.set()
            self._tell.set()

    def _follow(self, coordinators: set[str]) -> None:
        """Watch exactly these coordinators; no replicas at all say nothing, so then those we have stay."""
        for name in coordinators - set(self._watchers):
            self._watchers[name] = self._event_loop.create_task(self._watch(name))
        for name in set(self._watchers) - coordinators if coordinators else ():
            self._watchers.pop(name).cancel()
            self._roles.keep_only(coordinators)

    async def _discover(self) -> None:
        """Until there is a replica, find the coordinator by name, so that /health/ready can tell how the start goes."""
        while not self._by_name:
            try:
                self._follow(set(await asyncio.to_thread(naming.coordinator_names, self.app_name)))
            except Exception as error:
                log.debug("no coordinator found: %s", error)
            await asyncio.sleep(DISCOVER_S)

    async def _watch(self, name: str) -> None:
        """Follow one coordinator's role map; when it cannot be reached, what was last known stays."""
        while True:
            try:
                role_map = await naming.coordinator(name).watch.remote(self._roles.seen(name))
                self._metrics.heard(name)
                if self._roles.update(name, role_map):
                    self._apply()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.debug("coordinator %s: %s", name, error)
                await asyncio.sleep(RETRY_WATCH_S)

    async def _report(self) -> None:
        """Say our need at every change, and often enough to keep the lease."""
        while not self._stopped:
            self._tell.clear()
            try:
                self._send_need()
                self._metrics.look(self._dispatch.need(time.monotonic()), self._models, self._watchers)
            except Exception as error:
                log.debug("need report: %s", error)
            try:
                await asyncio.wait_for(self._tell.wait(), REPORT_S)
            except TimeoutError:
                continue

    def _send_need(self) -> None:
        """One report to every coordinator that is there; only one of them is asked for a model's capacity."""
        needs = self._needs()
        reachable = self._reachable()
        asked = {model: self._roles.answerable(model, reachable) for model in needs}
        self._seq += 1
        for name, coordinator in reachable.items():
            report = NeedReport(
                router=self._router_id,
                seq=self._seq,
                needs={model: need for model, need in needs.items() if asked[model] in (name, None)},
                seen=self._roles.seen(name),
                slots=frozenset(self._by_name),
                died=self._died,
            )
            coordinator.need.remote(report)

    def _reachable(self) -> dict[str, ActorHandle]:
        """The coordinators we follow that are there: in a rollout Serve does not recreate the old version's."""
        found: dict[str, ActorHandle] = {}
        for name in self._watchers:
            try:
                found[name] = naming.coordinator(name)
            except Exception as error:
                log.debug("need report to %s: %s", name, error)
        return found

    def _needs(self) -> dict[str, ModelNeed]:
        now = time.monotonic()
        traces: dict[str, list[str]] = {}
        for ticket, held in list(self._held.items()):
            if held.trace:
                traces.setdefault(ticket.model, []).append(held.trace)
        return {
            model: ModelNeed(waiting, time.time() - oldest_s, tuple(traces.get(model, ())[:MAX_LINKS]))
            for model, (waiting, oldest_s) in self._dispatch.need(now).items()
        }

    def __repr__(self) -> str:
        return f"<PoolRouter {self._router_id} {self._dispatch!r}>"
