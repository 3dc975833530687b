"""`status` and `ledger`: what the coordinators know, as tables or as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from serve_app.cli import cluster, ledger_view, ledgers, status_view
from serve_app.cli.text import console
from serve_app.errors import NotRunning, Refused

REDRAW_S = 0.5

App = Annotated[str | None, typer.Option("--app", help="One application; all if left out.")]
Json = Annotated[bool, typer.Option("--json", help="Plain JSON for scripts.")]


def status(
    app: App = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show every slot: role, load, last transition; and what the pool as a whole is doing."""
    cluster.connect()
    if as_json:
        typer.echo(json.dumps([_plain(answer) for answer in cluster.coordinators(app)], indent=2))
    elif watch:
        _watch(app)
    else:
        out = console()
        out.print(page(cluster.coordinators(app), out.width))


def _watch(app: str | None) -> None:
    out = console()
    first = page(cluster.coordinators(app), out.width)  # nothing there at all: end at once, with the reason
    try:
        with Live(first, console=out, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(REDRAW_S)
                live.update(_page_or_trouble(app, out.width), refresh=True)
    except KeyboardInterrupt:
        return


def _page_or_trouble(app: str | None, width: int) -> RenderableType:
    """While watching, an application that comes and goes is news, not an end."""
    try:
        return page(cluster.coordinators(app), width)
    except NotRunning as nothing:
        return Text(str(nothing), style="yellow")


def page(answers: list[cluster.Coordinator], width: int) -> RenderableType:
    """All coordinators, one below the other."""
    now = time.time()
    parts: list[RenderableType] = []
    for answer in answers:
        if answer.status is None:
            parts.append(Text(f"{answer.application}: {answer.trouble}", style="yellow"))
        else:
            parts.append(status_view.render(answer.application, answer.status, now, width))
    return Group(*parts)


def _plain(answer: cluster.Coordinator) -> dict[str, Any]:
    """The status without the ledger, which `serve-app ledger --json` has."""
    said = {key: value for key, value in (answer.status or {}).items() if key != "ledger"}
    return {"application": answer.application, "trouble": answer.trouble} | said


def ledger(
    app: App = None,
    last: Annotated[int, typer.Option("-n", min=1, help="How many transitions of each kind.")] = 5,
    slot: Annotated[str | None, typer.Option(help="One slot's transitions only, each with all its stages.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of the worker processes, this one only.")] = None,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a web page with waterfalls, cold beside hot.")] = None,
    saved: ledgers.Saved = None,
) -> None:
    """Show where the seconds of cold starts, promotions and demotions went.

    Shares are of the whole transition; indented stages are part of the one above them.

    Stages of worker processes carry their ranks (r0-7): seconds of the fastest..slowest worker.

    A slot's transitions are remembered after it is gone.
    \f
    `--json` prints one object; times in seconds, wall-clock times since the Unix epoch:
      kinds: {cold_start, promotion, demotion: {count, failed, median_s, fastest_s, slowest_s: over all that are
        remembered, null if there is none; stages: medians over the last ones}}
      transitions: the last ones of each kind, oldest first: [{application, slot, model: empty of a cold start, which is
        of all that a slot holds, kind, start_s, duration_s, reason, error, stages, records: [{stage, start_s,
        duration_s, rank, attributes, error, done}] as they were recorded}]
      stages: [{stage, within: [names of the stages around it], seconds: of the slowest worker, fastest_rank_s, share:
        0 to 1, ranks: [workers], empty for the slot itself}]. Those with neither `within` nor `ranks` make up the
        whole; what none of them explains is the stage `other`.
    """
    transitions = ledgers.read(app, saved, slot)
    recent = ledger_view.recent(transitions, last)
    if html is not None:
        _write_page(html, recent, saved)
    elif as_json:
        typer.echo(json.dumps(ledger_view.plain(transitions, recent, rank), indent=2))
    else:
        out = console()
        each = slot is not None
        out.print(ledger_view.render(transitions, recent, time.time(), out.width, rank=rank, each=each))


def _write_page(path: Path, recent: ledger_view.Shown, saved: Path | None) -> None:
    from serve_app.cli import ledger_page  # imports a template engine

    shown = [transition for of_kind in recent.values() for transition in of_kind]
    if not shown:
        raise Refused("no transition has been recorded yet")
    ledgers.write(path, ledger_page.render(shown, time.time(), saved.name if saved else ""))
    console().print(f"{len(shown)} transitions written to {path}")
