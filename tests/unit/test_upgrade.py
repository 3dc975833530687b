"""Who is exchanged before a rollout, and when a new slot's start has ended; the whole: tests/serve/test_upgrade.py."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import EngineError
from serve_app.pool.lifecycle import Event, Lifecycle, State
from serve_app.pool.rollout import Seen, exchange, make_way
from serve_app.slot.joining import join

A, S, P = State.ACTIVE, State.STANDBY, State.PROMOTING


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ({"a": A, "b": S}, ("b", "a")),
        ({"a": A, "b": S, "c": S}, ("c", "a")),  # the one that Serve stops last
        ({"a": A, "b": S, "c": A}, ("b", "a")),
        ({"a": S, "b": A}, None),  # as it should be
        ({"a": A, "b": A}, None),  # nobody is free
        ({"a": A, "b": P}, None),
        ({"a": A}, None),
        ({"b": S}, None),  # the first is not this coordinator's
        ({}, None),
    ],
)
def test_first_slot_to_go_is_exchanged_for_the_last_standby(
    states: dict[str, State], wanted: tuple[str, str] | None
) -> None:
    """Only where it is active and a standby can take its place."""
    assert exchange(["a", "b", "c"], seen(states)) == wanted


def seen(states: dict[str, State], holds: str = "m") -> dict[str, Seen]:
    return {name: Seen(state, "m", frozenset({holds})) for name, state in states.items()}


def test_standby_must_hold_the_model() -> None:
    """Of several models a slot may hold some only: the last standby is not always the one."""
    slots = seen({"a": A, "b": S, "c": S})
    assert exchange(["a", "b", "c"], slots | seen({"c": S}, "other")) == ("b", "a")
    assert exchange(["a", "b", "c"], slots | seen({"b": S, "c": S}, "other")) is None


def test_nothing_runs_nothing_is_exchanged() -> None:
    """A first deployment, and a builder that is called outside of a cluster."""
    assert exchange([], {}) is None
    make_way({})


class Link:
    """Answers in turn; the last answer stays. An entry may also be what happens to the slot."""

    def __init__(self, life: Lifecycle, *answers: bool | Event | None) -> None:
        self.life, self.answers, self.asked = life, list(answers), 0
        self.promoting = asyncio.Event()

    async def is_needed(self) -> bool | None:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not isinstance(answer, Event):
            return answer
        self.life.apply(answer)
        self.promoting.set()
        return True


def standby() -> Lifecycle:
    life = Lifecycle("k3x9")
    life.apply(Event.STARTED)
    return life


def test_slot_that_is_not_needed_has_started_at_once() -> None:
    """One answer, and it stays standby; before the coordinator can tell, it is asked again."""
    life = standby()
    link = Link(life, None, False)
    asyncio.run(join(life, link))
    assert (link.asked, life.state) == (2, S)


def test_slot_that_is_needed_has_started_once_it_is_active() -> None:
    """While it is being promoted nobody is asked."""
    life = standby()
    link = Link(life, True, Event.PROMOTE)

    async def run() -> None:
        joining = asyncio.create_task(join(life, link))
        await link.promoting.wait()
        assert not joining.done()
        life.apply(Event.PROMOTED)
        await joining

    asyncio.run(run())
    assert life.state is A


def test_slot_whose_first_promotion_fails_has_not_started() -> None:
    """Serve then keeps the old version's slots."""
    life = standby()
    link = Link(life, Event.FAIL)
    with pytest.raises(EngineError, match="k3x9 could not be promoted"):
        asyncio.run(join(life, link))


def test_silent_coordinator_keeps_no_slot_from_starting() -> None:
    """At the end of the patience it is a standby like any other."""
    life = standby()
    asyncio.run(join(life, Link(life, None), patience_s=0.0))
    assert life.state is S
