"""A comparison as a table and as plain values. Pure."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.comparing import Comparison, Row
from serve_app.cli.text import seconds
from serve_app.differences import Difference, Verdict

COLORS = {Verdict.BETTER: "green", Verdict.WORSE: "red", Verdict.SAME: "", Verdict.TOO_FEW: "dim"}
COLUMNS = ("of", "A", "B", "B - A", "%", "interval", "n")
# Below this width there is no room for these.
WIDE = 120
LEFT_OUT = ("B - A", "interval", "n")
SHORT_S = 0.1
WORDS = {
    ("s", Verdict.BETTER): "faster",
    ("s", Verdict.WORSE): "slower",
    ("share", Verdict.BETTER): "fewer fail",
    ("share", Verdict.WORSE): "more fail",
}


def render(comparison: Comparison, a: str, b: str, fail_over: float | None, width: int) -> RenderableType:
    """The table, and what it comes to."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(comparison.what, no_wrap=True)
    shown = [name for name in COLUMNS if width >= WIDE or name not in LEFT_OUT]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    previous = None
    for row in comparison.rows:
        what = Text(
            "  " * (len(row.key) - 1) + row.key[-1] if row.key != previous else "", "bold" if row.judged else ""
        )
        cells = _cells(row)
        color = COLORS[row.difference.verdict] if row.difference else "yellow"
        verdict = Text(_verdict(row), style=f"bold {color}" if row.too_much else color)
        table.add_row(what, *(cells.get(column, Text()) for column in shown), verdict)
        previous = row.key
    lines: list[RenderableType] = [Text.assemble(("A ", "bold"), a, ("   B ", "bold"), b), table, Text()]
    if comparison.same_requests is False:
        lines.append(Text("the two replays sent different requests: differences may be the trace's", style="yellow"))
    lines.append(Text(_caption(comparison), style="dim"))
    lines += _ending(comparison, fail_over)
    return Group(*lines)


def plain(comparison: Comparison, a: str, b: str, fail_over: float | None) -> dict[str, Any]:
    """What `--json` prints; see `compare.compare`."""
    return {
        "what": comparison.what,
        "a": a,
        "b": b,
        "confidence": round(1 - comparison.error, 6),
        "fail_over_percent": fail_over,
        "failed": bool(comparison.failed),
        "same_requests": comparison.same_requests,
        "rows": [_plain(row) for row in comparison.rows],
    }


def _plain(row: Row) -> dict[str, Any]:
    found = row.difference
    numbers: dict[str, Any] = (
        {}
        if found is None
        else {
            "percentile": found.percent,
            "a": found.before,
            "b": found.after,
            "change": found.change,
            "relative": found.relative,
            "low": found.low,
            "high": found.high,
            "needed": found.needed,
        }
    )
    known = {"key": list(row.key), "unit": row.unit, "judged": row.judged, "n_a": row.counts[0], "n_b": row.counts[1]}
    return known | numbers | {"verdict": _verdict(row), "too_much": row.too_much}


def _cells(row: Row) -> dict[str, Text]:
    """By column; what there is no number for is missing."""
    n_a, n_b = row.counts
    cells = {"n": Text(str(n_a) if n_a == n_b else f"{n_a}/{n_b}", style="dim")}
    found = row.difference
    if found is None:
        return cells
    return cells | {
        "of": Text("share" if found.percent is None else f"p{found.percent:g}", style="dim"),
        "A": Text(_value(found.before, row.unit)),
        "B": Text(_value(found.after, row.unit)),
        "B - A": Text(_signed(found.change, row.unit)),
        "%": Text("" if found.relative is None or row.unit == "share" else f"{found.relative:+.1%}"),
        "interval": Text(_interval(found, row.unit), style="dim"),
    }


def _verdict(row: Row) -> str:
    if row.difference is None:
        return f"only in {row.only_in}"
    verdict = row.difference.verdict
    if verdict is Verdict.TOO_FEW:
        return f"{verdict}: {row.difference.needed} needed"
    return WORDS.get((row.unit, verdict), str(verdict)) + (", too much" if row.too_much else "")


def _value(value: float, unit: str) -> str:
    """Shares in per cent; of short times the milliseconds, as a token's would be two digits of a second."""
    if unit == "share":
        return f"{value:.2%}"
    return seconds(value) if value >= SHORT_S else f"{1000 * value:.1f} ms"


def _signed(value: float, unit: str) -> str:
    said = _value(abs(value), unit)
    return said if not said.strip("0.%ms ") else ("-" if value < 0 else "+") + said


def _interval(found: Difference, unit: str) -> str:
    if found.low is None or found.high is None:
        return "-"
    return f"{_signed(found.low, unit)} .. {_signed(found.high, unit)}"


def _caption(comparison: Comparison) -> str:
    return (
        f"Intervals of B - A hold with {1 - comparison.error:.1%} confidence for all rows in bold together, and again "
        "for all others; times are of what succeeded."
    )


def _ending(comparison: Comparison, fail_over: float | None) -> list[RenderableType]:
    if fail_over is None:
        return []
    if comparison.failed:
        named = dict.fromkeys(" / ".join(row.key) for row in comparison.failed)
        return [Text(f"too much: {', '.join(named)}", style="bold red")]
    return [
        Text(f"nothing in bold is shown to be slower by more than {fail_over:g} %, nor to fail more", style="green")
    ]
