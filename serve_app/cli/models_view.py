"""Which model has what in a pool that several share: one table by model, one by engine. Pure."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from serve_app.cli.text import gigabytes, seconds


def by_model(models: dict[str, dict[str, Any]]) -> Table:
    """Slots by role, what is held, and the GPU time of standbys that each model has to answer for."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("model", no_wrap=True, overflow="ellipsis", max_width=40)
    for name in ("active", "coming", "standby", "held"):
        table.add_column(name, justify="right")
    gpus = any(model["standby_gpu_s"] for model in models.values())
    if gpus:
        table.add_column("standby GPU hours", justify="right")
    for name, model in models.items():
        cells = [_count(model["active"], "green"), _count(model["coming"], "magenta"), _count(model["standby"], "cyan")]
        hours = [f"{model['standby_gpu_s'] / 3600:.2f}"] if gpus else []
        table.add_row(", ".join(model["names"]) or name, *cells, _count(model["held"], "bold yellow"), *hours)
    return table


def by_engine(slots: list[dict[str, Any]]) -> Table:
    """Every engine: how warm it is, what it holds, what its last wake took."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    gpus = any(engine["device_bytes"] for slot in slots for engine in slot["engines"])
    for name in ("slot", "model", "tier"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=40)
    for name in ("last wake", *(["gpu"] if gpus else []), "host"):
        table.add_column(name, no_wrap=True, justify="right")
    for slot in sorted(slots, key=lambda slot: str(slot["slot"])):
        for index, engine in enumerate(slot["engines"]):
            table.add_row("" if index else slot["slot"], *_engine(engine, gpus=gpus))
    return table


def _engine(engine: dict[str, Any], *, gpus: bool) -> list[str | Text]:
    lost = Text("lost", style="red") if engine["error"] else Text("starting", style="yellow")
    tier = Text(f"{engine['tier']}{' (lent)' if engine['lent'] else ''}") if engine["tier"] else lost
    wake = seconds(engine["wake_s"]) if engine["wake_s"] else "-"
    device = [gigabytes(max(engine["device_bytes"], default=0))] if gpus else []  # of the GPU that holds most
    return [engine["model"], tier, wake, *device, gigabytes(engine["host_bytes"])]


def _count(number: int, style: str) -> Text:
    return Text(str(number), style=style if number else "dim")
