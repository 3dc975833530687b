"""A replay while it runs and when it has ended, for a terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from serve_app.cli import burst_pool, replay_rows
from serve_app.cli.replay_plan import Plan
from serve_app.cli.replay_pool import PoolRecord, Recorder
from serve_app.cli.replay_rows import Line, Row
from serve_app.cli.replay_run import Sent
from serve_app.cli.text import console, counted, seconds
from serve_app.percentile import percentile
from serve_app.pool.lifecycle import State
from serve_app.telemetry.stages import Stage

# A client that is later than this with a request measures itself.
LATE_S = 0.1
MAX_ERRORS = 8
# Of so many requests that ended last the median is shown.
RECENT = 200
REDRAWS_PER_S = 5


@dataclass(frozen=True)
class Replay:
    """All there is to tell of one replay. `pool`: what was seen of the slots."""

    trace: str
    url: str
    speed: float
    plan: Plan
    begun: datetime
    rows: Sequence[Row] = ()
    pool: PoolRecord = PoolRecord("not looked at")

    @property
    def errors(self) -> list[tuple[str, int]]:
        """The different errors, the most frequent ones first, each with its count."""
        return Counter(row.error for row in self.rows if row.error).most_common(MAX_ERRORS)

    @property
    def late_s(self) -> float:
        """By how much the client itself was late: the 99th percentile, in seconds."""
        return percentile([row.late_s for row in self.rows], 99) or 0.0


class Live:
    """A progress bar with what matters beside it; nothing where it is to be silent."""

    def __init__(self, told: Replay, work: Sequence[Sent], recorder: Recorder | None, *, silent: bool) -> None:
        self.rows: list[Row] = []
        says = _Says(work, self.rows, recorder)
        columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), says)
        out = console()
        self._progress = Progress(*columns, console=out, refresh_per_second=REDRAWS_PER_S, disable=silent)
        if not silent:
            out.print(Text(opening(told), style="bold"), Text(told.plan.scaling(), style="dim"), sep="\n")
        self._task = self._progress.add_task("", total=len(work))

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def ended(self, row: Row) -> None:
        """Count one more request that has ended."""
        self.rows.append(row)
        self._progress.update(self._task, completed=len(self.rows))


class _Says(ProgressColumn):
    """Looks at everything anew at each redraw: while all requests wait, none ends."""

    def __init__(self, work: Sequence[Sent], rows: Sequence[Row], recorder: Recorder | None) -> None:
        super().__init__()
        self._work, self._rows, self._recorder = work, rows, recorder

    def render(self, task: Task) -> Text:
        running = sum(1 for sent in self._work if sent.sent_s is not None) - len(self._rows)
        return Text(so_far(self._rows, running, self._recorder.now if self._recorder else None))


def opening(told: Replay) -> str:
    """What is about to be sent where."""
    count, models = len(told.plan.requests), ", ".join(told.plan.factors)
    span = seconds(told.plan.seconds)
    return f"{count} requests of {told.trace} in {span} (speed {told.speed:g}), to {models} at {told.url}"


def so_far(rows: Sequence[Row], running: int, seen: burst_pool.Seen | None) -> str:
    """One line beside the progress bar."""
    counts, first_s = replay_rows.outcomes(rows), percentile(replay_rows.first_tokens(rows[-RECENT:]), 50)
    said = [f"running {running}", *(f"{name} {counts[name]}" for name in ("refused", "failed") if counts[name])]
    if first_s is not None:
        said.append(f"first token {seconds(first_s)}")
    if seen is not None:
        said.append(f"{seen.count(State.ACTIVE)} active, {seen.count(State.STANDBY)} standby, held {seen.held}")
    return "  ".join(said)


def ending(told: Replay, rows: Path, report: Path | None) -> RenderableType:
    """The summary: how the requests ended, times to the first token by path, what the pool did, the errors."""
    counts = replay_rows.outcomes(told.rows)
    bad = {name: count for name, count in counts.items() if name != "served" and count}
    head = Text(f"{len(told.rows)} requests: {counts['served']} served", style="bold")
    head.append(
        f"; {', '.join(f'{count} {name}' for name, count in bad.items()) or '0 failed'}", "red" if bad else "green"
    )
    lines: list[RenderableType] = [Text(), head, _table(replay_rows.lines(told.rows)), _pool(told.pool)]
    if told.late_s > LATE_S:
        lines.append(
            Text(f"the client itself was late by {seconds(told.late_s)} (p99): its own machine is too slow", "yellow")
        )
    lines += [Text(f"  {count} x {error}", style="red") for error, count in told.errors]
    lines.append(Text(f"rows: {rows}" + (f"; report: {report}" if report else ""), style="dim"))
    return Group(*lines)


def _table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("time to first token")
    for name in ("requests", "p50", "p95", "p99", "slowest"):
        table.add_column(name, justify="right")
    for line in lines:
        times = (line.p50_s, line.p95_s, line.p99_s, line.slowest_s)
        table.add_row(line.name, str(line.requests), *("-" if time is None else seconds(time) for time in times))
    return table


def _pool(pool: PoolRecord) -> Text:
    if pool.trouble:
        return Text(f"the pool was not seen: {pool.trouble}", style="yellow")
    counts = Counter(event.kind for event in pool.events)
    spent = pool.slot_seconds()
    told = ", ".join(f"{spent[state]:.0f} {state}" for state in map(str, State) if spent.get(state))
    promotions, cold = counted(counts[Stage.PROMOTION], "promotion"), counted(counts[Stage.COLD_START], "cold start")
    return Text(f"{promotions}, {cold}; slot-seconds: {told}")


def plain(told: Replay) -> dict[str, Any]:
    """What `--json` prints. Times in seconds.

    requests, served, refused, failed, cut: counts. late_p99_s: the client's own fault.
    first_token_s: [{name: `all`, a path or a model, requests, p50_s, p95_s, p99_s, slowest_s}].
    slot_seconds: {state: seconds}; promotions, cold_starts: [{slot, at_s, duration_s, tier, reason, error}]; all three
    empty where `trouble` says why nobody saw the pool.
    errors: [[message, count]]. factors: {model: by what its token counts were multiplied}.
    """
    events = [asdict(event) for event in told.pool.events]
    return {
        "trace": told.trace,
        "url": told.url,
        "speed": told.speed,
        "begun": told.begun.isoformat(timespec="seconds"),
        "factors": dict(told.plan.factors),
        "requests": len(told.rows),
        **replay_rows.outcomes(told.rows),
        "first_token_s": [asdict(line) for line in replay_rows.lines(told.rows)],
        "late_p99_s": told.late_s,
        "trouble": told.pool.trouble,
        "slot_seconds": told.pool.slot_seconds(),
        "promotions": [event for event in events if event["kind"] == Stage.PROMOTION],
        "cold_starts": [event for event in events if event["kind"] == Stage.COLD_START],
        "errors": told.errors,
    }
