"""The protocol under every order of events that Hypothesis can think of: see `simulated_pool.py` for what is real.

`AnyOrder` allows everything that the real system allows, and checks what must hold always and what must hold once the
dust has settled. `OneNeed` forbids what would be a second reason for a promotion, and checks that there is never one.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app.pool.book import UNCONFIGURED_S
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Verb

from .simulated_pool import HARD, MODELS, SETTLED, Cluster, ModelRouter, ModelSlot, Request, live_settings

PICK = st.integers(0, 15)


class Pool(RuleBasedStateMachine):
    """Rules that both machines have: requests, messages, slow steps, a little time."""

    cluster: Cluster

    def _slot(self, pick: int) -> ModelSlot | None:
        slots = [slot for _, slot in sorted(self.cluster.slots.items())]
        return slots[pick % len(slots)] if slots else None

    def _request(self, pick: int, where: str) -> Request | None:
        there = self.cluster.requests(where)
        return there[pick % len(there)] if there else None

    def may_ask(self, model: str) -> bool:
        return True

    @rule(pick=PICK, count=st.integers(1, 4), model=st.sampled_from(list(MODELS)))
    def ask(self, pick: int, count: int, model: str) -> None:
        for _ in range(count):
            if self.may_ask(model):
                self.cluster.routers[pick % len(self.cluster.routers)].ask(self.cluster.now, model)

    @rule(pick=PICK, step=st.sampled_from(["arrive", "let in", "finish", "give up"]))
    def a_request_moves(self, pick: int, step: str) -> None:
        cluster = self.cluster
        if step == "let in" and (slot := self._slot(pick)):
            slot.let_in()
        if step == "arrive" and (request := self._request(pick, "travelling")):
            cluster.arrive(request)
        if step == "finish" and (request := self._request(pick, "inside")):
            cluster.finish(request)
        if step == "give up" and (request := self._request(pick, "held")):
            cluster.give_up(request)

    @rule()
    def all_requests_arrive(self) -> None:
        for request in self.cluster.requests("travelling"):
            self.cluster.arrive(request)

    @rule(pick=PICK, kind=st.sampled_from(["reports", "commands", "needs", "maps"]))
    def send(self, pick: int, kind: str) -> None:
        router = self.cluster.routers[pick % len(self.cluster.routers)]
        slot = self._slot(pick)
        if kind == "needs":
            self.cluster.send_need(router)
        elif kind == "maps":
            self.cluster.send_maps(router)
        elif slot is not None:
            self.cluster.send_report(slot) if kind == "reports" else self.cluster.send_command(slot)

    @rule(pick=PICK, kind=st.sampled_from(["reports", "commands", "needs", "maps"]))
    def deliver(self, pick: int, kind: str) -> None:
        self.cluster.deliver(kind, pick)

    @rule(times=st.integers(1, 3))
    def everybody_talks(self, times: int) -> None:
        for _ in range(times):
            self.cluster.flush()

    @rule(pick=PICK)
    def slow_step_ends(self, pick: int) -> None:
        slow = [slot for slot in self.cluster.slots.values() if slot.slow]
        if slow:
            slow[pick % len(slow)].slow_ends(self.cluster.now)

    @rule()
    def tick(self) -> None:
        self.cluster.pass_time(0.05)

    @invariant()
    def always(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()


class AnyOrder(Pool):
    """Everything may happen; teardown lets the dust settle and looks at what is left."""

    @initialize(
        slots=st.integers(1, 3), routers=st.integers(1, 2), min_active=st.integers(0, 1), min_active_n=st.integers(0, 1)
    )
    def begin(self, slots: int, routers: int, min_active: int, min_active_n: int) -> None:
        self.cluster = Cluster(live_settings(min_active, min_active_n=min_active_n), slots, routers)
        self.retiring: set[str] = set()

    @rule(seconds=st.sampled_from([0.3, 1.2, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @rule(pick=PICK, what=st.sampled_from(["its slow step fails", "its engine dies", "its actor dies"]))
    def a_slot_breaks(self, pick: int, what: str) -> None:
        slot = self._slot(pick)
        if slot is None:
            return
        if what == "its actor dies":
            slot.die()
        elif what == "its engine dies":
            slot.fail(self.cluster.now)
        else:
            slot.slow_ends(self.cluster.now, well=False)

    @rule(pick=PICK, what=st.sampled_from(["adds a slot", "removes a slot", "reaps"]))
    def serve_works(self, pick: int, what: str) -> None:
        slot = self._slot(pick)
        if what == "adds a slot" and len(self.cluster.slots) < 5:
            self.cluster.add_slot()
        elif what == "removes a slot" and slot:
            slot.removed = True
        elif what == "reaps":
            self.cluster.reap()

    @rule(pick=PICK, empty=st.booleans())
    def serve_tells_its_list(self, pick: int, empty: bool) -> None:
        """Empty: the controller restarts."""
        router = self.cluster.routers[pick % len(self.cluster.routers)]
        router.hear_list({} if empty else self.cluster.serve_list(), self.cluster.now)

    @rule(configured=st.booleans(), back=st.booleans(), pick=PICK)
    def coordinator_restarts(self, configured: bool, back: bool, pick: int) -> None:
        names = list(self.cluster.books)
        name = names[pick % len(names)]
        self.cluster.kill_coordinator(name)
        if configured:
            self.cluster.start_coordinator(name, back=back)

    @rule(name=st.sampled_from(["old", "new"]), configured=st.booleans(), back=st.booleans())
    def coordinator_starts(self, name: str, configured: bool, back: bool) -> None:
        """Serve restarts a dead one, or begins a redeploy: later slots belong to the newest code version."""
        if self.cluster.books.get(name) is None:
            self.cluster.start_coordinator(name, configured=configured, back=back)

    @rule(back=st.booleans())
    def coordinator_restarts_and_pool_is_away(self, back: bool) -> None:
        """For so long that it acts without settings."""
        self.cluster.kill_coordinator("old")
        self.cluster.start_coordinator("old", configured=False, back=back)
        for seconds in (UNCONFIGURED_S, 1.0, 1.0):
            self.cluster.flush()
            self.cluster.pass_time(seconds)
            self.policy_asks(1)
            self.policy_asks(5)

    @rule(pick=PICK, verb=st.sampled_from([Verb.PROMOTE, Verb.DRAIN]))
    def operator_orders(self, pick: int, verb: Verb) -> None:
        slot = self._slot(pick)
        book = self.cluster.books.get(slot.coordinator) if slot else None
        if slot and book and slot.name in book.slots:
            view = book.slots[slot.name].view(self.cluster.now)
            if view.pending is None and (view.is_standby if verb is Verb.PROMOTE else view.is_active):
                book.operate(verb, slot.name, "", self.cluster.now) if not book.blind(self.cluster.now) else None

    @rule(current=st.integers(1, 5))
    def policy_asks(self, current: int) -> None:
        for book in self.cluster.books.values():
            if book is not None:
                target, order = book.target(current, self.cluster.now)
                assert book.configured or (target.slots, order) == (current, None)

    @invariant()
    def retiring_is_irrevocable(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for slot in self.cluster.slots.values():
            if slot.name in self.retiring:
                assert slot.life.state in (State.RETIRING, State.FAILED)
            if slot.life.state is State.RETIRING:
                self.retiring.add(slot.name)

    def teardown(self) -> None:
        """Whoever is held is served, or there is no standby; in the end roles settle and nobody is left."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.settle(finish=False, rounds=24)
        held, story = cluster.requests("held", "travelling", "at gate"), self._story()
        standbys = [slot for slot in cluster.slots.values() if slot.life.state is State.STANDBY]
        assert not (held and standbys), f"{len(held)} wait beside standbys: {story}"
        for slot in cluster.slots.values():  # streams of another model, which do not end here, come first
            left = [request for request in slot.at_gate if slot.lets_in(request) or not slot.inside]
            assert not left, f"left at a gate: {story}"
        cluster.settle(finish=True, rounds=40)
        self._assert_settled()

    def _assert_settled(self) -> None:
        cluster, story = self.cluster, self._story()
        left = cluster.requests("held", "travelling", "at gate", "inside") if cluster.slots else []
        owned = [slot.coordinator for slot in cluster.slots.values()]
        most = max(owned.count(name) for name in cluster.books)
        minima = {model: cluster.live.model(model).min_active for model in MODELS}
        others = {"m": minima["n"], "n": minima["m"]}  # may be all there are, with nothing to take over
        assert not [request for request in left if most > others[request.ticket.model]], story
        for slot in cluster.slots.values():
            assert slot.life.state in SETTLED, story
        for name, book in cluster.books.items():
            assert book is not None
            assert not [record for record in book.slots.values() if record.pending], story
            mine = [slot for slot in cluster.slots.values() if slot.coordinator == name]
            active = {slot.name for slot in mine if slot.life.state is State.ACTIVE}
            assert len(active) == min(len(mine), sum(minima.values())), story  # nobody needs more
            for router in cluster.routers:
                known = {slot for slot in router.roles.active() if router.listed.get(slot) == name}
                assert known == active, story

    def _story(self) -> str:
        slots = ", ".join(f"{slot.life!r} {slot.life.history()}" for slot in self.cluster.slots.values())
        return f"{self.cluster.books} {self.cluster.routers[0].dispatch!r} {slots}"


class OneNeed(Pool):
    """Never more requests than one slot takes, nobody demotes, fails, leaves or asks for a minimum: one promotion.

    The coordinator may be restarted. Its last messages arrive or are lost then, as replies of a dead actor are; they do
    not arrive later. Messages take less than half a second, which the grace of a new coordinator relies on. In a
    redeploy there are two coordinators, each with standbys of its own; then neither is restarted, since which of them
    counts as the newer one would change.
    """

    @initialize(slots=st.integers(2, 3), routers=st.integers(1, 3), redeploy=st.booleans())
    def begin(self, slots: int, routers: int, redeploy: bool) -> None:
        self.cluster = Cluster(live_settings(0, demote_after_s=10_000, soft=HARD + 1), slots, routers)
        if redeploy:
            self.cluster.start_coordinator("new")
            self.cluster.add_slot()
        self.cluster.settle(finish=False, rounds=12)

    def may_ask(self, model: str) -> bool:
        """One model, and room for one more, counting what a router has said and not yet taken back.

        The coordinator adds that up.
        """
        return model == "m" and sum(self._claims(router) for router in self.cluster.routers) < HARD

    def _claims(self, router: ModelRouter) -> int:
        cluster = self.cluster
        alive = [r for r in cluster.requests("held", "travelling", "at gate", "inside") if r.router is router]
        said = [need.waiting for _, need in cluster.wires.needs if need.router == router.name]
        for book in cluster.books.values():
            if book is not None and router.name in book.routers:
                said.append(book.routers[router.name].need.waiting)
        return max(len(alive), *said, 0)

    @rule(arrives=st.booleans(), back=st.booleans())
    def coordinator_restarts(self, arrives: bool, back: bool) -> None:
        if "new" in self.cluster.books:
            return
        wires = self.cluster.wires
        while wires.commands:
            self.cluster.deliver("commands") if arrives else wires.commands.clear()
        self.cluster.kill_coordinator("old")
        self.cluster.start_coordinator("old", back=back)

    @rule()
    def half_a_second_passes(self) -> None:
        self.cluster.flush()
        self.cluster.pass_time(0.5)

    @invariant()
    def at_most_one_promotion(self) -> None:
        if hasattr(self, "cluster"):
            promotions = {slot.name: slot.promotions for slot in self.cluster.slots.values() if slot.promotions}
            assert sum(promotions.values()) <= 1, f"one need, promoted: {promotions}"


TestAnyOrder = AnyOrder.TestCase
TestOneNeed = OneNeed.TestCase
