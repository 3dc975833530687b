"""`Slot`: the Serve deployment class. It owns its engine and its state, and carries out what the coordinator orders.

The slot is the single writer of its `Lifecycle`. Commands arrive on its event loop, change the state at once or not at
all, and start the slow part as a task; every change is reported at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

from ray import serve

from serve_app.config import AppConfig, ModelConfig
from serve_app.engine.base import Fingerprint, Message, Receive, Send
from serve_app.errors import EngineError, GpuNotFree, OutOfMemory, ServeAppError
from serve_app.gpu import placed, placement
from serve_app.pool import carried_body, naming
from serve_app.pool.lifecycle import Event, Lifecycle, State
from serve_app.pool.messages import Command, SlotReport, Verb, Wish
from serve_app.slot import budget, headroom, spare
from serve_app.slot.engines import SlotEngines, within
from serve_app.slot.gate import Gate
from serve_app.slot.held import HeldEngine
from serve_app.slot.joining import join
from serve_app.slot.link import Link
from serve_app.slot.preflight import ensure_fit
from serve_app.slot.transitions import Transitions
from serve_app.telemetry import processes, spans
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import past, stage

log = logging.getLogger("ray.serve")

# How often a slot looks whether its engine is still alive; a dead EngineCore unroutes the slot within this time.
WATCH_ENGINE_S = 0.5
# Memory changes with transitions, after which it is read anyway; reading it costs (see `Engine.memory`).
READ_MEMORY_S = 60.0
# Between two tries to start on GPUs that others hold; each of them waits for longer by itself.
FENCE_S = 1.0


class SlotIngress:
    """Serve pickles its ingress application before there is a slot; this one looks for the gate when it is called."""

    gate: Gate | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert SlotIngress.gate is not None, "Serve starts its ingress after the slot"
        await SlotIngress.gate(scope, receive, send)


class Slot:
    """The engines of one or several models behind one gate; one of them serves at a time.

    Args:
        config: an AppConfig as plain values (Serve hashes and pickles it).
        pool: handle of the `Pool` deployment; binding it makes Serve deploy both together.
    """

    async def __init__(self, config: dict[str, Any], pool: Any = None) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = AppConfig.model_validate(config)
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._actor = context.replica_id.to_full_id_str()
        self._application = context.app_name
        self._coordinator = naming.own_coordinator(context) if self._config.pool else ""
        self._life = Lifecycle(self._id)
        self._engines = SlotEngines((), self._config.slot)  # until it is known which models to hold
        self._model = self._config.served[0].id
        self._op = (0, 0)
        self._seq = 0
        self._error = self._fenced = ""
        self._ranks: tuple[str, ...] = ()
        self._gpus: tuple[str, ...] = ()
        self._may_shut: Command | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._transitions = Transitions(self._kick)
        self._gate = SlotIngress.gate = Gate(
            self._gate_changed, self._config.model_names, self._config.slot.flex_requests
        )
        self._link = Link(self, self._coordinator) if self._config.pool else None
        spans.configure("slot", self._id)
        carried_body.accept()
        await self._start()

    # What Serve calls.

    def record_replica_metadata(self) -> dict[str, str]:
        """Tells every router which coordinator this slot belongs to."""
        return {"coordinator": self._coordinator}

    async def check_health(self) -> None:
        """Serve replaces the slot when this raises: it has failed, or was told to retire."""
        if self._life.state is State.RETIRING:
            raise ServeAppError(f"slot {self._id} retires: {self._error or 'more slots than wanted'}")
        if self._life.state is State.FAILED:
            raise EngineError(f"slot {self._id} failed: {self._error}; history: {self._life.history()}")

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._engines.shutdown()
        if self._link is not None:
            self._link.stop()

    # What the coordinator orders; all of it on the slot's event loop.

    def take(self, command: Command) -> None:
        """Carry out a command once; older coordinators and repetitions are ignored, illegal moves refused."""
        order = (command.epoch, command.op)
        if order <= self._op:
            return
        try:
            self._obey(command)
        except ServeAppError as refused:
            log.warning("refused %s: %s", command.verb, refused)
        self._op = order  # after the state: see `report`
        self._kick()

    def _obey(self, command: Command) -> None:
        match command.verb:
            case Verb.PROMOTE:
                self._engines.ensure_usable(command.model)
                self._life.apply(Event.PROMOTE)
                self._gate.flex.shut()
                self._model, before = command.model, self._model
                self._spawn(self._carry_out(self._promote(command, before)))
            case Verb.DRAIN:
                self._life.apply(Event.DRAIN)
                self._may_shut = None
                self._spawn(self._give_up_drain(command.drain_s, self._life.since_s))
            case Verb.KEEP:
                self._life.apply(Event.KEEP)
                self._may_shut = None
            case Verb.SHUT:
                self._may_shut = command if self._life.state is State.DRAINING else None
                self._shut_if_idle()
            case Verb.RETIER:
                self._life.apply(Event.RETIER)
                self._spawn(self._carry_out(self._park(command, self._life.since_s)))
            case Verb.RETIRE:
                self._life.apply(Event.RETIRE)
                self._gate.flex.shut()
                self._gate.break_down("this slot is being removed; try again")

    # The slow parts.

    async def _start(self) -> None:
        """Run the cold start; Serve counts the slot as running once this returns."""
        spare.taken()
        if self._link is not None:
            self._link.start()
        born_s, here_s = processes.start_time_s(), time.time()
        wish = await self._link.wish() if self._link is not None else Wish()
        wanted_s = wish.since_s or born_s
        try:
            with self._transitions.run(Stage.COLD_START, start_s=min(wanted_s, here_s)):
                past(Stage.SCHEDULE, wanted_s, max(wanted_s, born_s), waited_for=wish.waited_for)
                past(Stage.SPAWN, max(wanted_s, born_s), here_s)
                deadline_s = self._config.slot.start_deadline_s * len(self._config.served)
                await self._cold_start_on_free_gpus(deadline_s)
            self._spawn(self._watch_engines())
            if self._link is not None:
                await join(self._life, self._link)
        except Exception as error:
            self._fail(error)
            await self._engines.shutdown()
            raise
        self._open_to_flex()
        self._spawn(self._read_memory())
        slot = self._config.slot
        self._spawn(headroom.watch(self._application, self._id, gpus=bool(slot.gpus), cache=slot.node_cache.enabled))
        if slot.spare_worker and self._config.served[0].engine == "vllm":
            self._spawn(asyncio.to_thread(spare.ensure))

    async def _cold_start_on_free_gpus(self, deadline_s: float) -> None:
        """Run the cold start; as long as others hold its GPUs, keep them from the next slot, and try again."""
        while True:
            begun_s = time.time()
            try:
                await within(self._cold_start(), deadline_s, Stage.COLD_START)
                break
            except GpuNotFree as held:
                if not self._fenced:
                    log.error("slot %s fences its GPUs and waits: %s", self._id, held)
                self._fenced = str(held)
                self._kick()
                await asyncio.sleep(FENCE_S)
                past(Stage.FENCE, begun_s, time.time())
        self._fenced = ""

    async def _cold_start(self) -> None:
        await self._check_placement()
        if self._config.slot.gpus:
            with stage(Stage.PREFLIGHT):
                live = await self._link.live() if self._link is not None else None
                await asyncio.to_thread(ensure_fit, self._config, live)
        self._engines = SlotEngines(await self._models_to_hold(), self._config.slot)
        introduce = self._link.introduce if self._link is not None else None
        await self._engines.start(introduce, self._engine_started)
        self._life.apply(Event.STARTED)
        if self._link is None:  # `pool: off`: a plain Serve replica, always active
            for event in (Event.PROMOTE, Event.PROMOTED):
                self._life.apply(event)
            self._gate.open(self._engines.app(self._model), self._model)

    async def _models_to_hold(self) -> list[ModelConfig]:
        """All of them, or those that the coordinator chooses."""
        models = self._config.served
        if self._link is None or len(models) == 1:
            return list(models)
        live = await self._link.live()
        costs = await asyncio.to_thread(budget.costs, self._config, live)
        mine = await self._link.assign(costs, await asyncio.to_thread(budget.of_slot, self._config.slot))
        for model, why in mine.left_out.items():
            log.info("slot %s does not hold %s: %s", self._id, model, why)
        return [model for model in models if model.id in mine.models]

    async def _engine_started(self, held: HeldEngine) -> None:
        if self._config.slot.nodes > 1:
            ranks = await held.engine.rank_nodes()
            self._check_ranks(ranks, await asyncio.to_thread(placed.node_names))

    async def _check_placement(self) -> None:
        """Refuse a placement that splits a tensor parallel group before the engine takes minutes to find out."""
        if self._config.slot.nodes == 1:  # one bundle, one node
            self._ranks = (placed.own_node(),) * self._config.served[0].world_size
            self._gpus = await asyncio.to_thread(placed.own_gpus) if self._config.slot.gpus else ()
            return
        places = await asyncio.to_thread(placed.own_rank_places)
        self._check_ranks(tuple(place.node for place in places), await asyncio.to_thread(placed.node_names))

    def _check_ranks(self, ranks: tuple[str, ...], names: dict[str, str]) -> None:
        self._ranks = ranks
        for model in self._config.served:
            placement.check_ranks(ranks, model.tensor_parallel, self._config.slot, names)

    async def _promote(self, command: Command, before: str) -> None:
        """Become active for the command's model; `before` is the one that the slot has served last."""
        try:
            with self._transitions.run(Stage.PROMOTION, command.model, command.reason, parent=command.traceparent):
                if self._engines.awake != command.model:
                    await self._gate.flex.end()
                held = await self._engines.wake(command)
                self._life.apply(Event.PROMOTED)
                self._gate.open(held.engine.app, command.model)
                self._kick()
                await held.collect(host=False)  # the first requests are being served
        except OutOfMemory as short:
            if not self._engines.has_others(command.model):
                raise
            log.error("slot %s gives up its engine of %s: %s", self._id, command.model, short)
            self._life.apply(Event.GIVE_UP)
            self._model = before
            await self._engines.give_up(command.model, str(short))
            await self._park(command, self._life.since_s)

    async def _park(self, command: Command, drained_s: float) -> None:
        """Every engine at the command's tier for it."""
        with self._transitions.run(Stage.DEMOTION, self._model, command.reason, start_s=drained_s):
            past(Stage.DRAIN, drained_s, time.time())
            if not self._engines.stays_awake(command):
                await self._gate.flex.end()
            await self._engines.rest(command)
            self._life.apply(Event.ASLEEP)
            self._open_to_flex()

    def _open_to_flex(self) -> None:
        """A standby whose engine is awake may serve those that can wait."""
        awake = self._engines.awake
        if awake and self._life.state is State.STANDBY:
            self._gate.flex.open(self._engines.app(awake), awake)

    async def _give_up_drain(self, drain_s: float, since_s: float) -> None:
        """At the drain deadline the demotion is given up, not the stream."""
        await asyncio.sleep(drain_s)
        if self._life.state is State.DRAINING and self._life.since_s == since_s:
            self._life.apply(Event.KEEP)
            self._may_shut = None
            self._kick()

    def _gate_changed(self) -> None:
        self._shut_if_idle()
        if self._gate.at_gate:
            self._kick()

    def _shut_if_idle(self) -> None:
        """Permission given, nothing in flight: shut the gate in this very step."""
        command = self._may_shut
        if command is None or self._life.state is not State.DRAINING or not self._gate.try_shut():
            return
        self._may_shut = None
        drained_s = self._life.since_s
        self._life.apply(Event.SHUT)
        self._spawn(self._carry_out(self._park(command, drained_s)))
        self._kick()

    # Book-keeping.

    async def _carry_out(self, transition: Coroutine[Any, Any, None]) -> None:
        """A transition whose failure fails the slot instead of raising."""
        try:
            await transition
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._life.allows(Event.FAIL):
            return  # the first failure is the cause; what the transition under way makes of it is not
        self._error = str(error) or type(error).__name__
        log.error("slot %s failed: %s", self._id, self._error)
        self._life.apply(Event.FAIL)
        self._gate.flex.shut()
        self._gate.break_down(f"slot {self._id} failed; the request was not served, try again")
        self._kick()

    async def _watch_engines(self) -> None:
        """Unroute a slot with a dead EngineCore, well before Serve's next health check."""
        while self._life.state is not State.FAILED:
            await asyncio.sleep(WATCH_ENGINE_S)
            try:
                await self._engines.check_health()
            except Exception as error:  # an engine that cannot even say how it is counts as dead
                self._fail(error)

    async def _read_memory(self) -> None:
        while True:
            await asyncio.sleep(READ_MEMORY_S)
            await self._engines.read_memory()

    def report(self, lag_s: float) -> SlotReport:
        """Called on the link's thread: reads single attributes only, each of which is replaced, never changed.

        `op` is read before the state and written after it: a report may show what a command did before it shows that
        the command was taken, but never the other way round, which would make it look undone and be ordered again.
        """
        self._seq += 1
        op = self._op
        return SlotReport(
            slot=self._id,
            seq=self._seq,
            state=self._life.state,
            since_s=self._life.since_s,
            model=self._model,
            hard=self._config.slot.max_ongoing_requests,
            op=op,
            in_flight=self._gate.in_flight,
            at_gate=self._gate.at_gate,
            gate_model=self._gate.gate_model,
            flex_hard=self._gate.flex.most,
            flex_model=self._gate.flex.model,
            flex_in_flight=self._gate.flex.in_flight,
            load=self._engines.load(),
            lag_s=lag_s,
            stage=self._transitions.current_stage,
            error=self._error,
            golden_failed=self._engines.golden_failed,
            actor=self._actor,
            pid=os.getpid(),
            node=placed.own_node(),
            ranks=self._ranks,
            engines=self._engines.reports(),
            history=self._life.history(),
            transitions=self._transitions.unsent,
            fenced=self._fenced,
            gpus=self._gpus,
        )

    def acknowledged(self, report: SlotReport) -> None:
        """The coordinator has this report: its transitions need not be sent again."""
        self._transitions.acknowledge(report.transitions)

    def introductions(self) -> list[tuple[str, str, Fingerprint]]:
        """What to tell a coordinator that has just been restarted, which knows nothing of before."""
        return self._engines.introductions()

    def repeat(self) -> None:
        """A coordinator that has just been restarted hears of our transitions again."""
        self._transitions.repeat()
        self._kick()

    def _kick(self) -> None:
        if self._link is not None:
            self._link.kick()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
