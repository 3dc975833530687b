"""Several models, one pool: who gets a standby, and which slot one model may take from another."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.config import Tier
from serve_app.live import LiveSettings, SlotCounts
from serve_app.pool.decide import decide
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Verb
from serve_app.pool.view import ModelView, RouterView, SlotView, View

WORD = re.compile(r"(?P<state>[a-z]+)(=(?P<model>[xyz]))?(:(?P<load>\d+))?(>(?P<taker>[xyz]))?(@(?P<stayed>\d+))?")
SETTINGS = LiveSettings(slots=SlotCounts(min=1, max=8, standby=1, keep_model_s=5))
ALL = {"x": Tier.HOST, "y": Tier.HOST, "z": Tier.HOST}


def slot(name: str, word: str) -> SlotView:
    """`state=model:load>taker@stayed`: x if no model is named; it has stayed for long if nothing is said."""
    match = WORD.fullmatch(word)
    assert match, word
    state = State(match["state"])
    return SlotView(
        name,
        state,
        model=match["model"] or "x",
        holds=ALL,
        in_flight=int(match["load"] or 0),
        taken_for=match["taker"] or "",
        stayed_s=float(match["stayed"] or 99),
        unrouted=None,
    )


def view(
    words: str, *, min_active: dict[str, int] | None = None, weights: dict[str, float] | None = None, **need: int
) -> View:
    """Slots a, b, c ... as `words` say; requests held by model."""
    models = tuple(ModelView(m, (min_active or {}).get(m, 0), Tier.HOST, (weights or {}).get(m, 1)) for m in "xyz")
    slots = tuple(slot("abcdefgh"[i], word) for i, word in enumerate(words.split()))
    return View(slots=slots, models=models, routers=(RouterView(need, (0, 0)),))


def orders(seen: View) -> list[str]:
    return [" ".join(filter(None, (o.verb, o.slot, o.model))) for o in decide(seen, SETTINGS, {})]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("standby=y standby=x", y=1), ["promote a y"]),
        (view("standby standby", x=1, y=1), ["promote a x", "promote b y"]),
        (view("standby promoting=y", y=1), []),
        (view("standby active=x:9", x=1, y=1), ["promote a y"]),  # who has least comes first
        (view("standby active=x:9", weights={"x": 9.0}, x=1, y=1), ["promote a y"]),
        (view("active=x:9 standby", weights={"y": 0.1}, x=1, y=1), ["promote b y"]),
    ],
)
def test_a_standby_goes_to_who_needs_it_most(seen: View, expected: list[str]) -> None:
    """By model; one that has nothing comes before one that has something."""
    assert orders(seen) == expected


def test_the_standby_that_costs_least_is_taken() -> None:
    """A warm engine before a cold one; not one whose awake engine must fall asleep first; the one that others need
    least."""
    base = slot("a", "standby")
    cold = SlotView(**{**vars(base), "holds": {"y": Tier.DISK}})
    busy = SlotView(**{**vars(base), "slot": "b", "holds": {"x": Tier.READY, "y": Tier.HOST}})
    wide = SlotView(**{**vars(base), "slot": "c", "holds": ALL})
    fits = SlotView(**{**vars(base), "slot": "d", "holds": {"y": Tier.HOST, "z": Tier.HOST}})
    lacks = SlotView(**{**vars(base), "slot": "e", "holds": {"x": Tier.READY}})
    for slots, expected in (
        ((cold, busy, wide, fits, lacks), "d"),
        ((cold, busy, wide, lacks), "c"),
        ((cold, busy, lacks), "b"),
        ((cold, lacks), "a"),
    ):
        seen = view("standby", y=1)
        assert orders(View(slots=slots, models=seen.models, routers=seen.routers)) == [f"promote {expected} y"]
    assert orders(View(slots=(lacks,), models=seen.models, routers=seen.routers)) == []


def test_of_equal_standbys_the_one_on_another_node_is_taken() -> None:
    """A node that is lost then takes less of the model with it."""
    here = replace(slot("a", "active=y:9"), node="n1")
    standbys = (replace(slot("b", "standby"), node="n1"), replace(slot("c", "standby"), node="n2"))
    seen = view("", y=1)
    assert orders(View(slots=(here, *standbys), models=seen.models, routers=seen.routers)) == ["promote c y"]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("active=x", y=1), ["drain a y"]),  # idle
        (view("active=x:1 active=x:2", y=1), ["drain a y"]),  # the other one can take its load
        (view("active=x:5 active=x:5", y=1), ["drain a y"]),  # both busy, but y has none
        (view("active=x:5 active=x:5 active=y:9", y=1), []),  # two against one: it would tip the balance
        (view("active=x:5 active=x:5 active=x:5 active=y:9", y=1), ["drain a y"]),
        (view("active=x:5 active=x:5 active=y:9", weights={"y": 3.0}, y=1), ["drain a y"]),
        (view("active=x:5 active=x:5 active=x:5 active=y:9", weights={"x": 3.0}, y=1), []),
        (view("active=x:1@4", y=1), []),  # it has only just come to x
        (view("active=x@4", y=1), ["drain a y"]),  # but has nothing left to do there
        (view("active=x@0", y=1), []),  # what was held for x may still be on its way
        (view("active=x:9", y=1), ["drain a y"]),  # turns on a single slot
        (view("active=x", min_active={"x": 1}, y=1), []),
        (view("active=x active=x", min_active={"x": 1}, y=1), ["drain a y"]),
        (view("active=x parking=x", y=1), []),  # standby in a moment, without emptying another one
        (view("active=x draining=x:3", y=1), ["drain a y"]),  # the drain may take long
        (view("active=x:1 active=z:0", y=1), ["drain b y"]),  # the one that drains soonest
        (view("active=x draining=x:3>y", y=1), []),  # one is on its way already
        (view("active=x parking=x>y", y=1), []),
        (view("active=x draining=x:3>y", y=11), ["drain a y"]),  # but it is not enough
        (view("active=x:9 active=x:9", x=5, y=1), ["drain a y"]),
        (view("active=x:9 active=x:9 active=x:9 active=x:9", y=31), ["drain a y", "drain b y"]),  # half, not all
    ],
)
def test_a_slot_of_another_model_is_taken_over(seen: View, expected: list[str]) -> None:
    """What it does not need, or has beyond its share; never below `min_active`, never right after it came."""
    assert [order for order in orders(seen) if not order.startswith("shut")] == expected


def test_without_settings_only_a_need_takes_a_slot_over() -> None:
    """Before `Pool` has said what they are: the minimum of y is a guess, its held requests are not."""
    minimum = view("active=x active=x", min_active={"y": 1})
    assert orders(minimum) == ["drain a y"]
    assert orders(replace(minimum, configured=False)) == []
    assert orders(replace(view("active=x active=x", y=1), configured=False)) == ["drain a y"]


def test_a_drain_for_another_model_is_called_back_only_if_that_one_does_not_need_it_any_more() -> None:
    """Else the two would pull it to and fro."""
    assert orders(view("draining=x:3>y", x=1, y=1)) == []
    assert orders(view("draining=x:3>y", x=1)) == ["keep a"]


@pytest.mark.parametrize("seen", [view("draining=y:1>x", y=9), view("draining=y:1>x", min_active={"y": 1})])
def test_a_drain_for_requests_at_the_gate_is_not_called_back(seen: View) -> None:
    """What is held for y can wait for another slot; they cannot."""
    drained = replace(seen.slots[0], at_gate=1, gate_model="x")
    assert orders(replace(seen, slots=(drained,))) == []
    assert orders(replace(seen, slots=(replace(drained, at_gate=0),))) == ["keep a"]  # they have gone away
    assert orders(replace(seen, slots=(replace(drained, gate_model="y"),))) == ["keep a"]


def test_requests_at_the_gate_of_a_slot_that_has_moved_on_bring_it_back() -> None:
    """They were routed there before it changed its model and can be served nowhere else."""
    moved = replace(slot("a", "active=y@0"), at_gate=1, gate_model="x")
    seen = view("")
    assert orders(View(slots=(moved,), models=seen.models)) == ["drain a x"]
    asleep = replace(moved, state=State.STANDBY)
    assert orders(View(slots=(asleep,), models=seen.models)) == ["promote a x"]


def test_a_slot_that_has_lost_an_engine_makes_room_for_a_whole_one_when_nobody_needs_it() -> None:
    """Only a standby, only beside a whole one, one at a time."""
    lost = SlotView(**{**vars(slot("a", "standby")), "holds": {"y": Tier.HOST}, "impaired": True})
    whole, seen = slot("b", "standby"), view("")
    assert orders(View(slots=(lost,), models=seen.models)) == []
    assert orders(View(slots=(lost, whole), models=seen.models)) == ["retire a"]
    going = SlotView(**{**vars(slot("c", "standby")), "pending": Verb.RETIRE})
    assert orders(View(slots=(lost, whole, going), models=seen.models)) == []


words = st.sampled_from(["active=x:9", "active=y:9", "active=z:9"])


@given(st.lists(words, min_size=1, max_size=6), st.dictionaries(st.sampled_from("xyz"), st.integers(1, 30)))
@example(["active=z:9", *["active=y:9"] * 5], {"x": 21})  # not z's only one, which would take it back
def test_a_slot_that_changes_hands_does_not_go_back_at_once(slots: list[str], held: dict[str, int]) -> None:
    """Carried out, the drains leave nobody a reason to take the same slot back, unless its owner has nothing left."""
    seen = view(" ".join(slots), **held)
    taken = {o.slot: o.model for o in decide(seen, SETTINGS, {}) if o.verb is Verb.DRAIN}
    after = [f"active={taken.get(s.slot, s.model)}:9" for s in seen.slots]
    again = {o.slot: o.model for o in decide(view(" ".join(after), **held), SETTINGS, {}) if o.verb is Verb.DRAIN}
    for s in seen.slots:
        if s.slot in taken and again.get(s.slot) == s.model:
            assert f"active={s.model}:9" not in after
