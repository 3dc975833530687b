"""Which slot takes a request, who waits, and how much is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import Overloaded
from serve_app.live import Hold
from serve_app.pool.dispatch import AFFINITY_SLACK, OTHERS_TTL_S, Dispatch, Ticket
from serve_app.pool.messages import Serving


def dispatch(active: dict[str, int] | None = None, max_held: int = 256) -> Dispatch:
    made = Dispatch(Hold(max_held_requests=max_held))
    made.set_roles(serving(active or {}))
    made.set_present(active or {})
    return made


def serving(active: Mapping[str, int], model: str = "m") -> dict[str, Serving]:
    """Active slots with the requests that each may be given, all of one model."""
    return {slot: Serving(model, hard) for slot, hard in active.items()}


def ticket(arrived_s: float = 0.0, deadline_s: float = 60.0, session: str = "", model: str = "m") -> Ticket:
    return Ticket(arrived_s, deadline_s, model, session)


def test_dispatch_least_loaded_slot_takes_the_request() -> None:
    """Requests go to the slot with the fewest in flight, by name where that is equal."""
    pool = dispatch({"a": 2, "b": 2})
    assert [pool.offer(ticket(), 0) for _ in range(4)] == ["a", "b", "a", "b"]


def test_dispatch_full_slots_hold_the_request_until_one_finishes() -> None:
    """Beyond hard capacity a ticket waits; an end makes room for the oldest."""
    pool = dispatch({"a": 1})
    pool.offer(ticket(), 0)
    waiting = ticket(1.0)
    assert pool.offer(waiting, 1.0) is None
    assert pool.release(2.0) == []
    pool.finished("a")
    assert pool.release(3.0) == [waiting]
    assert waiting.slot == "a"


def test_dispatch_queue_is_first_come_first_served() -> None:
    """Tickets are placed in the order of their arrival, however they were offered."""
    pool = dispatch()
    tickets = [ticket(at) for at in (3.0, 1.0, 2.0)]
    for one in tickets:
        pool.offer(one, 3.0)
    pool.set_roles(serving({"a": 9}))
    pool.set_present(["a"])
    assert [one.arrived_s for one in pool.release(4.0)] == [1.0, 2.0, 3.0]


def test_dispatch_newcomer_does_not_overtake_the_queue() -> None:
    """While an older ticket waits a newer one waits behind it, even if there is room by now."""
    pool = dispatch()
    pool.offer(ticket(1.0), 1.0)
    pool.set_roles(serving({"a": 1}))
    pool.set_present(["a"])
    assert pool.offer(ticket(2.0), 2.0) is None
    assert [one.arrived_s for one in pool.release(2.0)] == [1.0]


def test_dispatch_retry_keeps_its_place() -> None:
    """A ticket that Serve hands back goes before those that arrived later."""
    pool = dispatch({"a": 1})
    pool.offer(ticket(1.0), 1.0)
    pool.offer(ticket(2.0), 2.0)
    pool.finished("a")  # refused by the slot: it was full after all
    pool.observed("a", 1, 3.0)
    retry = ticket(1.0)
    assert pool.offer(retry, 3.0) is None
    assert pool.release(3.0 + 2 * OTHERS_TTL_S) == [retry]


def test_dispatch_full_queue_raises_overloaded_with_a_hint() -> None:
    """Held requests are bounded; the refusal says how many are held and when to come back."""
    pool = dispatch(max_held=1)
    pool.offer(ticket(), 0)
    with pytest.raises(Overloaded, match=r"1 requests are already held; try again in 5 s") as refused:
        pool.offer(ticket(), 0)
    assert refused.value.http_status == 503
    assert pool.need(0)["m"][0] == 1


def test_dispatch_no_holding_allowed_still_places_what_fits() -> None:
    """With max_held_requests 0 a request is placed or refused, never held."""
    pool = dispatch({"a": 1}, max_held=0)
    assert pool.offer(ticket(), 0) == "a"
    with pytest.raises(Overloaded):
        pool.offer(ticket(), 0)


def test_dispatch_deadline_in_the_past_is_refused_even_with_room() -> None:
    """A ticket whose deadline has passed is refused: nobody waits for its answer any more."""
    pool = dispatch({"a": 1})
    with pytest.raises(Overloaded, match="in time"):
        pool.offer(ticket(0.0, deadline_s=5.0), 5.0)
    assert pool.load("a", 5.0) == 0


@pytest.mark.parametrize("missing", ["role", "replica"])
def test_dispatch_slot_needs_a_role_and_a_replica(missing: str) -> None:
    """A slot is routable only if the coordinator calls it active and Serve lists it."""
    pool = dispatch()
    pool.set_roles({} if missing == "role" else {"a": 1})
    pool.set_present([] if missing == "replica" else ["a"])
    assert pool.routable == []
    assert pool.offer(ticket(), 0) is None


def test_dispatch_session_stays_on_one_slot_within_the_slack() -> None:
    """Requests of one session go to one slot while it is at most a little busier than the least busy one."""
    pool = dispatch({"a": 20, "b": 20, "c": 20})
    first = {pool.offer(ticket(session="x"), 0) for _ in range(AFFINITY_SLACK + 1)}
    assert len(first) == 1
    assert {pool.offer(ticket(session="x"), 0)} != first


def test_dispatch_session_moves_only_when_its_slot_goes() -> None:
    """When another slot goes away sessions stay; only those of that slot move."""
    sessions = [f"user-{i}" for i in range(50)]

    def homes(*slots: str) -> dict[str, str | None]:
        return {session: dispatch(dict.fromkeys(slots, 9)).offer(ticket(session=session), 0) for session in sessions}

    before, after = homes("a", "b", "c"), homes("a", "b")
    assert set(before.values()) == {"a", "b", "c"}
    assert all(after[session] == home for session, home in before.items() if home != "c")


def test_dispatch_load_of_other_proxies_counts_and_expires() -> None:
    """What others have on a slot fills it in our eyes for a short while, then we try it again."""
    pool = dispatch({"a": 3})
    pool.offer(ticket(), 0)
    pool.observed("a", 3, 1.0)
    assert pool.load("a", 1.0) == 3
    assert pool.offer(ticket(1.0), 1.0) is None
    assert pool.load("a", 2.0) == 1
    assert len(pool.release(2.0)) == 1


def test_dispatch_refused_request_waits_as_need_instead_of_going_back() -> None:
    """A slot filled by other proxies refuses ours: until that is old news it is full, also once ours has ended.

    Found by AnyOrder in test_interleavings.py: Serve tells the slot's count first and the end of the refused request
    afterwards, so the slot seemed to have room for exactly the request that it had refused.
    """
    pool = dispatch({"a": 3})
    assert pool.offer(ticket(), 0) == "a"
    pool.observed("a", 3, 1.0)
    retry = ticket()
    assert pool.offer(retry, 1.0) is None
    pool.finished("a")
    assert pool.release(1.0) == []
    assert pool.need(1.0)["m"][0] == 1
    assert pool.release(2.0) == [retry]


def test_dispatch_accepted_request_leaves_the_slot_as_it_is() -> None:
    """The last place of a slot was ours: when one of ours ends there is room at once."""
    pool = dispatch({"a": 1})
    pool.offer(ticket(), 0)
    pool.observed("a", 1, 1.0)
    pool.accepted("a")
    pool.finished("a")
    assert pool.offer(ticket(), 1.0) == "a"


def test_dispatch_own_requests_are_not_counted_as_others() -> None:
    """A slot's number of ongoing requests includes ours, which are not counted twice."""
    pool = dispatch({"a": 9})
    for _ in range(3):
        pool.offer(ticket(), 0)
    pool.observed("a", 2, 0)  # said before our third one was there
    assert pool.load("a", 0) == 3


def test_dispatch_give_up_of_a_held_ticket_leaves_the_queue() -> None:
    """A caller who goes away makes the queue shorter and nothing else."""
    pool = dispatch()
    held = ticket()
    pool.offer(held, 0)
    pool.give_up(held)
    pool.give_up(held)
    assert pool.need(0) == {}


def test_dispatch_give_up_of_a_placed_ticket_frees_its_place_once() -> None:
    """Giving up twice frees one place, not two."""
    pool = dispatch({"a": 9})
    first, second = ticket(), ticket()
    pool.offer(first, 0)
    pool.offer(second, 0)
    pool.give_up(first)
    pool.give_up(first)
    assert pool.load("a", 0) == 1


def test_dispatch_need_is_count_and_age_of_the_oldest() -> None:
    """Need is a level: how many wait, and for how long the oldest has."""
    pool = dispatch()
    for at in (1.0, 4.0):
        pool.offer(ticket(at), at)
    assert pool.need(6.0) == {"m": (2, 5.0)}
    assert repr(pool) == "<Dispatch 0 routable, 0 in flight, 2 waiting>"


def test_dispatch_a_ticket_goes_to_a_slot_of_its_model() -> None:
    """Never to another one's, however empty; one that names no model goes to any."""
    pool = dispatch()
    pool.set_roles({"a": Serving("m", 9), "b": Serving("n", 9)})
    pool.set_present(["a", "b"])
    assert [pool.offer(ticket(model="n"), 0) for _ in range(3)] == ["b", "b", "b"]
    assert pool.offer(ticket(model="other"), 0) is None
    assert pool.offer(ticket(model=""), 0) == "a"


def test_dispatch_a_burst_on_one_model_does_not_starve_another() -> None:
    """Each model has its own queue and its own bound: neither its length nor its head is in another's way."""
    pool = dispatch(max_held=2)
    pool.set_roles({"b": Serving("n", 1)})
    pool.set_present(["b"])
    for _ in range(2):
        assert pool.offer(ticket(model="m"), 0) is None
    with pytest.raises(Overloaded, match="2 requests are already held"):
        pool.offer(ticket(model="m"), 0)
    assert pool.offer(ticket(model="n"), 0) == "b"
    later = ticket(1.0, model="n")
    assert pool.offer(later, 1.0) is None
    assert pool.need(2.0) == {"m": (2, 2.0), "n": (1, 1.0)}
    pool.finished("b")
    assert pool.release(2.0) == [later]


def from_tenant(tenant: str, arrived_s: float = 0.0) -> Ticket:
    return Ticket(arrived_s, 60.0, "m", tenant=tenant)


def test_dispatch_tenants_take_turns() -> None:
    """A hundred requests of one API key do not come before the first of another one."""
    pool = dispatch()
    many = [from_tenant("x", at / 10) for at in range(4)]
    few = [from_tenant("y", 5.0), from_tenant("y", 6.0)]
    for one in [*many, *few]:
        pool.offer(one, 7.0)
    pool.set_present(["a"])
    order: list[Ticket] = []
    for hard in range(1, 7):
        pool.set_roles(serving({"a": hard}))
        order += pool.release(8.0)
    assert order == [many[0], few[0], many[1], few[1], many[2], many[3]]


def test_dispatch_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    """The newest of the tenant with most goes, and only if the newcomer's has less than that afterwards."""
    pool = dispatch(max_held=3)
    first, second, third = (from_tenant("x", at) for at in (1.0, 2.0, 3.0))
    for one in (first, second, third):
        pool.offer(one, 4.0)
    with pytest.raises(Overloaded):
        pool.offer(from_tenant("x"), 4.0)
    assert pool.offer(from_tenant("y", 4.0), 4.0) is None
    assert [one.evicted for one in (first, second, third)] == [False, False, True]
    with pytest.raises(Overloaded):
        pool.offer(from_tenant("y", 4.0), 4.0)
    assert pool.need(4.0)["m"][0] == 3


slots = st.sampled_from(["a", "b", "c"])
models = st.sampled_from(["m", "n"])
roles = st.dictionaries(slots, st.builds(Serving, models, st.integers(1, 3)))
steps = st.one_of(
    st.tuples(st.just("offer"), st.integers(0, 5), st.tuples(models, st.sampled_from(["", "x", "y"]))),
    st.tuples(st.just("finished"), st.integers(0, 20), st.none()),
    st.tuples(st.just("give_up"), st.integers(0, 20), st.none()),
    st.tuples(st.just("roles"), roles, st.frozensets(slots)),
    st.tuples(st.just("observed"), slots, st.integers(0, 4)),
    st.tuples(st.just("time"), st.sampled_from([0.01, 0.15, 1.0]), st.none()),
)


@given(st.lists(steps, max_size=60))
def test_dispatch_any_sequence_keeps_its_promises(sequence: list[tuple[str, object, object]]) -> None:
    """Never a non-active, over-full or other model's slot; in flight is placed minus ended; no placeable head left."""
    pool = dispatch({"a": 2}, max_held=4)
    now, active, present = 0.0, serving({"a": 2}), frozenset("a")
    placed: list[Ticket] = []
    held: list[Ticket] = []

    def check_placed(new: list[Ticket], loads: dict[str, float]) -> None:
        for one in new:
            assert one.slot is not None
            assert one.slot in present
            assert active[one.slot].model == one.model
            assert loads[one.slot] < active[one.slot].hard
            loads[one.slot] += 1
            placed.append(one)

    for step, first, second in sequence:
        loads = {slot: pool.load(slot, now) for slot in "abc"}
        match step, first, second:
            case "offer", int(back), (str(model), str(session)):
                one = ticket(now - back, now + 60, session, model)
                try:
                    check_placed([one] if pool.offer(one, now) else [], loads)
                    held += [one] if one.slot is None else []
                except Overloaded:
                    assert [other.model for other in held].count(model) == 4
            case "finished", int(index), _ if placed:
                gone = placed.pop(index % len(placed))
                assert gone.slot
                pool.finished(gone.slot)
            case "give_up", int(index), _ if placed or held:
                everyone = placed + held
                gone = everyone[index % len(everyone)]
                (placed if gone in placed else held).remove(gone)
                pool.give_up(gone)
            case "roles", dict(new_roles), frozenset(new_present):
                active, present = new_roles, new_present
                pool.set_roles(active)
                pool.set_present(present)
            case "observed", str(slot), int(ongoing):
                pool.observed(slot, ongoing, now)
            case "time", float(seconds), _:
                now += seconds
        released = pool.release(now) if step != "offer" else []
        held = [one for one in held if one not in released]
        check_placed(released, {slot: pool.load(slot, now) - [t.slot for t in released].count(slot) for slot in "abc"})
        mine = Counter(one.slot for one in placed)
        assert all(pool._mine[slot] == mine[slot] for slot in "abc")
        assert {model: count for model, (count, _) in pool.need(now).items()} == Counter(one.model for one in held)
        for model in {one.model for one in held} if step != "offer" else ():
            serves = [slot for slot in pool.routable if active[slot].model == model]
            assert all(pool.load(slot, now) >= active[slot].hard for slot in serves)
