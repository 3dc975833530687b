"""What can be compared: the times in a saved ledger, or in the rows of a replay. Pure but for reading the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serve_app.cli import ledgers
from serve_app.cli.replay_rows import time_per_token_s
from serve_app.differences import Sample, independent
from serve_app.errors import UnusableFile
from serve_app.telemetry.ledger import Transition, in_reading_order, medians, parts
from serve_app.telemetry.stages import Stage

KINDS = (Stage.COLD_START, Stage.PROMOTION, Stage.DEMOTION)
# A rollout is judged by these: how long until a slot can serve, and how long a caller waits.
JUDGED_KINDS = (Stage.COLD_START, Stage.PROMOTION)
# One request's rows of a replay: docs/load.md and `cli/replay_rows.py` say what they mean.
ROW_KEYS = frozenset({"index", "arrival_s", "outcome", "path", "first_token_s", "total_s", "held_s", "chunk_s"})
PATHS = ("active", "held", "cold")

Key = tuple[str, ...]
Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One thing that was measured, often.

    Attributes:
        key: what; of a stage, the transition's kind and the stages around it, then its own name. Of workers' stages
            each transition's slowest rank counts, as the others wait for it.
        sample: None if it never happened.
        unit: `s`, or `share` of what failed, from 0 to 1.
        judged: a rollout is judged by it; the rest explains it.
    """

    key: Key
    sample: Sample | None
    unit: Literal["s", "share"] = "s"
    judged: bool = False


@dataclass(frozen=True)
class Measurements:
    """One file's. `what`: `ledger` or `replay`."""

    what: Literal["ledger", "replay"]
    measured: tuple[Measured, ...]
    sent: tuple[tuple[Any, ...], ...] = ()
    """Of a replay: what was asked for, request by request. Two replays of one trace have the same."""


def read(path: Path, block_s: float) -> Measurements:
    """Raises UnusableFile.

    Args:
        block_s: requests of a replay that arrive within so many seconds are taken to share their fate.
    """
    text = ledgers.text_of(path)
    try:
        is_ledger = "transitions" in json.loads(text)
    except (ValueError, TypeError):
        is_ledger = False
    return of_ledger(ledgers.parse(path, text)) if is_ledger else of_replay(_rows(path, text), block_s)


def of_ledger(transitions: Iterable[Transition]) -> Measurements:
    """Of each kind the whole, then every stage, in reading order; those that failed count as failed, not as fast.

    Models that share a pool are kept apart; one alone is not named, so that it can be compared with its successor.
    """
    found: list[Measured] = []
    entries = list(transitions)
    for kind in KINDS:
        of_kind = [one for one in entries if one["kind"] == kind]
        models = sorted({one["model"] for one in of_kind})
        for model in models:
            name = str(kind) if len(models) == 1 else f"{kind} {model}"
            found += _of_kind(kind, name, [one for one in of_kind if one["model"] == model])
    return Measurements("ledger", tuple(found))


def _of_kind(kind: Stage, name: str, entries: list[Transition]) -> list[Measured]:
    good = [one for one in entries if not one["error"]]
    judged = kind in JUDGED_KINDS
    failed = independent([float(bool(one["error"])) for one in entries])
    whole = independent([one["duration_s"] for one in good]) if good else None
    found = [
        Measured((name,), whole, judged=judged),
        Measured((name, "failed"), failed, "share", judged),
    ]
    times: dict[tuple[Key, bool], list[float]] = {}
    for one in good:
        for part in parts(one):
            times.setdefault((part.path, bool(part.ranks)), []).append(part.high_s)
    for part in in_reading_order(medians(good)):
        last = f"{part.name} (slowest rank)" if part.ranks else part.name
        found.append(Measured((name, *part.path[:-1], last), independent(times[part.path, bool(part.ranks)])))
    return found


def of_replay(rows: Iterable[Row], block_s: float) -> Measurements:
    """Times of the requests that were served; those that a replay cut short when it was interrupted do not count."""
    ended = [row for row in rows if row["outcome"] != "cut"]
    served = [row for row in ended if row["outcome"] == "served"]
    first = "first token"
    found = [
        Measured(("failed",), _sample(ended, lambda row: float(row["outcome"] != "served"), block_s), "share", True),
        Measured((first,), _sample(served, lambda row: row["first_token_s"], block_s), judged=True),
        *(
            Measured((first, path), _sample([r for r in served if r["path"] == path], _first_token, block_s))
            for path in PATHS
        ),
        Measured(("held",), _sample([r for r in served if r["held_s"]], lambda row: row["held_s"], block_s)),
        Measured(("per token",), _sample(served, _token_s, block_s), judged=True),
        Measured(("whole answer",), _sample(served, lambda row: row["total_s"], block_s)),
    ]
    asked = sorted((r["index"], r["arrival_s"], r.get("prompt_tokens"), r.get("output_tokens")) for r in ended)
    return Measurements("replay", tuple(found), tuple(asked))


def _first_token(row: Row) -> float | None:
    return row["first_token_s"]


def _token_s(row: Row) -> float | None:
    return time_per_token_s(row.get("served_output_tokens"), row["chunk_s"])


def _sample(rows: Iterable[Row], value: Callable[[Row], float | None], block_s: float) -> Sample | None:
    found = [(value(row), int(row["arrival_s"] // block_s)) for row in rows]
    known = [(float(number), block) for number, block in found if number is not None]
    return Sample(tuple(number for number, _ in known), tuple(block for _, block in known)) if known else None


def _rows(path: Path, text: str) -> list[Row]:
    """One JSON object a line. Raises UnusableFile that names the line."""
    found: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UnusableFile(f"{path}, line {number}: {_WANTED} ({error})") from None
        missing = ROW_KEYS - set(row) if isinstance(row, Mapping) else ROW_KEYS
        if missing:
            raise UnusableFile(f"{path}, line {number}: {_WANTED}: no {', '.join(sorted(missing))}")
        found.append(dict(row))
    if not found:
        raise UnusableFile(f"{path}: {_WANTED}: it is empty")
    return found


_WANTED = "neither what `serve-app ledger --json` writes nor rows of `serve-app replay`"
