"""The diagram of the slot's states, drawn from the table."""

from __future__ import annotations

from pathlib import Path

from serve_app.pool.lifecycle import TRANSITIONS, Event
from tools.diagram import mermaid


def test_mermaid_has_one_line_per_legal_move() -> None:
    """Every legal move but FAIL is one arrow; FAIL is one note."""
    arrows = {line.strip() for line in mermaid().splitlines() if "-->" in line}
    moves = {
        f"{state} --> {target}: {event}"
        for state, events in TRANSITIONS.items()
        for event, target in events.items()
        if event is not Event.FAIL
    }
    assert arrows == moves | {"[*] --> starting", "failed --> [*]"}
    assert mermaid().splitlines()[-1].strip() == (
        "note right of failed : fail, from starting, standby, promoting, active, draining, parking, retiring"
    )


def test_readme_shows_the_diagram_as_it_is() -> None:
    """`python -m tools.diagram` prints what stands there."""
    assert mermaid() in (Path(__file__).resolve().parents[2] / "README.md").read_text()
