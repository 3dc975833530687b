"""Nodes that go: what is active on them moves elsewhere, as far as there is an elsewhere."""

from __future__ import annotations

from dataclasses import replace

from serve_app.config import Tier
from serve_app.live import LiveSettings, SlotCounts
from serve_app.pool import decide
from serve_app.pool.decide import Order
from serve_app.pool.evacuate import evacuate
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Verb
from serve_app.pool.view import ModelView, SlotView, View

HOST, READY = {"m": Tier.HOST}, {"m": Tier.READY}
STANDBY = SlotView("s", State.STANDBY, "m", HOST)
GOING = SlotView("g", State.ACTIVE, "m", READY, node_goes=True, serve_moves=True)
STAYING = SlotView("a", State.ACTIVE, "m", READY)
PROMOTED, DRAINED = "the node of an active slot is drained", "its node is drained"


def orders(*slots: SlotView, min_active: int = 1, frozen: bool = False) -> list[Order]:
    return evacuate(View(slots=slots, models=(ModelView("m", min_active),), frozen=frozen))


def test_standby_elsewhere_is_promoted_while_the_slot_that_goes_still_serves() -> None:
    """First the replacement; the drain waits for it."""
    assert orders(GOING, STANDBY) == [Order(Verb.PROMOTE, "s", PROMOTED, "m")]
    assert orders(GOING, replace(STANDBY, pending=Verb.PROMOTE)) == []


def test_slot_that_goes_drains_once_its_replacement_is_active() -> None:
    """And a drain that has been ordered is not ordered again."""
    assert orders(GOING, STAYING, STANDBY) == [Order(Verb.DRAIN, "g", DRAINED)]
    assert orders(replace(GOING, pending=Verb.DRAIN), STAYING, STANDBY) == []


def test_without_a_standby_elsewhere_the_slot_that_goes_keeps_serving() -> None:
    """A standby on a node that goes too is no replacement."""
    assert orders(GOING) == []
    assert orders(GOING, replace(STANDBY, node_goes=True, serve_moves=True)) == []


def test_load_says_how_many_are_replaced() -> None:
    """Two slots go, with requests for two: both are replaced; with requests for one: one is."""
    more = replace(STANDBY, slot="t", holds=READY), STANDBY, replace(STANDBY, slot="u")
    busy = replace(GOING, in_flight=8), replace(GOING, slot="h", in_flight=1)
    promoted = [order.slot for order in orders(*busy, *more)]
    assert promoted == ["t", "s"], "the warmest first"
    assert [order.slot for order in orders(GOING, replace(GOING, slot="h"), *more)] == ["t"]


def test_pool_that_may_have_no_active_slot_just_drains() -> None:
    """`min_active: 0` and nothing in flight."""
    assert orders(GOING, STANDBY, min_active=0) == [Order(Verb.DRAIN, "g", DRAINED)]


def test_standby_that_serve_does_not_move_retires() -> None:
    """One of its nodes goes, but not the first, which is the only one that Serve looks at."""
    assert orders(STAYING, replace(STANDBY, node_goes=True)) == [Order(Verb.RETIRE, "s", "one of its nodes is drained")]
    assert orders(STAYING, replace(STANDBY, node_goes=True, serve_moves=True)) == []


def test_frozen_pool_stays_as_it_is() -> None:
    """The operator's word counts for more."""
    assert orders(GOING, STANDBY, frozen=True) == []


def test_need_is_answered_elsewhere_first_and_never_by_calling_a_drain_back() -> None:
    """A slot that drains because its node goes would only have to drain again."""
    leaving = replace(GOING, state=State.DRAINING)
    near, far = replace(STANDBY, slot="near", holds=READY, node_goes=True), replace(STANDBY, slot="far")
    settings = LiveSettings(slots=SlotCounts(min=3, max=3))

    def first(*slots: SlotView) -> Order:
        return decide.decide(View(slots=slots, models=(ModelView("m"),)), settings, {})[0]

    assert first(leaving, near, far) == Order(Verb.PROMOTE, "far", "fewer active slots than min_active", "m")
    assert first(leaving, near).slot == "near", "better than nothing"


def test_models_are_moved_each_by_its_own_load_and_no_standby_twice() -> None:
    """Two models go with one node, and one standby elsewhere holds both: the first one gets it."""
    both = {"m": Tier.HOST, "n": Tier.HOST}
    slots = GOING, replace(GOING, slot="h", model="n"), replace(STANDBY, holds=both)
    view = View(slots=slots, models=(ModelView("m"), ModelView("n")))
    assert evacuate(view) == [Order(Verb.PROMOTE, "s", PROMOTED, "m")]
