"""What the pool decides, from a view in words: `view("standby active:8")` has slots a (standby) and b (active)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from serve_app.config import Tier
from serve_app.live import LiveSettings, SlotCounts
from serve_app.pool.decide import Order, decide, is_quiet, next_target, wanted_slots
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Verb, Version
from serve_app.pool.view import ModelView, RouterView, SlotView, View

NOW: Version = (1, 5)
OLD: Version = (1, 4)
WORD = re.compile(
    r"(?P<state>[a-z]+)(:(?P<in_flight>\d+))?(\+(?P<at_gate>\d+))?(@(?P<tier>[a-z]+))?(!(?P<pending>[a-z]+))?(?P<left>~)?"
)


def slot(name: str, word: str) -> SlotView:
    """`state:in_flight+at_gate@tier!pending~`, all but the state optional; `~` means leaving."""
    match = WORD.fullmatch(word)
    assert match, word
    state = State(match["state"])
    return SlotView(
        name,
        state,
        model="m",
        holds={"m": Tier(match["tier"] or "host")},
        in_flight=int(match["in_flight"] or 0),
        at_gate=int(match["at_gate"] or 0),
        pending=Verb(match["pending"]) if match["pending"] else None,
        unrouted=NOW if state is State.DRAINING else None,
        leaving=bool(match["left"]),
    )


def view(
    words: str, *waiting: int, stale: int = 0, min_active: int = 0, tier: Tier = Tier.HOST, **other: object
) -> View:
    """Slots a, b, c ... as `words` say; one router per number of waiting requests, a stale one if `stale`."""
    routers = [RouterView({"m": count}, NOW) for count in waiting or (0,)]
    routers += [RouterView({"m": stale}, OLD)] if stale else []
    slots = tuple(slot("abcdefgh"[i], word) for i, word in enumerate(words.split()))
    model = ModelView("m", min_active, tier)
    return View(slots=slots, models=(model,), routers=tuple(routers), version=NOW, **other)  # type: ignore[arg-type]


def settings(**slots: object) -> LiveSettings:
    return LiveSettings(slots=SlotCounts.model_validate({"min": 1, "max": 4, "standby": 1} | slots))


def orders(seen: View, quiet_s: float | None = None) -> list[str]:
    quiet = {} if quiet_s is None else {"m": quiet_s}
    return [f"{order.verb} {order.slot}" for order in decide(seen, settings(), quiet)]


# Promotion.


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("standby standby"), []),
        (view("standby standby", 1), ["promote a"]),
        (view("standby standby", 10), ["promote a"]),
        (view("standby standby", 11), ["promote a", "promote b"]),
        (view("standby standby", 6, 5), ["promote a", "promote b"]),
        (view("standby standby", 99), ["promote a", "promote b"]),
        (view("standby!promote standby", 10), []),
        (view("promoting standby", 10), []),
        (view("promoting standby", 11), ["promote b"]),
        (view("promoting~ standby", 1), ["promote b"]),
        (view("draining:1!keep standby", 10), []),
        (view("active:10 standby", 1), ["promote b"]),
        (view("starting parking failed retiring standby~", 5), []),
        (view("standby!retier standby!retire", 5), []),
    ],
)
def test_decide_held_requests_promote_just_enough(seen: View, expected: list[str]) -> None:
    """One standby per `hard` held requests, less those that are already coming."""
    assert orders(seen) == expected


def test_decide_order_says_why() -> None:
    """An order carries its reason in words, for the trace and the log."""
    assert decide(view("standby", 3), settings(), {}) == [Order(Verb.PROMOTE, "a", "3 requests held", "m")]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("active:7 standby"), []),
        (view("active:8 standby"), ["promote b"]),
        (view("active:8 active:7 standby"), []),
        (view("active:8 active:8 standby standby"), ["promote c"]),
        (view("active:8 promoting standby"), []),
        (view("active:8!drain active:7 standby"), []),
        (view("active:8~ active:1 standby"), []),
    ],
)
def test_decide_soft_capacity_promotes_before_anyone_waits(seen: View, expected: list[str]) -> None:
    """A standby is promoted when the active slots hold on average as much as `soft`."""
    assert orders(seen) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("standby standby", min_active=1), ["promote a"]),
        (view("standby standby standby", min_active=2), ["promote a", "promote b"]),
        (view("promoting standby", min_active=1), []),
        (view("standby!promote standby", min_active=1), []),
        (view("active~ standby", min_active=1), ["promote b"]),
        (view("failed standby", min_active=1), ["promote b"]),
        (view("active!drain standby", min_active=1), ["promote b"]),
        (view("standby standby", 1, min_active=1), ["promote a"]),
    ],
)
def test_decide_min_active_is_kept(seen: View, expected: list[str]) -> None:
    """Fewer than `min_active` active or coming slots: standbys make up for it; one promotion answers need as well."""
    assert orders(seen) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view("standby draining:2", 1), ["keep b"]),
        (view("standby draining:2", 11), ["keep b", "promote a"]),
        (view("draining:1 draining:3 standby", 1), ["keep b"]),
        (view("standby draining:2!shut", 1), ["keep b"]),
        (view("standby draining:2~", 1), ["promote a"]),
        (view("standby parking", 1), ["promote a"]),
    ],
)
def test_decide_keep_goes_before_promote(seen: View, expected: list[str]) -> None:
    """A drain whose gate is still open is called back first, the busiest one of several."""
    assert [order for order in orders(seen) if not order.startswith("shut")] == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("standby@disk standby@host standby@ready", ["promote c"]),
        ("standby@disk standby@host", ["promote b"]),
        ("standby@host standby@host", ["promote a"]),
    ],
)
def test_decide_warmest_standby_is_promoted_first(words: str, expected: list[str]) -> None:
    """Ready before host before disk, then by name."""
    assert orders(view(words, 1)) == expected


def test_decide_late_arrivals_promote_their_own_slot() -> None:
    """Requests at the gate of a standby can be served nowhere else."""
    assert orders(view("standby standby+2")) == ["promote b"]
    assert orders(view("active standby+1 standby+1", min_active=1)) == ["promote b", "promote c"]
    assert orders(view("standby+1!promote promoting+1 draining+1 parking+1")) == ["shut c"]


def test_decide_stale_router_does_not_count() -> None:
    """A router that has not acted on the newest role map is about to look again."""
    assert view("standby", 2, 3, stale=9).need("m") == 5
    assert orders(view("standby", stale=9)) == []


# Shutting, demotion, tiers.


def test_decide_drained_slot_may_shut_once_every_router_has_seen_it() -> None:
    """Permission to shut waits for each leased router; without routers nobody can send anything."""
    assert orders(view("draining:1", 0)) == ["shut a"]
    assert orders(view("draining:1", 0, stale=1)) == []
    assert orders(View(slots=(slot("a", "draining"),), models=(ModelView("m", 0),), version=NOW)) == ["shut a"]


@pytest.mark.parametrize("changed", [{"shut_sent": True}, {"unrouted": None}, {"pending": Verb.KEEP}])
def test_decide_shut_is_not_repeated_or_mixed_with_another_command(changed: dict[str, object]) -> None:
    """A slot that has the permission, was never taken out of the map, or has another command gets none."""
    drained = SlotView(**{**vars(slot("a", "draining")), **changed})
    assert orders(View(slots=(drained,), models=(ModelView("m", 0),), version=NOW)) == []


def test_decide_frozen_pool_only_ends_what_was_begun() -> None:
    """Frozen: no promotion, no demotion, no change of tier; a drain that is under way may still end."""
    assert orders(view("standby+1 standby@disk active:9 active draining", 5, frozen=True), quiet_s=99) == ["shut e"]


@pytest.mark.parametrize(
    ("words", "min_active", "quiet"),
    [
        ("active active", 1, True),
        ("active", 1, False),
        ("active", 0, True),
        ("active:4 active:4", 1, False),
        ("active:2 active:2", 1, True),
        ("active:3 active:2", 1, False),
        ("active active promoting", 1, False),
        ("active active standby!promote", 1, False),
        ("active active!drain", 1, False),
        ("active active~", 1, False),
        ("active:1", 0, False),
    ],
)
def test_is_quiet_one_slot_more_than_the_load_needs(words: str, min_active: int, quiet: bool) -> None:
    """Quiet: above the minimum, nothing coming, and the others would be at most half as full as soft capacity."""
    seen = view(words, min_active=min_active)
    assert is_quiet(seen, settings(), seen.models[0]) is quiet


def test_is_quiet_not_while_requests_wait() -> None:
    """Held requests mean that the pool is not quiet."""
    seen = view("active active", 1)
    assert not is_quiet(seen, settings(), seen.models[0])


def test_decide_quiet_pool_demotes_the_emptiest_after_the_delay() -> None:
    """After `demote_after_s` of quiet the active slot with the fewest requests drains."""
    seen = view("active:2 active:1 active:1", min_active=1)
    assert orders(seen, quiet_s=9.9) == []
    assert orders(seen, quiet_s=10) == ["drain b"]
    assert orders(seen, quiet_s=None) == []


@pytest.mark.parametrize("words", ["active active draining", "active active active!drain"])
def test_decide_demotion_is_one_at_a_time(words: str) -> None:
    """While one slot drains, or has been told to, no other one is."""
    seen = view(words, stale=1, min_active=1)
    assert orders(seen, quiet_s=99) == []


def test_decide_demotion_respects_min_active() -> None:
    """The last slots of the minimum stay."""
    assert orders(view("active active", min_active=2), quiet_s=99) == []


def test_decide_retier_is_one_at_a_time_and_only_when_nothing_is_missing() -> None:
    """One standby of another tier is changed at a time, and not while capacity is short."""
    assert orders(view("standby@disk standby@disk")) == ["retier a"]
    assert orders(view("standby@disk standby@disk!retier")) == []
    assert orders(view("standby@disk parking")) == []
    assert orders(view("standby@disk standby@disk", 1)) == ["promote a"]
    assert orders(view("standby standby@ready", tier=Tier.READY)) == ["retier a"]


# How many slots.


@pytest.mark.parametrize(
    ("words", "counts", "wanted"),
    [
        ("active standby", {}, 2),
        ("active active standby", {}, 3),
        ("active promoting standby!promote", {}, 4),
        ("active active active active", {}, 4),
        ("active", {"min": 3}, 3),
        ("standby", {"standby": 2}, 3),
        ("active!drain standby", {"standby": 0}, 1),
    ],
)
def test_wanted_slots_is_busy_plus_standby_within_bounds(words: str, counts: dict[str, int], wanted: int) -> None:
    """Active and coming ones, at least `min_active`, plus the standbys to keep, between min and max."""
    seen = view(words, min_active=1, standby=counts.get("standby", 1))
    assert wanted_slots(seen, settings(**counts)) == wanted


def test_wanted_slots_has_one_in_place_of_each_fenced_slot() -> None:
    """Beyond `max` too, since those serve nobody; not for one that leaves."""
    words = "active standby starting starting starting~"
    seen = view(words)
    held = replace(seen, slots=tuple(replace(slot, fenced=slot.state is State.STARTING) for slot in seen.slots))
    assert wanted_slots(seen, settings(max=3, min=3)) == 3
    assert wanted_slots(held, settings(max=3, min=3)) == 5
    assert next_target(held, settings(max=3, min=3), 5, None, 99.0) == (5, None), "they are not dropped again"
    assert next_target(replace(held, room=1), settings(max=3, min=3), 3, 0.0, None) == (4, None)


@pytest.mark.parametrize(
    ("counts", "room", "short_s", "target"),
    [
        ({}, 1, 0.0, 3),
        ({}, 0, 99.0, 2),
        ({"standby": 2}, 1, 0.0, 3),
        ({"standby": 2}, 9, 0.0, 4),
        ({"refill": "buy"}, 0, 0.0, 3),
        ({"refill": "off"}, 1, 99.0, 2),
        ({"refill_delay_s": 5}, 1, 4.9, 2),
        ({"refill_delay_s": 5}, 1, 5.0, 3),
        ({"refill_delay_s": 5}, 1, None, 2),
    ],
)
def test_next_target_refill_follows_the_rule(
    counts: dict[str, object], room: int, short_s: float | None, target: int
) -> None:
    """Missing standbys are replaced as far as they fit, on new nodes too, or never, after the delay."""
    seen = view("active active", room=room, standby=counts.get("standby", 1))
    assert next_target(seen, settings(**counts), 2, short_s, None) == (target, None)


def test_next_target_below_the_minimum_needs_no_rule() -> None:
    """The minimum is restored whatever `refill` says, but no more than the minimum."""
    seen = view("active active", room=0)
    assert next_target(seen, settings(min=3, refill="off"), 2, 0.0, None) == (3, None)
    assert next_target(view("active active active"), settings(min=3, refill="off"), 2, 0.0, None) == (3, None)


@pytest.mark.parametrize(
    ("words", "current", "counts", "possible", "target"),
    [
        ("active standby", 2, {"min": 2, "standby": 3}, 2, 2),
        ("active standby", 2, {"min": 2, "standby": 3}, 3, 3),
        ("active standby", 4, {"min": 2, "standby": 3}, 2, 2),  # a node has gone, and two slots with it
        ("active standby starting", 4, {"min": 2, "standby": 3}, 2, 3),
        ("active", 1, {"min": 3}, 1, 3),
        ("active", 3, {"min": 3}, 1, 3),
        ("active standby", 2, {"min": 2, "standby": 3, "refill": "buy"}, 2, 4),
        ("active standby", 4, {"min": 2, "standby": 3, "refill": "buy"}, 2, 4),
    ],
)
def test_next_target_asks_for_no_slot_that_can_never_exist(
    words: str, current: int, counts: dict[str, object], possible: int, target: int
) -> None:
    """Beyond `slots.min`, what the nodes could not even hold empty is not asked for, unless nodes may be bought."""
    seen = view(words, possible=possible, standby=counts.get("standby", 1))
    assert next_target(seen, settings(**counts), current, 99.0, None) == (target, None)


def test_next_target_never_retires_a_slot_that_exists_for_lack_of_nodes() -> None:
    """Slots that run prove that they can exist, whatever the nodes look like for a moment."""
    assert next_target(view("active standby standby", possible=1), settings(), 3, None, 99.0) == (3, None)
    seen = view("active standby standby standby", possible=0, standby=3)
    assert next_target(seen, settings(min=2, standby=3), 4, None, None) == (4, None)


def retired(words: str, current: int, surplus_s: float | None = 99.0, **counts: object) -> tuple[int, str | None]:
    target, order = next_target(
        view(words, min_active=1), settings(**({"shrink_after_s": 10} | counts)), current, None, surplus_s
    )
    return target, f"{order.verb} {order.slot}" if order else None


def test_next_target_never_shrinks_by_default() -> None:
    """Without `shrink_after_s` a surplus stays."""
    assert retired("active standby standby", 3, shrink_after_s=None) == (3, None)


def test_next_target_shrink_waits_and_then_retires_the_coldest_standby() -> None:
    """After the patience the coldest standby is told to leave; the target stays until it has left."""
    words = "active standby@ready standby@disk standby@host"
    assert retired(words, 4, surplus_s=9.9) == (4, None)
    assert retired(words, 4) == (4, "retire c")


@pytest.mark.parametrize("leaver", ["retiring", "standby!retire", "failed"])
def test_next_target_stays_until_the_leaver_has_left(leaver: str) -> None:
    """Serve still counts a slot that fails its health check as running: a lower target would cost another one."""
    assert retired(f"active standby {leaver}", 3) == (3, None)


@pytest.mark.parametrize("unborn", ["", "starting", "retiring~"])
def test_next_target_drops_by_slots_that_do_not_run(unborn: str) -> None:
    """Serve drops slots first that do not run yet: the replacement of the one that has left."""
    assert retired(f"active standby {unborn}", 3) == (2, None)


def test_next_target_shrinks_one_standby_at_a_time_and_never_an_active_slot() -> None:
    """While one leaves no other is told to; without a standby nothing happens."""
    assert retired("active standby standby retiring", 4) == (4, None)
    assert retired("active active!drain draining", 3) == (3, None)


def test_next_target_above_the_maximum_shrinks_at_once_to_the_maximum() -> None:
    """A lowered `max` needs no patience, and goes no further than `max` without any."""
    assert retired("active standby standby standby", 4, surplus_s=0.0, max=3, shrink_after_s=None) == (4, "retire d")
    assert retired("active standby", 6, surplus_s=0.0, shrink_after_s=None) == (4, None)
    assert retired("active standby", 6, surplus_s=0.0) == (4, None)


def test_next_target_frozen_pool_retires_nobody() -> None:
    """Frozen: no standby is told to leave."""
    seen = view("active standby standby", frozen=True)
    assert next_target(seen, settings(shrink_after_s=1), 3, None, 99.0) == (3, None)
