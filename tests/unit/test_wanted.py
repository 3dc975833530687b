"""Since when a slot has been wanted, and what it had to wait for."""

from __future__ import annotations

import pytest

from serve_app.pool import wanted
from serve_app.pool.capacity import Trouble
from serve_app.pool.messages import Wish
from serve_app.pool.wanted import Wanted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock, as its only entry."""
    now = [1000.0]
    monkeypatch.setattr(wanted.time, "time", lambda: now[0])
    return now


def test_new_slots_take_the_oldest_wish_first(clock: list[float]) -> None:
    """One each; taken back the newest first; unknown where none is left."""
    wishes = Wanted()
    for at in (1000.0, 1001.0, 1002.0):
        clock[0] = at
        wishes.raised(1)
    wishes.raised(-1)
    assert [wishes.oldest() for _ in range(3)] == [Wish(1000.0), Wish(1001.0), Wish()]


def test_what_was_wanted_long_ago_was_given_up(clock: list[float]) -> None:
    """It is not this slot's wish."""
    wishes = Wanted()
    wishes.raised(1)
    clock[0] += wanted.FORGET_S + 1
    wishes.raised(1)
    assert wishes.oldest() == Wish(clock[0])


@pytest.mark.parametrize(
    ("troubles", "waited_for"),
    [
        ([], ""),
        ([Trouble.WAITING], "resources"),
        ([Trouble.INFEASIBLE], "node"),
        ([Trouble.INFEASIBLE, Trouble.WAITING], "node"),  # the node came, and was taken for a moment
        ([Trouble.WAITING, Trouble.INFEASIBLE], "node"),
    ],
)
def test_a_slot_says_what_it_waited_for(clock: list[float], troubles: list[Trouble], waited_for: str) -> None:
    """A node that was not there, or resources that others held."""
    wishes = Wanted()
    wishes.raised(1)
    for trouble in troubles:
        clock[0] += 1
        wishes.missing(trouble)
    assert wishes.oldest() == Wish(1000.0, waited_for)
    clock[0] += 1
    wishes.raised(1)
    assert wishes.oldest().waited_for == "", "the next one found a place at once"
