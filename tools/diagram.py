"""The slot's state machine as a mermaid diagram, drawn from the table itself: `python -m tools.diagram`."""

from __future__ import annotations

from serve_app.pool.lifecycle import TRANSITIONS, Event, State


def mermaid() -> str:
    """One line per legal move; FAIL is legal almost everywhere, so it is one note instead of a line per state."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.STARTING}"]
    for state, moves in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {event}" for event, target in moves.items() if event is not Event.FAIL]
        lines += [] if moves else [f"    {state} --> [*]"]
    failing = ", ".join(state for state, moves in TRANSITIONS.items() if Event.FAIL in moves)
    lines.append(f"    note right of {State.FAILED} : {Event.FAIL}, from {failing}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid())
