"""`trace export`: the ledger's spans as files, for who has no trace backend, or wants to hand one over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli import ledgers
from serve_app.cli.text import console
from serve_app.errors import Refused

app = typer.Typer(no_args_is_help=True)

App = Annotated[str | None, typer.Option("--app", help="One application; all if left out.")]


@app.callback()
def trace() -> None:
    """Traces of cold starts, promotions and demotions, without any trace backend."""


@app.command()
def export(
    otlp: Annotated[Path | None, typer.Option(help="Write OTLP/JSON: one line, as POST /v1/traces takes it.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write Chrome's trace format: opens in ui.perfetto.dev.")] = None,
    saved: ledgers.Saved = None,
    app: App = None,
    slot: Annotated[str | None, typer.Option(help="One slot's transitions only.")] = None,
) -> None:
    """Write the spans of all transitions that the ledger remembers.

    Each transition is one trace, each slot a process of Chrome's format with one track for each rank.
    """
    if otlp is None and chrome is None:
        raise Refused("nothing to write: name a file with --otlp or --chrome")
    transitions = ledgers.read(app, saved, slot)
    if not transitions:
        raise Refused("no transition has been recorded yet" + (f" of slot {slot}" if slot else ""))
    # These import OpenTelemetry's SDK, which other commands need not wait for.
    from serve_app.telemetry import chrome_trace, otlp_file

    for path, module in ((otlp, otlp_file), (chrome, chrome_trace)):
        if path is not None:
            ledgers.write(path, module.dumps(transitions) + "\n")
            console().print(f"{len(transitions)} traces written to {path}")
