"""One simulated request, from its arrival to its end."""

from __future__ import annotations

from enum import StrEnum

from serve_app.pool.dispatch import Ticket


class Outcome(StrEnum):
    OPEN = "open"
    SERVED = "served"
    REFUSED = "refused"
    """503: too many were held, or no slot had room in time."""
    LOST = "lost"
    """Its slot died."""


class Request:
    """Times in seconds of the simulation.

    Attributes:
        number: in order of arrival; ties are broken by it, so that a run can be repeated.
        first_s: when its first token came; None before. held: no slot had room when it came.
    """

    __slots__ = (
        "arrived_s",
        "first_s",
        "held",
        "model",
        "number",
        "outcome",
        "output_tokens",
        "prompt_tokens",
        "ticket",
    )

    def __init__(self, number: int, arrived_s: float, model: str, prompt_tokens: int, output_tokens: int) -> None:
        self.number, self.arrived_s, self.model = number, arrived_s, model
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.first_s: float | None = None
        self.held = False
        self.outcome = Outcome.OPEN
        self.ticket: Ticket | None = None
