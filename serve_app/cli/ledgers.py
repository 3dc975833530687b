"""The ledger's transitions, from where they are: the running coordinators, or a file of `serve-app ledger --json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.cli import cluster
from serve_app.errors import UnusableFile

Transition = dict[str, Any]

Saved = Annotated[
    Path | None, typer.Option("--from", help="A file of `serve-app ledger --json` instead of the running pool.")
]
KEYS = frozenset({"slot", "model", "kind", "start_s", "duration_s", "reason", "error", "records"})


def read(app: str | None, saved: Path | None, slot: str | None = None) -> list[Transition]:
    """All transitions of one application or of all, as coordinators tell them. Raises NotRunning, UnusableFile.

    Args:
        saved: read this file instead of asking the cluster; slot: only this one's.
    """
    found = parse(saved, text_of(saved)) if saved else _remembered(app)
    return [
        one
        for one in found
        if (slot is None or one["slot"] == slot) and (app is None or one.get("application", app) == app)
    ]


def parse(path: Path, text: str) -> list[Transition]:
    """What `serve-app ledger --json` printed. Raises UnusableFile, which names `path`."""
    try:
        entries = json.loads(text)["transitions"]
        return [_entry(entry) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableFile(f"{path}: not what `serve-app ledger --json` writes ({error})") from None


def text_of(path: Path) -> str:
    """Raises UnusableFile."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def write(path: Path, text: str) -> None:
    """Raises UnusableFile."""
    try:
        path.write_text(text)
    except OSError as error:
        raise UnusableFile(f"{path}: cannot be written: {error.strerror}") from None


def _entry(entry: dict[str, Any]) -> Transition:
    missing = KEYS - set(entry)
    if missing:
        raise ValueError(f"a transition without {', '.join(sorted(missing))}")
    # `stages` of the file are those of the tables; what was recorded has a key of its own there.
    return {key: value for key, value in entry.items() if key != "records"} | {"stages": entry["records"]}


def _remembered(app: str | None) -> list[Transition]:
    cluster.connect()
    return [
        {"application": answer.application} | transition
        for answer in cluster.coordinators(app)
        for transition in (answer.status or {}).get("ledger", [])
    ]
