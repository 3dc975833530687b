"""`compare`: two ledgers, or two replays, against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.text import console
from serve_app.errors import Refused


def compare(
    a: Annotated[Path, typer.Argument(help="What is there: `serve-app ledger --json`, or rows of `replay`.")],
    b: Annotated[Path, typer.Argument(help="What is new: of the same kind.")],
    percentile: Annotated[
        list[float] | None,
        typer.Option(min=1, max=99.9, help="Again for more; else 50 of ledgers, and 50, 95, 99 of replays."),
    ] = None,
    fail_over: Annotated[
        float | None, typer.Option(min=0, metavar="PERCENT", help="Exit status 1 beyond this; see below.")
    ] = None,
    confidence: Annotated[float, typer.Option(min=50, max=99.99, help="Of the intervals, in per cent.")] = 95.0,
    block_s: Annotated[
        float, typer.Option("--block-seconds", min=0.001, help="Requests so close in a replay share their fate.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling; the same gives the same.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Plain JSON for scripts.")] = False,
) -> None:
    """Say whether B is faster or slower than A, stage by stage or percentile by percentile.

    `--fail-over 5`: exit status 1 if cold start, promotion, first token or time per token is shown to be more than 5 %
    slower, if more fail, or if there is too little to tell.

    Save ledgers with `-n 100`: a median takes at least 6 transitions of a kind.
    \f
    `--json` prints one object. rows: [{key: what, unit: s or share, judged: counts for the exit status, n_a, n_b,
    percentile: null for a share, a, b, change, relative, low, high: the interval of b - a, needed: how many values it
    would take, verdict, too_much}]; a row that only one file has lacks the numbers.
    """
    from serve_app.cli import compare_view, comparing, measurements  # import numpy

    found = comparing.compare(
        measurements.read(a, block_s),
        measurements.read(b, block_s),
        percentile or (),
        1 - confidence / 100,
        fail_over=fail_over,
        seed=seed,
    )
    if as_json:
        typer.echo(json.dumps(compare_view.plain(found, a.name, b.name, fail_over), indent=2))
    else:
        out = console()
        out.print(compare_view.render(found, a.name, b.name, fail_over, out.width))
    if found.failed:
        raise typer.Exit(1)
    if fail_over is not None and not found.told:
        raise Refused("too few values to judge anything: measure more, or leave out --fail-over")
