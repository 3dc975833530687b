"""What each request of a replay met, as a row, and all rows summed up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.cli.burst_client import Answer
from serve_app.percentile import percentile
from serve_app.traces import TraceRequest

# On which path a request got its slot; empty where the server does not say whether it was held.
ACTIVE, HELD, COLD = "active", "held", "cold"
PATHS = (ACTIVE, HELD, COLD)
PERCENTS = (50, 95, 99)
DIGITS = 4


@dataclass(frozen=True)
class Row:
    """One request. Times in seconds.

    Attributes:
        arrival_s: when it was due, since the replay began. late_s: by how much the client sent it later, its own fault.
        prompt_tokens, output_tokens: what was asked for; served_prompt_tokens, served_output_tokens: what the server
            says it was, None if it does not.
        outcome: `served`, `refused` (503), `failed`, or `cut` where the replay was interrupted before it ended.
        path: `active`: a slot took it at once; `held`: it waited for one; `cold`: it waited, and the slot that took it
            had not finished starting when it arrived; empty: not known.
        held_s, first_token_s, total_s: see Answer. chunk_s: from sending to each event with text.
    """

    index: int
    arrival_s: float
    late_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    status: int
    outcome: str
    path: str
    slot: str
    held_s: float | None
    first_token_s: float | None
    total_s: float | None
    served_prompt_tokens: int | None
    served_output_tokens: int | None
    chunk_s: tuple[float, ...]
    error: str

    @property
    def token_s(self) -> float | None:
        """Time per output token after the first; None of a single one, or if the server does not count."""
        return time_per_token_s(self.served_output_tokens, self.chunk_s)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def time_per_token_s(tokens: int | None, chunk_s: Sequence[float]) -> float | None:
    """Seconds per output token after the first; None of a single one, or if the server does not count.

    Args:
        tokens: as the server counts them; None if it does not. chunk_s: from sending to each event with text.
    """
    if tokens is None or tokens < 2 or len(chunk_s) < 2:
        return None
    return (chunk_s[-1] - chunk_s[0]) / (tokens - 1)


def row(index: int, request: TraceRequest, sent_s: float, answer: Answer, usable: Mapping[str, float] | None) -> Row:
    """The row of one request.

    Args:
        sent_s: when it was sent, since the replay began.
        usable: since when each slot had finished starting, on the same clock; None if the pool cannot be seen.
    """
    outcome = "cut" if answer.outcome == "running" else answer.outcome
    return Row(
        index=index,
        arrival_s=round(request.at_s, DIGITS),
        late_s=round(sent_s - request.at_s, DIGITS),
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        status=answer.status,
        outcome=outcome,
        path=path(answer, sent_s, usable),
        slot=answer.slot,
        held_s=answer.held_s,
        first_token_s=_rounded(answer.first_token_s),
        total_s=_rounded(answer.total_s),
        served_prompt_tokens=answer.prompt_tokens,
        served_output_tokens=answer.output_tokens,
        chunk_s=tuple(round(at, DIGITS) for at in answer.chunk_s),
        error=answer.error if outcome != "cut" else "",
    )


def path(answer: Answer, sent_s: float, usable: Mapping[str, float] | None) -> str:
    """On which path a request got its slot; see Row."""
    if answer.held_s is None or not answer.slot:
        return ""
    if answer.held_s <= 0:
        return ACTIVE
    return COLD if usable is not None and usable.get(answer.slot, sent_s) > sent_s else HELD


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


@dataclass(frozen=True)
class Line:
    """A line of the table: how many requests went one way, and their times to the first token in seconds."""

    name: str
    requests: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    slowest_s: float | None


def lines(rows: Sequence[Row]) -> list[Line]:
    """All requests, then those of each path that occurs, and of each model if there are several."""
    models = sorted({row.model for row in rows})
    named = [("all", list(rows)), *((name, [row for row in rows if row.path == name]) for name in PATHS)]
    if len(models) > 1:
        named += [(name, [row for row in rows if row.model == name]) for name in models]
    return [_line(name, some) for name, some in named if some]


def _line(name: str, rows: Sequence[Row]) -> Line:
    first_s = first_tokens(rows)
    values = [percentile(first_s, percent) for percent in (*PERCENTS, 100)]
    return Line(name, len(rows), *values)


def first_tokens(rows: Iterable[Row]) -> list[float]:
    """Seconds to the first token of the requests that were served."""
    return [row.first_token_s for row in rows if row.outcome == "served" and row.first_token_s is not None]


def outcomes(rows: Iterable[Row]) -> dict[str, int]:
    """How many requests ended in which way; all four are there."""
    counts = Counter(row.outcome for row in rows)
    return {name: counts[name] for name in ("served", "refused", "failed", "cut")}
