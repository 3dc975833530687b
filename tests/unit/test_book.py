"""The coordinator's book: late and lost reports, commands under way, role maps, blindness, slots that vanish."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from serve_app.config import Tier
from serve_app.errors import ServeAppError
from serve_app.live import LiveModel, LiveSettings, PromoteWhen, SlotCounts, Verify
from serve_app.pool import book as book_module
from serve_app.pool import breaker
from serve_app.pool.book import (
    GRACE_S,
    OVERDUE_S,
    ROUTER_LEASE_S,
    UNCONFIGURED_S,
    PoolBook,
)
from serve_app.pool.capacity import Outlook
from serve_app.pool.entries import LEDGER_LENGTH
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import (
    Command,
    EngineReport,
    ModelNeed,
    NeedReport,
    PoolTarget,
    SlotReport,
    Transition,
    Verb,
    Version,
)
from serve_app.pool.presence import ABSENT_S, SILENT_S

HARD = 4


class Told:
    """A book, with slots and routers that speak in one line each. `now` is moved by the test."""

    def __init__(self, epoch: int = 1, *, configured: bool = True, slots: dict[str, object] | None = None) -> None:
        counts = {"min": 1, "max": 4, "standby": 1, "demote_after_s": 10, "shrink_after_s": 5} | (slots or {})
        live = LiveSettings(
            slots=SlotCounts.model_validate(counts),
            models={"m": LiveModel(min_active=0)},
            promote_when=PromoteWhen(in_flight=HARD),
        )
        self.book = PoolBook(epoch=epoch, live=live, models={"m": ("m",)}, hard=HARD, born_s=0.0, configured=configured)
        self.now = 0.0
        self.seq = 0
        self.listed: set[str] = set()

    def report(self, slot: str, state: str, *, seq: int = 0, **other: object) -> list[str]:
        """`slot` says that it is `state`; returns the orders that follow."""
        self.seq += 1
        self.listed.add(slot)
        said = SlotReport(slot, seq or self.seq, State(state), 0, "m", HARD, engines=(EngineReport("m", Tier.HOST),))
        self.book.on_report(replace(said, **other), self.now)  # type: ignore[arg-type]
        return self.step()

    def need(self, waiting: int = 0, *, router: str = "r", seen: Version | None = None, **other: object) -> list[str]:
        """A router that has acted on the newest map, or on `seen`, says how many it holds."""
        self.seq += 1
        said = NeedReport(router, self.seq, {"m": ModelNeed(waiting)}, seen or self.version, frozenset(self.listed))
        self.book.on_need(replace(said, **other), self.now)  # type: ignore[arg-type]
        return self.step()

    def step(self, seconds: float = 0.0) -> list[str]:
        self.now += seconds
        return [f"{command.verb} {slot}" for command in self.book.step(self.now) for slot in [self.slot_of(command)]]

    def slot_of(self, command: Command) -> str:
        return next(name for name, record in self.book.slots.items() if record.pending == command)

    def taken(self, slot: str) -> tuple[int, int]:
        """The `op` that a slot reports once it has taken its pending command."""
        command = self.book.command_for(slot)
        assert command is not None
        return command.epoch, command.op

    @property
    def version(self) -> Version:
        return self.book.role_map.version

    @property
    def active(self) -> set[str]:
        return set(self.book.role_map.active)


def sighted(*states: str, epoch: int = 1, **slots: object) -> Told:
    """Slots a, b, c ... in these states, a router that knows them, and a book that is not blind any more."""
    told = Told(epoch, slots=slots)
    for name, state in zip("abcdef", states, strict=False):
        told.report(name, state)
    told.need()
    told.need()
    assert not told.book.blind(told.now)
    return told


def test_what_says_nothing_new_needs_no_step() -> None:
    """A heartbeat, or a need that is as it was; the first word after a silence does, as the slot is routed to again."""
    told = sighted("active", "standby")
    said, need = told.book.slots["a"].report, told.book.routers["r"].need
    assert not told.book.on_report(replace(said, seq=said.seq + 1, lag_s=0.1), told.now)
    assert told.book.on_report(replace(said, seq=said.seq + 2, in_flight=1), told.now)
    assert not told.book.on_need(replace(need, seq=need.seq + 1), told.now)
    assert told.book.on_need(replace(need, seq=need.seq + 2, needs={"m": ModelNeed(3)}), told.now)
    told.now += SILENT_S + 1
    told.report("b", "standby")
    assert told.active == set()
    assert told.book.on_report(replace(said, seq=said.seq + 3, in_flight=1), told.now)
    told.step()
    assert told.active == {"a"}


# Reports.


def test_book_report_that_was_overtaken_is_dropped() -> None:
    """An older report changes nothing, whatever it says."""
    told = sighted("standby")
    told.report("a", "promoting", seq=100)
    told.report("a", "standby", seq=99)
    assert told.book.slots["a"].report.state is State.PROMOTING


def test_book_need_that_was_overtaken_is_dropped() -> None:
    """An older need neither counts nor keeps the router's lease."""
    told = sighted("standby")
    told.need(0, seq=100)
    assert told.need(3, seq=99) == []


def test_book_ledger_takes_a_transition_once() -> None:
    """A report whose answer was lost is sent again with the same transitions."""
    told = sighted("standby")
    done = [Transition("promotion", 1.7e9 + 1 / 3, 0.4), Transition("demotion", 1.7e9 + 2, 0.1)]
    instant = Transition("demotion", 1.7e9 + 3, 0.0)
    told.report("a", "active", transitions=(done[0],))
    told.report("a", "active", transitions=(*done, instant))
    told.report("a", "active", transitions=(*done, instant))
    assert list(told.book.entries.ledger) == [("a", done[0]), ("a", done[1]), ("a", instant)]


def test_book_ledger_is_bounded() -> None:
    """The newest transitions are kept."""
    told = sighted("standby")
    for index in range(LEDGER_LENGTH + 5):
        told.report("a", "standby", transitions=(Transition("promotion", float(index), 0.4),))
    assert len(told.book.entries.ledger) == LEDGER_LENGTH
    assert told.book.entries.ledger[-1][1].start_s == LEDGER_LENGTH + 4


# Commands under way.


def test_book_command_is_pending_until_the_slot_has_taken_it() -> None:
    """The command lies over the slot's state, is given out again, and is not ordered twice."""
    told = sighted("standby", "standby")
    assert told.need(1) == ["promote a"]
    op = told.taken("a")
    assert told.report("a", "standby") == []
    assert told.need(1) == []
    assert told.taken("a") == op
    told.report("a", "promoting", op=op)
    assert told.book.command_for("a") is None
    assert told.need(1) == []


def test_book_report_ahead_of_its_op_promotes_nobody() -> None:
    """A slot's report may show the new state before the command's number; the other order would look undone."""
    told = sighted("standby", "standby")
    told.need(1)
    assert told.report("a", "promoting", op=(0, 0)) == []
    assert told.need(1) == []
    undone = sighted("standby", "standby")
    undone.need(1)
    assert undone.report("a", "standby", op=undone.taken("a")) == ["promote a"]  # why deployment.py reads `op` first


def test_book_refused_command_is_given_up() -> None:
    """A slot that refused (it took the command and did not move) is free for another order."""
    told = sighted("draining", "standby")
    told.need(1)
    told.report("a", "parking", op=told.taken("a"))
    assert told.book.command_for("a") is None
    assert told.need(1) == ["promote b"]


def test_book_command_carries_the_live_settings() -> None:
    """Tier, deadlines, reason and the strictness of the check travel with the command."""
    told = sighted("standby")
    told.need(1)
    command = told.book.command_for("a")
    assert command is not None
    assert (command.model, command.tiers, command.wake_s, command.verify) == ("m", {"m": Tier.HOST}, 60, Verify.ENFORCE)
    assert command.reason == "1 requests held"
    assert command.epoch == told.book.epoch


def test_book_need_from_before_a_slot_became_active_is_not_answered_again() -> None:
    """One need, one promotion: routers must act on the new map before what they hold counts again.

    Found by OneNeed in test_interleavings.py: the step that learnt of the active slot decided before it published.
    """
    told = sighted("standby", "standby")
    told.need(1)
    told.report("a", "promoting", op=told.taken("a"))
    assert told.need(1) == []
    assert told.report("a", "active") == []
    assert told.active == {"a"}


# Role maps.


def test_book_role_map_version_grows_only_with_news() -> None:
    """A report that changes nothing publishes nothing."""
    told = sighted("active")
    version = told.version
    told.report("a", "active", in_flight=2)
    assert told.version == version
    told.report("b", "standby")
    assert told.version == (version[0], version[1] + 1)


def test_book_role_map_of_a_new_coordinator_is_newer() -> None:
    """The first map of a later epoch beats the last one of an earlier epoch, by whatever number."""
    assert sighted("active", epoch=2).version > replace(sighted("active").book.role_map, version=(1, 999)).version


def test_book_role_map_counts_a_coming_slot_as_usable() -> None:
    """Need stays where it is being answered: a coordinator that promotes its last standby is still the one to ask."""
    told = sighted("standby")
    assert told.book.role_map.models["m"].usable == 1
    told.need(1)
    assert told.book.role_map.models["m"].usable == 1
    told.report("a", "promoting", op=told.taken("a"))
    assert told.book.role_map.models["m"].usable == 1
    told.report("a", "active")
    assert told.book.role_map.models["m"].usable == 0


def test_book_role_map_tells_stages_of_slots_that_are_not_active() -> None:
    """For /health/ready: the error, else state and stage."""
    told = sighted("active")
    told.report("b", "starting", stage="weights.load")
    told.report("c", "failed", error="boom")
    told.report("d", "standby")
    assert told.book.role_map.stages == {"b": "starting: weights.load", "c": "boom", "d": "standby"}
    assert set(told.book.slots) == {"a", "b", "c", "d"}


def test_book_drain_leaves_the_map_before_it_may_shut() -> None:
    """Told to drain: out of the map at once; permission to shut once each router has acted on that map."""
    told = sighted("active", "active")
    before = told.version
    told.book.operate(Verb.DRAIN, "a", "", told.now)
    assert told.active == {"b"}
    told.report("a", "draining", op=told.taken("a"))
    assert told.book.command_for("a") is None
    assert told.need(seen=before, router="slow") == []
    told.need()
    assert told.book.command_for("a") is None
    told.need(router="slow")
    command = told.book.command_for("a")
    assert command is not None
    assert command.verb is Verb.SHUT


def test_book_permission_to_shut_is_given_once() -> None:
    """Taken with requests still inside, the permission stays; it is given anew for the next drain only."""
    told = sighted("draining", "active")
    op = told.taken("a")
    assert told.report("a", "draining", op=op, in_flight=1) == []
    assert told.need() == []
    told.report("a", "active", op=op)
    assert told.report("a", "draining", op=op) == []
    assert told.need() == ["shut a"]


# Blindness and restarts.


def test_book_blind_until_every_listed_slot_has_reported() -> None:
    """A new coordinator orders and publishes nothing while a slot that routers know may be active."""
    told = Told()
    told.listed = {"a", "b"}
    assert told.need(5) == []
    assert told.report("a", "standby") == []
    assert told.book.blind(told.now)
    assert told.version == (0, 0)
    assert told.report("b", "active") == []
    assert not told.book.blind(told.now)
    assert told.active == {"b"}


def test_book_blind_ends_after_the_grace() -> None:
    """A slot that never reports does not blind the pool for ever; once sighted it stays so."""
    told = Told()
    told.report("a", "standby")
    told.listed.add("ghost")
    assert told.need(1) == []
    assert told.step(GRACE_S - 0.1) == []
    assert told.need(1) == []
    assert told.step(0.2) == []
    assert told.need(1) == ["promote a"]
    told.listed.add("newcomer")
    told.need(router="r2")
    assert not told.book.blind(told.now)


def test_book_blind_without_settings_until_a_longer_grace() -> None:
    """Without the live settings it waits longer, then promotes by the defaults."""
    told = Told(configured=False)
    told.report("a", "standby")
    told.need()
    assert told.book.blind(told.now + GRACE_S)
    assert told.book.blind(told.now + UNCONFIGURED_S - 0.1)
    assert not told.book.blind(told.now + UNCONFIGURED_S)


def test_book_unconfigured_adds_capacity_and_takes_none_away() -> None:
    """A new coordinator without `Pool`: what it has instead of settings are defaults, and the pool stays."""
    told = Told(configured=False)
    for _ in range(3):
        told.step(UNCONFIGURED_S)
        orders = [order for slot in "abcd" for order in told.report(slot, "active")]
        orders += [order for slot in "ef" for order in told.report(slot, "standby")] + told.need()
        assert orders == []
        assert told.book.target(6, told.now) == (PoolTarget(6, blind=True), None)
    assert told.need(1) == ["promote e"]


def test_book_once_configured_takes_away_again() -> None:
    """What was spared for want of settings goes by them."""
    told = Told(configured=False)
    for _ in range(3):
        told.step(UNCONFIGURED_S)
        assert [*told.report("a", "active"), *told.report("b", "active"), *told.need()] == []
    told.book.configured = True
    assert told.step() == ["drain a"]
    assert not told.book.target(2, told.now)[0].blind


def test_book_blind_target_is_the_current_one() -> None:
    """A blind coordinator neither grows nor shrinks the pool, and takes no operator's order."""
    told = Told()
    told.report("a", "standby")
    target, command = told.book.target(3, told.now)
    assert (target.slots, target.blind, command) == (3, True, None)
    with suppress(ServeAppError):
        told.book.operate(Verb.PROMOTE, "a", "", told.now)
    assert told.book.command_for("a") is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["promoting", "standby"], []),
        (["active", "standby"], []),
        (["standby", "standby"], ["promote a"]),
        (["parking", "standby"], ["promote b"]),
        (["draining", "standby"], ["keep a"]),
        (["retiring", "standby"], ["promote b"]),
        (["failed", "standby"], ["promote b"]),
    ],
)
def test_book_restart_in_the_middle_of_a_transition_goes_on_from_the_reports(
    states: list[str], expected: list[str]
) -> None:
    """A coordinator with an empty book answers a need as its predecessor would have, in whatever state the slots are.

    ACTIVE: the predecessor may not have published it, so the routers have to act on the new map first.
    """
    told = Told(epoch=2)
    told.listed = {"a", "b"}
    told.need(1, seen=(1, 50))
    first = told.report("a", states[0], op=(1, 7))
    second = told.report("b", states[1], op=(1, 8))
    assert first == []
    assert second == []  # routers have not acted on the first map yet
    assert told.need(0 if states[0] == "active" else 1) == expected


def test_book_restart_while_draining_gives_the_permission_again() -> None:
    """The predecessor's permission may be lost: the new coordinator publishes, waits for the routers, permits."""
    told = Told(epoch=2)
    told.listed = {"a"}
    told.need(seen=(1, 50))
    told.report("a", "draining", op=(1, 7))
    assert told.need() == ["shut a"]


def test_book_old_coordinators_op_does_not_take_a_new_command() -> None:
    """A slot that reports the number of an older epoch has not taken the new command, however high that is."""
    told = sighted("standby", epoch=2)
    told.need(1)
    told.report("a", "standby", op=(1, 999))
    assert told.book.command_for("a") is not None


@pytest.mark.parametrize("heard", ["from a slot", "from a router"])
def test_book_restart_after_the_clock_was_set_back_is_obeyed(heard: str) -> None:
    """Its own epoch is lower than its predecessor's, which slots and routers would go on to follow."""
    told = Told(epoch=5)
    told.report("a", "standby", op=(9, 4) if heard == "from a slot" else (0, 0))
    told.need(1, seen=(9, 50) if heard == "from a router" else (0, 0))
    told.need(1)
    assert told.version > (9, 50)
    assert told.taken("a") > (9, 4)
    told.report("a", "promoting", op=told.taken("a"))
    assert told.book.command_for("a") is None


def test_book_that_hears_late_of_a_higher_epoch_says_everything_anew() -> None:
    """Roles and orders under the lower one were ignored: slots take none of them, routers none of the maps."""
    told = sighted("draining", "standby", "standby", epoch=5)
    assert told.book.command_for("a") is not None  # shut
    told.book.operate(Verb.PROMOTE, "b", "", told.now)
    ignored = told.taken("b")
    told.report("c", "standby", op=(9, 4))
    assert told.version > (9, 50)
    assert told.taken("b") > (9, 4)
    assert told.taken("b")[1] > ignored[1]  # the slot's link waits for a higher number
    told.need(seen=(9, 50))
    assert told.book.command_for("a") is None  # this router has not seen that a drains
    assert told.need() == ["shut a"]


# Slots and routers that go.


def test_book_slot_absent_for_a_second_is_leaving_and_replaced() -> None:
    """Serve removes without a word: a slot that all routers have lost leaves the map; a replacement is promoted."""
    told = sighted("active", "standby")
    told.book.live = told.book.live.model_copy(update={"models": {"m": LiveModel(min_active=1)}})
    told.listed = {"b"}
    told.need()
    told.step(ABSENT_S - 0.1)
    assert told.active == {"a"}
    told.need()
    assert told.step(0.2) == ["promote b"]
    assert told.active == set()


def test_book_slot_that_some_router_lists_is_present() -> None:
    """Routers learn at different times: one that still lists the slot is enough."""
    told = sighted("active")
    told.need(router="r2", slots=frozenset({"a"}))
    for _ in range(5):
        told.need(router="r1", slots=frozenset({"other"}))
        told.need(router="r2", slots=frozenset({"a"}))
        told.step(0.5)
    assert told.active == {"a"}


def test_book_empty_lists_are_a_restarting_controller() -> None:
    """A router without any slot says nothing about removals."""
    told = sighted("active")
    for _ in range(5):
        told.need(slots=frozenset())
        told.step(0.5)
    assert told.active == {"a"}


def test_book_slot_that_no_router_has_listed_yet_is_not_leaving() -> None:
    """A slot reports before Serve lists it."""
    told = sighted("active")
    told.report("b", "standby")
    told.listed = {"a"}
    for _ in range(5):
        told.need()
        told.step(0.5)
    assert told.need(HARD) == ["promote b"]


def test_book_slot_that_comes_back_is_not_leaving_any_more() -> None:
    """A slot that routers list again is used again."""
    told = sighted("active", "standby")
    told.listed = {"b"}
    told.need()
    told.step(ABSENT_S)
    told.need()
    assert told.active == set()
    told.listed = {"a", "b"}
    told.need()
    assert told.active == {"a"}


def test_book_silent_router_is_forgotten() -> None:
    """Without its lease a router neither needs anything nor keeps a slot from shutting."""
    told = sighted("draining", "standby")
    told.need(seen=(0, 0), router="gone")
    told.report("a", "draining", op=told.taken("a"))
    told.step(ROUTER_LEASE_S + 0.1)
    assert told.book.routers == {}


def test_book_suspects_are_silent_slots_and_those_found_dead() -> None:
    """Only these are worth asking Ray about; a slot that is dead leaves the book and the map."""
    told = sighted("active", "active", "standby")
    told.now += OVERDUE_S + 0.1
    told.report("b", "active")
    told.report("c", "standby")
    assert told.book.suspects(told.now) == ["a"]
    told.need(died=frozenset({"b"}))
    assert told.book.suspects(told.now) == ["a", "b"]
    told.book.on_dead("a")
    told.book.on_dead("a")
    told.step()
    assert told.active == {"b"}
    assert told.book.command_for("a") is None


def test_book_dead_slot_that_was_told_to_go_has_not_crashed() -> None:
    """What Serve removes reports until its process ends; what dies falls silent before Serve takes it off its list."""
    told = sighted("active", "standby", "retiring", "standby")
    told.step(0.25)
    told.need(slots=frozenset({"d"}))
    told.step(0.25)
    told.report("a", "active")
    assert [told.book.on_dead(slot) for slot in "abcd"] == [False, True, False, True]
    assert not told.book.on_dead("nobody")


# Golden check and breaker.


def test_book_breaker_turns_enforce_into_warn_after_failures_on_different_slots() -> None:
    """One slot failing three times is a bad slot; three slots are a bad check."""
    told = sighted("active")
    for _ in range(3):
        told.report("a", "failed", golden_failed=True)
    assert told.book.verify is Verify.ENFORCE
    told.report("b", "failed", golden_failed=True)
    told.report("c", "failed", golden_failed=True)
    assert told.book.breaker_open
    assert told.book.verify is Verify.WARN


@pytest.mark.parametrize(
    ("where", "counted"),
    [
        ([("g0",), ("g0",), ("g0",)], 1),  # Serve starts each new slot on the GPU that the last one has left
        ([("g0", "g1"), ("g1", "g2"), ("g1", "g0")], 1),
        ([("g0", "g1"), ("g2", "g3"), ("g1", "g2")], 2),
        ([("g0",), ("g1",), ("g2",)], 3),
        ([(), (), ()], 3),  # no GPU to suspect
    ],
)
def test_book_breaker_counts_hardware_not_slots(where: list[tuple[str, ...]], counted: int) -> None:
    """However many slots fail on one broken GPU, the check is not to blame."""
    told = sighted("active")
    for slot, gpus in zip("xyz", where, strict=True):
        told.report(slot, "failed", golden_failed=True, gpus=gpus)
        told.book.on_dead(slot)
    assert told.book.golden_failed == counted
    assert told.book.breaker_open is (counted == 3)


def test_book_breaker_takes_the_nodes_of_a_slot_that_spans_them_for_its_hardware() -> None:
    """Only its workers know their GPUs; a new slot in its place is on the same nodes."""
    told = sighted("active")
    for slot in "xyz":
        told.report(slot, "failed", golden_failed=True, ranks=("node0", "node1"))
    assert told.book.golden_failed == 1


def test_book_breaker_forgets_failures_but_not_slots_that_still_differ() -> None:
    """Failures hours apart are three bad GPUs; slots that differ and serve (it only warns) are still a bad check."""
    told = sighted("active")
    for slot in "xyz":
        told.report(slot, "failed", golden_failed=True)
        told.book.on_dead(slot)
        told.step(breaker.FORGET_S + 1)
    assert told.book.golden_failed == 0
    for _ in range(3):
        for slot in "xyz":
            told.report(slot, "active", golden_failed=True)
        told.step(breaker.FORGET_S)
    assert told.book.verify is Verify.WARN
    told.step(1)
    assert told.book.verify is Verify.ENFORCE


def test_book_breaker_leaves_other_settings_of_verify_alone() -> None:
    """`off` stays off."""
    told = sighted("active")
    told.book.live = told.book.live.model_copy(update={"verify": Verify.OFF})
    for slot in "abc":
        told.report(slot, "failed", golden_failed=True)
    assert told.book.breaker_open
    assert told.book.verify is Verify.OFF


# Operators and the autoscaler.


def test_book_operator_promotes_and_drains_by_hand() -> None:
    """An operator's order goes out like any other, also while the pool is frozen."""
    told = sighted("standby", "active")
    told.book.frozen = True
    told.book.operate(Verb.PROMOTE, "a", "", told.now)
    told.book.operate(Verb.DRAIN, "b", "", told.now)
    assert [told.slot_of(c) for n in "ab" if (c := told.book.command_for(n))] == ["a", "b"]
    assert told.active == set()


def test_book_operator_drain_of_a_needed_slot_promotes_a_standby_first() -> None:
    """Stepped right after the order, the book replaces the slot; once it drains, it would be the one called back."""
    told = sighted("active", "standby")
    told.book.live = told.book.live.model_copy(update={"models": {"m": LiveModel(min_active=1)}})
    told.book.operate(Verb.DRAIN, "a", "", told.now)
    assert told.step() == ["promote b"]
    assert told.report("a", "draining", op=told.taken("a")) == []
    assert told.need() == ["shut a"]


@pytest.mark.parametrize(
    ("verb", "slot"),
    [
        (Verb.PROMOTE, "b"),
        (Verb.DRAIN, "a"),
        (Verb.RETIRE, "a"),
        (Verb.PROMOTE, "nobody"),
    ],
)
def test_book_operator_order_that_cannot_be_changes_nothing(verb: Verb, slot: str) -> None:
    """What the state does not allow is refused, and nothing is ordered."""
    told = sighted("standby", "active")
    version = told.version
    with suppress(ServeAppError):
        told.book.operate(verb, slot, "", told.now)
    assert told.version == version
    assert [told.book.command_for(name) for name in ("a", "b", "nobody")] == [None, None, None]


def test_book_target_refills_after_the_delay() -> None:
    """A promoted standby is replaced when it has been missing for `refill_delay_s`."""
    told = sighted("active", "active", refill_delay_s=3)
    assert told.book.target(2, told.now)[0].slots == 2
    assert told.book.target(2, told.now + 2.9)[0].slots == 2
    assert told.book.target(2, told.now + 3.0)[0].slots == 3


def test_book_target_gives_room_away_once() -> None:
    """The policy asks more often than the nodes are looked at: what it has just asked for has taken its part."""
    told = sighted("active", "active", max=8, standby=3, refill_delay_s=0)
    told.book.outlook = Outlook(room=1, possible=8, asked=2)
    assert [told.book.target(current, told.now)[0].slots for current in (2, 3, 3)] == [3, 3, 3]
    told.book.outlook = Outlook(room=1, possible=8, asked=3)  # another place has become free
    assert [told.book.target(current, told.now)[0].slots for current in (3, 4)] == [4, 4]


def test_book_target_retires_one_standby_and_follows_when_it_has_left() -> None:
    """Shrinking: one standby is told to leave, and only its replacement makes the target drop."""
    told = sighted("active", "standby", "standby")
    told.book.target(3, told.now)
    target, command = told.book.target(3, told.now + 5)
    assert command is not None
    assert (target.slots, command.verb, told.slot_of(command)) == (3, Verb.RETIRE, "c")
    assert told.book.target(3, told.now + 6) == (replace(target), None)
    told.report("c", "retiring", op=told.taken("c"))
    assert told.book.target(3, told.now + 7)[0].slots == 3
    told.book.on_dead("c")
    assert told.book.target(3, told.now + 8)[0].slots == 2


def test_book_target_frozen_is_the_current_one() -> None:
    """A frozen pool keeps its size."""
    told = sighted("active", "active")
    told.book.frozen = True
    assert told.book.target(2, told.now + 99)[0].slots == 2


def test_since_measures_without_a_break() -> None:
    """A break starts the time anew."""
    since = book_module.Since()
    assert since.update(True, 1.0) == 0.0
    assert since.update(True, 3.0) == 2.0
    assert since.update(False, 4.0) is None
    assert since.update(True, 5.0) == 0.0


def test_book_repr_tells_states_and_counts() -> None:
    """The repr is what a failing test or a log shows."""
    assert repr(sighted("active", "standby").book) == "<PoolBook v1 [a active, b standby] 1 routers>"


def test_take_missing_remembers_slots_that_were_wanted_for_a_moment() -> None:
    """Serve wants more slots than report: missing, also when it has stopped wanting them until somebody looks."""
    told = Told()
    told.report("a", "active")
    told.book.target(1, told.now)
    assert not told.book.take_missing()
    told.book.target(2, told.now)
    assert told.book.take_missing()
    assert told.book.take_missing()
    told.book.target(1, told.now)
    assert not told.book.take_missing()
    told.book.target(2, told.now)
    told.book.target(1, told.now)
    assert told.book.take_missing()
    assert not told.book.take_missing()
    told.book.target(2, told.now)
    told.report("b", "starting")  # it has a place, whatever it still has to do
    told.book.take_missing()
    assert not told.book.take_missing()


def test_book_slot_that_is_cut_off_is_replaced_and_welcome_back() -> None:
    """Ray believes in its node for a minute; nobody is sent there meanwhile, and a standby takes over."""
    told = sighted("active", "standby")
    told.book.live = told.book.live.model_copy(update={"models": {"m": LiveModel(min_active=1)}})
    active, standby = sorted(told.book.slots, key=lambda slot: told.book.slots[slot].report.state)
    assert told.active == {active}
    told.now += SILENT_S + 0.1
    assert told.report(standby, "standby") == [f"promote {standby}"]
    assert told.active == set()
    told.report(active, "active")
    assert told.active == {active}


def test_book_all_slots_silent_at_once_is_our_own_lateness() -> None:
    """A coordinator that was kept from running hears nobody; no slot is to blame."""
    told = sighted("active", "standby")
    told.book.live = told.book.live.model_copy(update={"models": {"m": LiveModel(min_active=1)}})
    assert told.step(60) == []
    assert told.active == {"a"}
