"""`replay`: a trace of real requests against any OpenAI server, one row a request, and a page that tells the story."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO

import typer

from serve_app import traces
from serve_app.cli import burst_client, cluster, replay_rows, replay_run, replay_view
from serve_app.cli.replay_plan import model_names, plan
from serve_app.cli.replay_pool import PoolRecord, Recorder
from serve_app.cli.replay_rows import Row
from serve_app.cli.replay_run import Sent
from serve_app.cli.replay_view import Live, Replay
from serve_app.cli.text import console
from serve_app.errors import ConfigError, NotRunning

# What building the client may take, so that the first request is not late.
LEAD_S = 0.2
NOT_ITS_POOL = "the Ray cluster found here does not run the slots that answered; set RAY_ADDRESS"


def replay(
    trace: Annotated[Path, typer.Argument(help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens and perhaps Model.")],
    url: Annotated[str, typer.Option(help="Where the server answers.")] = "http://127.0.0.1:8000",
    speed: Annotated[float, typer.Option(min=0.001, help="How many times faster than in the trace.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=0.001, help="Send for so long; else all.")] = float("inf"),
    start: Annotated[float, typer.Option(min=0, help="Begin so many seconds into the trace.")] = 0.0,
    model: Annotated[list[str] | None, typer.Option(help="ID for all requests, or NAME=ID for each name.")] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens; if left out, what the server says.")] = 0,
    exact: Annotated[bool, typer.Option(help="Outputs as long as in the trace (ignore_eos), not at most.")] = True,
    rows: Annotated[Path, typer.Option(help="Where the rows go, as JSON lines.")] = Path("replay.jsonl"),
    report: Annotated[Path | None, typer.Option(help="Write a page about it, one HTML file.")] = None,
    app: Annotated[str | None, typer.Option("--app", help="One application; all if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON, for scripts.")] = False,
) -> None:
    """Replay a trace: real arrival times and token counts, whatever becomes of earlier requests.

    Token counts are scaled so that the longest request fits the model's context. A key: OPENAI_API_KEY.

    Exit status 1 if any request failed, was refused or was cut off.
    \f
    Rows are described in `replay_rows.Row`, the JSON summary in `replay_view.plain`, both in docs/load.md.
    """
    url = url.rstrip("/").removesuffix("/v1")
    requests = traces.read(trace)
    served = burst_client.served_models(url)
    recorder, trouble = _recorder(app)
    first = next(iter(served), recorder.now.model if recorder else "")
    names = model_names(model or (), {request.model for request in requests}, first)
    contexts = dict.fromkeys(names.values(), context) if context else served
    work = plan(requests, names, contexts, start_s=start, seconds=seconds, speed=speed)
    _check_folder(report)
    with _opened(rows) as lines:
        told = Replay(str(trace), url, speed, work, datetime.now(UTC))
        done, pool = _run(told, recorder, trouble, lines, exact=exact, silent=as_json)
    told = replace(told, rows=done, pool=_its(pool, done, recorder))
    if report is not None:
        from serve_app.cli import replay_report

        report.write_text(replay_report.page(told))
    if as_json:
        typer.echo(json.dumps(replay_view.plain(told), indent=2))
    else:
        console().print(replay_view.ending(told, rows, report))
    if any(row.outcome != "served" for row in done):
        raise typer.Exit(1)


def _recorder(app: str | None) -> tuple[Recorder | None, str]:
    """Who looks at the pool; or nobody, and why."""
    try:
        cluster.connect()
        return Recorder(app), ""
    except NotRunning as nothing:
        return None, str(nothing)


def _check_folder(report: Path | None) -> None:
    if report is not None and not report.parent.is_dir():
        raise ConfigError(f"--report {report}: there is no folder {report.parent}")


def _opened(rows: Path) -> TextIO:
    try:
        return rows.open("w")
    except OSError as error:
        raise ConfigError(f"--rows {rows}: cannot be written: {error.strerror}") from None


def _run(
    told: Replay, recorder: Recorder | None, trouble: str, lines: TextIO, *, exact: bool, silent: bool
) -> tuple[list[Row], PoolRecord]:
    """Send it all, or as much as Ctrl-C lets; each row is written when its request has ended."""
    work, done = replay_run.plan(told.plan.requests), {}
    usable: Mapping[str, float] | None = recorder.usable if recorder else None
    with Live(told, work, recorder, silent=silent) as live:

        def ended(sent: Sent) -> None:
            done[sent.index] = _row(sent, usable, lines)
            live.ended(done[sent.index])

        began_s = time.monotonic() + LEAD_S
        if recorder is not None:
            recorder.start(began_s)
        with suppress(KeyboardInterrupt):
            asyncio.run(replay_run.send_all(told.url, work, began_s, exact=exact, ended=ended))
    for sent in work:
        if sent.sent_s is not None and sent.index not in done:
            done[sent.index] = _row(sent, usable, lines)
    pool = recorder.stop() if recorder else PoolRecord(trouble)
    return [done[index] for index in sorted(done)], pool


def _row(sent: Sent, usable: Mapping[str, float] | None, lines: TextIO) -> Row:
    row = replay_rows.row(sent.index, sent.request, sent.sent_s or 0.0, sent.answer, usable)
    lines.write(json.dumps(row.as_dict()) + "\n")
    lines.flush()
    return row


def _its(pool: PoolRecord, rows: list[Row], recorder: Recorder | None) -> PoolRecord:
    """What was seen, unless other slots than those seen have answered."""
    answered = {row.slot for row in rows} - {""}
    strange = recorder is not None and answered and not answered & recorder.usable.keys()
    return PoolRecord(NOT_ITS_POOL) if strange else pool
