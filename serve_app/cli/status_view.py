"""A coordinator's status as one line and one table. Pure: plain values in, something rich can print out."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli import models_view
from serve_app.cli.text import age, gigabytes, seconds
from serve_app.pool.capacity import Trouble
from serve_app.pool.lifecycle import State

# In this order slots are listed.
COLORS = {
    State.ACTIVE: "green",
    State.DRAINING: "blue",
    State.PROMOTING: "magenta",
    State.STANDBY: "cyan",
    State.PARKING: "blue",
    State.STARTING: "yellow",
    State.RETIRING: "bright_black",
    State.FAILED: "red",
}
# Below this width the columns that change least are left out.
WIDE = 110
# A slot that reports several times a second and has been silent for this long is worth a word.
SILENT_S = 2.0


def render(application: str, status: dict[str, Any], now_s: float, width: int) -> RenderableType:
    """One coordinator: a line for the pool, a row for each slot, and the errors in full below."""
    slots: list[dict[str, Any]] = status["slots"]
    wide = width >= WIDE
    parts: list[RenderableType] = [_headline(application, status, wide=wide)]
    if status["shortage"]:
        parts.append(_shortage(**status["shortage"]))
    if slots:
        last = {entry["slot"]: entry for entry in status["ledger"]}
        parts.append(_table(slots, last, now_s, wide=wide))
    else:
        parts.append(Text("no slot has reported yet", style="dim"))
    if len(status["models"]) > 1:
        parts += [Text(), models_view.by_model(status["models"])]
        if wide:
            parts += [Text(), models_view.by_engine(slots)]
    for what in ("error", "fenced"):
        parts += [Text(f"{slot['slot']}: {slot[what]}", style="red") for slot in slots if slot[what]]
    lost = [(slot["slot"], engine) for slot in slots for engine in slot["engines"] if engine["error"]]
    parts += [Text(f"{slot}: {engine['model']}: {engine['error']}", style="red") for slot, engine in lost]
    return Group(*parts, Text())


def _headline(application: str, status: dict[str, Any], *, wide: bool) -> Text:
    """The pool in one line, or in two where that is too long."""
    counts = Counter(State(slot["state"]) for slot in status["slots"])
    always = (State.ACTIVE, State.STANDBY, State.STARTING, State.FAILED)
    line = Text(application, style="bold")
    for state in (*always, *(state for state in counts if state not in always)):
        line.append(f"  {counts[state]} {state}", style=COLORS[state] if counts[state] else "dim")
    line.append("  " if wide else "\n")
    line.append(f"held {status['held']}", style="bold yellow" if status["held"] else "")
    line.append(f"  routers {status['routers']}  version {status['version']}")
    line.append(f"  another slot {'fits' if status['fits_another'] else 'does not fit'}", style="dim")
    flags = {
        "frozen": status["frozen"],
        "breaker open": status["breaker_open"],
        "waiting for all slots to report": status["blind"],
    }
    for flag in (name for name, raised in flags.items() if raised):
        line.append("  ").append(f" {flag} ", style="black on yellow")
    return line


def _shortage(trouble: str, message: str) -> Text:
    """Why slots that Serve wants have no place."""
    color = "red" if trouble == Trouble.INFEASIBLE else "yellow"
    return Text.assemble((f"slots are missing, {trouble}: ", f"bold {color}"), (message, color))


def _table(slots: list[dict[str, Any]], last: dict[str, dict[str, Any]], now_s: float, *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    gpus = any(slot["device_bytes"] for slot in slots)
    left, right = ["slot", "state", "tier"], [*(["gpu"] if gpus else []), "host", "pid", "node"] if wide else []
    for name in (*left, "model") if wide else left:
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=24)
    for name in ("load", "gate", "since"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("last transition")  # the only one that may shrink
    for name in right:
        table.add_column(name, no_wrap=True, justify="left" if name == "node" else "right")
    order = list(COLORS)
    for slot in sorted(slots, key=lambda slot: (order.index(slot["state"]), slot["slot"])):
        table.add_row(*_cells(slot, last.get(slot["slot"]), now_s, wide=wide, gpus=gpus))
    return table


def _cells(
    slot: dict[str, Any], last: dict[str, Any] | None, now_s: float, *, wide: bool, gpus: bool
) -> list[str | Text]:
    cells: list[str | Text] = [
        slot["slot"],
        _state(slot),
        _tier(slot),
        _load(slot),
        Text(str(slot["at_gate"]), style="yellow" if slot["at_gate"] else "dim"),
        age(now_s - slot["since_s"]),
        _last(last),
    ]
    if wide:
        cells.insert(3, slot["model"])
        nodes = len(set(slot["ranks"]))
        where = f"{nodes} nodes" if nodes > 1 else slot["node"][:8]
        if gpus:  # of the GPU that holds most
            cells.append(gigabytes(max(slot["device_bytes"], default=0)))
        cells += [gigabytes(slot["host_bytes"]), str(slot["pid"]), where]
    return cells


def _load(slot: dict[str, Any]) -> Text:
    """Requests of those it may be given at once; beside them those that may wait (`service_tier: flex`)."""
    text = Text(f"{slot['in_flight']}/{slot['hard']}")
    if slot["flex_in_flight"]:
        text.append(f" +{slot['flex_in_flight']} flex", style="dim")
    return text


def _tier(slot: dict[str, Any]) -> Text:
    """How warm it is kept, and what waking up took last."""
    text = Text(str(slot["tier"]))
    if slot["state"] == State.STANDBY and slot["wake_s"]:
        text.append(f" {seconds(slot['wake_s'])}", style="dim")
    return text


def _state(slot: dict[str, Any]) -> Text:
    """The state, what it is doing there, and what is about to happen to it."""
    state = State(slot["state"])
    text = Text(str(state), style=f"bold {COLORS[state]}" if state in (State.ACTIVE, State.FAILED) else COLORS[state])
    # The stage of a whole transition says no more than the state does.
    if "." in slot["stage"]:
        text.append(f" {slot['stage']}", style="dim")
    if slot["fenced"]:
        text.append(" fenced", style="red")
    if slot["pending"]:
        text.append(f" >{slot['pending']}", style="dim")
    if slot["leaving"]:
        text.append(" leaving", style="red")
    elif slot["heard_s"] > SILENT_S:
        text.append(f" silent {age(slot['heard_s'])}", style="red")
    return text


def _last(transition: dict[str, Any] | None) -> Text:
    if transition is None:
        return Text("-", style="dim")
    text = Text(f"{transition['kind']} {seconds(transition['duration_s'])}", no_wrap=True, overflow="ellipsis")
    if transition["error"]:
        text.append(f" {' '.join(transition['error'].split())}", style="red")
    elif transition["reason"]:
        text.append(f" {transition['reason']}", style="dim")
    return text
