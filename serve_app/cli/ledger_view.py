"""The cold-start ledger as tables and as JSON: where the seconds went, cold against hot. Pure."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.text import age, seconds
from serve_app.telemetry.ledger import OTHER, Part, medians, parts
from serve_app.telemetry.stages import Stage

KINDS = {Stage.COLD_START: "cold", Stage.PROMOTION: "hot", Stage.DEMOTION: ""}
COLORS = {Stage.COLD_START: "yellow", Stage.PROMOTION: "green", Stage.DEMOTION: "blue"}
BAR_WIDTH = 10
# Below this width cold and hot stand below each other instead of side by side.
WIDE = 100
# In the list, the stages that took longest are named.
LONGEST = 2
Transition = dict[str, Any]
Shown = dict[Stage, list[Transition]]


def recent(transitions: list[Transition], last: int) -> Shown:
    """The last few of each kind, oldest first."""
    chosen: Shown = {}
    for kind in KINDS:
        of_kind = sorted((entry for entry in transitions if entry["kind"] == kind), key=lambda entry: entry["start_s"])
        chosen[kind] = of_kind[-last:]
    return chosen


def render(
    transitions: list[Transition],
    shown: Shown,
    now_s: float,
    width: int,
    *,
    rank: int | None = None,
    each: bool = False,
) -> RenderableType:
    """Totals of all transitions that coordinators remember, then the medians and the list of the ones shown.

    Args:
        rank: of the stages in worker processes, only this worker's; each: the stages of every one shown, too.
    """
    if not transitions:
        return Text("no transition has been recorded yet", style="dim")
    pages: list[RenderableType] = [_totals(transitions), Text()]
    tables = [
        Group(_title(kind, entries), _stages(medians(entries, rank), kind))
        for kind, entries in shown.items()
        if entries
    ]
    pages += _side_by_side(tables, width)
    for kind, entries in shown.items():
        if entries and each:
            pages += [line for entry in entries for line in (_one(kind, entry, now_s, rank), Text())]
        elif entries:
            pages += [_list(kind, entries, now_s), Text()]
    return Group(*pages)


def plain(transitions: list[Transition], shown: Shown, rank: int | None = None) -> dict[str, Any]:
    """What `--json` prints; see `watching.ledger`."""
    return {
        "kinds": {
            str(kind): _plain_totals(transitions, kind)
            | {"stages": [_plain_part(part) for part in medians(entries, rank)]}
            for kind, entries in shown.items()
        },
        "transitions": [
            {
                key: entry[key]
                for key in ("application", "slot", "model", "kind", "start_s", "duration_s", "reason", "error")
            }
            | {"stages": [_plain_part(part) for part in parts(entry, rank)], "records": entry["stages"]}
            for entries in shown.values()
            for entry in entries
        ],
    }


def _plain_totals(transitions: list[Transition], kind: Stage) -> dict[str, Any]:
    entries = [entry for entry in transitions if entry["kind"] == kind]
    good = [entry["duration_s"] for entry in entries if not entry["error"]]
    return {
        "count": len(entries),
        "failed": len(entries) - len(good),
        "median_s": median(good) if good else None,
        "fastest_s": min(good, default=None),
        "slowest_s": max(good, default=None),
    }


def _plain_part(part: Part) -> dict[str, Any]:
    return {
        "stage": part.name,
        "within": list(part.path[:-1]),
        "seconds": part.high_s,
        "fastest_rank_s": part.low_s,
        "share": part.share,
        "ranks": list(part.ranks),
    }


def _totals(transitions: list[Transition]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("transition", no_wrap=True)
    for name in ("count", "failed", "median", "fastest", "slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    totals = {kind: _plain_totals(transitions, kind) for kind in KINDS}
    cold_s, hot_s = totals[Stage.COLD_START]["median_s"], totals[Stage.PROMOTION]["median_s"]
    for kind, total in totals.items():
        numbers = [total[name] for name in ("median_s", "fastest_s", "slowest_s")]
        is_faster = kind is Stage.PROMOTION and cold_s and hot_s
        table.add_row(
            _name(kind),
            str(total["count"]),
            str(total["failed"]),
            *("-" if number is None else seconds(number) for number in numbers),
            Text(f"{cold_s / hot_s:.0f}x faster", style="green") if is_faster else "",
        )
    return table


def _name(kind: Stage) -> Text:
    return Text.assemble((str(kind), f"bold {COLORS[kind]}"), (f" ({KINDS[kind]})" if KINDS[kind] else "", "dim"))


def _title(kind: Stage, entries: list[Transition]) -> Text:
    which = f"  medians of the last {len(entries)}" if len(entries) > 1 else "  the last one"
    return _name(kind).append(which, style="dim")


def _side_by_side(tables: list[Group], width: int) -> list[RenderableType]:
    """Cold and hot beside each other where there is room, the rest below."""
    if width < WIDE or len(tables) < 2:
        return [line for table in tables for line in (table, Text())]
    page = Table.grid(padding=(0, 2))
    page.add_row(*tables[:2])
    return [page, Text(), *(line for table in tables[2:] for line in (table, Text()))]


def _stages(rows: list[Part], kind: Stage) -> Table:
    """One row for each stage: stages within others are indented, those of workers are dim and marked."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for part in rows:
        is_top = part.depth == 0 and not part.ranks
        style = "dim" if not is_top or part.name == OTHER else ""
        bar = Text("━" * round(part.share * BAR_WIDTH) or "·", style=COLORS[kind] if is_top else "dim")
        name = Text("  " * part.depth + part.name + _workers(part), style=style)
        table.add_row(name, Text(_span(part), style=style), Text(f"{part.share:.0%}", style=style), bar)
    return table


def _workers(part: Part) -> str:
    """Which workers a stage ran in."""
    if not part.ranks:
        return ""
    first, last = part.ranks[0], part.ranks[-1]
    return f" r{first}" if first == last else f" r{first}-{last}"


def _span(part: Part) -> str:
    """Seconds; from the fastest worker to the slowest where they differ."""
    low, high = seconds(part.low_s), seconds(part.high_s)
    return high if low == high else f"{low.removesuffix(' s')}..{high}"


def _one(kind: Stage, entry: Transition, now_s: float, rank: int | None) -> Group:
    title = Text.assemble(_name(kind), "  ", _slot(entry, now_s), f"  {seconds(entry['duration_s'])}  ", _why(entry))
    return Group(title, _stages(parts(entry, rank), kind))


def _list(kind: Stage, entries: list[Transition], now_s: float) -> Table:
    """One line for each transition: which slot, how long, what took longest, why."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(_name(kind), no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("longest stages")
    table.add_column("reason", max_width=40)
    for entry in entries:
        top = [part for part in parts(entry) if part.depth == 0 and not part.ranks]
        longest = sorted(top, key=lambda part: -part.high_s)[:LONGEST]
        named = ", ".join(f"{part.name} {part.share:.0%}" for part in longest)
        total = Text(seconds(entry["duration_s"]), style=f"bold {COLORS[kind]}")
        table.add_row(_slot(entry, now_s), total, Text(named, style="dim"), _why(entry))
    return table


def _slot(entry: Transition, now_s: float) -> Text:
    return Text.assemble((entry["slot"], "bold"), (f" {age(now_s - entry['start_s'])} ago", "dim"))


def _why(entry: Transition) -> Text:
    return Text(entry["error"], style="red") if entry["error"] else Text(entry["reason"])
