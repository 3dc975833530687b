"""Traces of requests: when each arrived, and how many tokens went in and came out. Pure but for reading the file.

The columns are those of the Azure LLM inference traces (AzurePublicDataset, 2023): TIMESTAMP, ContextTokens,
GeneratedTokens; a column `Model` may say which model each request is for.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from serve_app.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MODEL_COLUMN = "Model"
# What a chat template and the request's own number may add to a prompt, in tokens; SmolLM2's template adds 30.
TEMPLATE_TOKENS = 64


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at_s: its arrival, in seconds since the first one.
        model: the trace's own name for it, empty if the trace has none.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    model: str = ""


def read(path: Path) -> list[TraceRequest]:
    """All requests of a trace, by arrival. Raises ConfigError that names the line and the column."""
    try:
        with path.open(newline="") as lines:
            return _parsed(csv.DictReader(lines), path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"trace {path}: cannot be read: {reason}") from None


def _parsed(rows: csv.DictReader[str], path: Path) -> list[TraceRequest]:
    missing = [column for column in COLUMNS if column not in (rows.fieldnames or ())]
    if missing:
        raise ConfigError(f"trace {path}: no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
    found = [(_when(row, path, rows.line_num), _request(row, path, rows.line_num)) for row in rows]
    if not found:
        raise ConfigError(f"trace {path}: no requests in it")
    found.sort(key=lambda pair: pair[0])
    first = found[0][0]
    return [replace(request, at_s=(when - first).total_seconds()) for when, request in found]


def _when(row: dict[str, str], path: Path, line: int) -> datetime:
    value = row["TIMESTAMP"] or ""
    try:
        return datetime.fromisoformat(value).replace(tzinfo=None)
    except ValueError:
        raise ConfigError(f"trace {path}, line {line}: TIMESTAMP is {value!r}, no date and time") from None


def _request(row: dict[str, str], path: Path, line: int) -> TraceRequest:
    prompt, output = (_tokens(row, column, path, line) for column in COLUMNS[1:])
    return TraceRequest(0.0, prompt, output, row.get(MODEL_COLUMN) or "")


def _tokens(row: dict[str, str], column: str, path: Path, line: int) -> int:
    value = row[column] or ""
    if not value.isdecimal():
        raise ConfigError(f"trace {path}, line {line}: {column} is {value!r}, no number of tokens")
    return int(value)


def window(requests: Sequence[TraceRequest], start_s: float, seconds: float, speed: float) -> list[TraceRequest]:
    """A part of a trace, its arrivals as they are to be sent, counted from the part's beginning.

    Args:
        start_s: where in the trace it begins. seconds: how long it is to last when it is replayed.
        speed: how many times faster than they came the requests are sent.
    """
    return [
        replace(request, at_s=(request.at_s - start_s) / speed)
        for request in requests
        if 0 <= request.at_s - start_s < seconds * speed
    ]


def scale(requests: Iterable[TraceRequest], context: int) -> float:
    """By what all token counts are multiplied, at most 1, so that the longest request fits into a model's context.

    One factor for all keeps the proportions: between requests, and between what goes in and what comes out.

    Args:
        context: the model's, in tokens; 0 if it is not known, which scales nothing.
    """
    longest = max((request.prompt_tokens + request.output_tokens for request in requests), default=0)
    room = context - TEMPLATE_TOKENS
    if context and room < 2:
        raise ConfigError(
            f"a context of {context} tokens has no room for a request beside {TEMPLATE_TOKENS} of a template"
        )
    return min(1.0, room / longest) if context and longest else 1.0


def scaled(request: TraceRequest, factor: float) -> TraceRequest:
    """A request with its token counts multiplied, but at least one token in and one out."""
    prompt, output = (max(1, math.floor(count * factor)) for count in (request.prompt_tokens, request.output_tokens))
    return replace(request, prompt_tokens=prompt, output_tokens=output)
