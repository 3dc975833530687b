"""The slot's state machine, against a list of legal moves written by hand."""

from __future__ import annotations

import pytest

from serve_app.errors import IllegalTransition
from serve_app.pool.lifecycle import GATE_OPEN, HISTORY_LENGTH, TRANSITIONS, Event, Lifecycle, State

LEGAL = [
    ("starting", "started", "standby"),
    ("starting", "fail", "failed"),
    ("standby", "promote", "promoting"),
    ("standby", "retier", "parking"),
    ("standby", "retire", "retiring"),
    ("standby", "fail", "failed"),
    ("promoting", "promoted", "active"),
    ("promoting", "give_up", "parking"),
    ("promoting", "fail", "failed"),
    ("active", "drain", "draining"),
    ("active", "fail", "failed"),
    ("draining", "keep", "active"),
    ("draining", "shut", "parking"),
    ("draining", "fail", "failed"),
    ("parking", "asleep", "standby"),
    ("parking", "fail", "failed"),
    ("retiring", "fail", "failed"),
]
ILLEGAL = sorted({(state, event) for state in State for event in Event} - {(state, event) for state, event, _ in LEGAL})


def at(state: State) -> Lifecycle:
    life = Lifecycle("slot-1", now_s=0.0)
    life.state = state
    return life


@pytest.mark.parametrize(("state", "event", "target"), LEGAL)
def test_lifecycle_legal_event_moves(state: str, event: str, target: str) -> None:
    """Each legal move ends in the state that the list says, at the time it is given."""
    life = at(State(state))
    assert life.allows(Event(event))
    assert life.apply(Event(event), now_s=5.0) is State(target)
    assert (life.state, life.since_s) == (State(target), 5.0)


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_lifecycle_illegal_event_raises_and_changes_nothing(state: State, event: Event) -> None:
    """Any other event raises, naming slot, state, event and history, and leaves the slot as it was."""
    life = at(state)
    before = vars(life).copy()
    assert not life.allows(event)
    with pytest.raises(IllegalTransition) as raised:
        life.apply(event, now_s=5.0)
    assert vars(life) == before
    for part in ("slot-1", state, f"'{event}'", "history: starting@"):
        assert part in str(raised.value)


def test_lifecycle_table_names_every_state_and_event() -> None:
    """No state or event can be added without a line in the list above."""
    states = set(State)
    for state, _, target in LEGAL:
        states -= {State(state), State(target)}
    assert not states
    assert set(Event) == {Event(event) for _, event, _ in LEGAL}
    assert set(TRANSITIONS) == set(State)
    assert sum(len(events) for events in TRANSITIONS.values()) == len(LEGAL)


def test_lifecycle_failed_is_terminal_and_reachable_from_everywhere() -> None:
    """Nothing leads out of FAILED, and FAIL is legal everywhere else."""
    assert TRANSITIONS[State.FAILED] == {}
    assert all(TRANSITIONS[state][Event.FAIL] is State.FAILED for state in State if state is not State.FAILED)


def test_lifecycle_retiring_is_irrevocable() -> None:
    """A retiring slot can only fail: it never serves again."""
    assert set(TRANSITIONS[State.RETIRING].values()) == {State.FAILED}


def test_lifecycle_gate_is_open_only_while_the_engine_is_awake() -> None:
    """The states with an open gate are those in which the engine is awake and verified."""
    assert {State.ACTIVE, State.DRAINING} == GATE_OPEN


def test_lifecycle_history_tells_the_moves_with_their_times() -> None:
    """The history lists each move with its seconds before the last one."""
    life = Lifecycle("s", now_s=10.0)
    life.apply(Event.STARTED, now_s=12.0)
    life.apply(Event.PROMOTE, now_s=12.5)
    assert life.history() == "starting@-2.5s started>standby@-0.5s promote>promoting@+0.0s"


def test_lifecycle_history_is_bounded() -> None:
    """A slot that lives for weeks keeps its last moves only."""
    life = at(State.ACTIVE)
    for step in range(100):
        life.apply(Event.DRAIN if step % 2 == 0 else Event.KEEP, now_s=float(step))
    assert len(life.history().split()) == HISTORY_LENGTH
