"""`check` and `diff`: commands about config files; no cluster is needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from serve_app.changes import MEANING, MISSING, Change, Effect, changes
from serve_app.checking import Checked, Report, check_config
from serve_app.cli.text import console
from serve_app.config import AppConfig, ModelConfig, SlotConfig
from serve_app.engine import alike
from serve_app.errors import ConfigError
from serve_app.yaml_file import read_yaml

COLORS = {
    Effect.LIVE: "green",
    Effect.PAUSES: "yellow",
    Effect.ROLLS: "magenta",
    Effect.APPLICATION: "cyan",
    Effect.RECREATE: "red",
    Effect.RESTART: "red",
}


def check_file(path: Path) -> Report:
    """Everything that can be known to be wrong with a Serve config file before it is deployed."""
    try:
        config = read_yaml(path)
    except ConfigError as error:
        return Report(problems=[str(error)])
    from serve_app import serve_schema  # imports Ray

    report = check_config(config)
    report.problems[:0] = serve_schema.problems(config)
    for application in report.applications:
        for model in application.app.served if application.app is not None else ():
            assert application.app is not None
            _check_engine(model, application.app.slot, f"applications.{application.name}.args", report)
        if application.app is not None:
            _check_variants(application.app, f"applications.{application.name}.args", report)
    return report


# What a note begins with where vLLM is not here to ask, or cannot be imported.
UNCHECKED = "engine_kwargs were not checked: "


def _check_engine(model: ModelConfig, slot: SlotConfig, where: str, report: Report) -> None:
    """Add what the engine itself says about its arguments."""
    try:
        if model.engine == "simulated":
            from serve_app import engine

            engine.create(model, slot)
        elif find_spec("vllm"):
            from serve_app.engine.arguments import check_engine_kwargs

            check_engine_kwargs(model, slot)
        else:
            _note_once(report, f"{UNCHECKED}vLLM is not installed here")
    except ConfigError as error:
        report.problems += [f"{where}.{line}" for line in str(error).splitlines()]
    except Exception as error:  # a broken installation here says nothing about the file
        reason = " ".join(str(error).split())
        _note_once(report, f"{UNCHECKED}vLLM cannot be imported here ({type(error).__name__}: {reason:.200})")


def _check_variants(app: AppConfig, where: str, report: Report) -> None:
    """Add what the files on this machine say about models that are to share an engine."""
    try:
        alike.check_all(app)
    except ConfigError as error:
        report.problems += [f"{where}.{line}" for line in str(error).splitlines()]


def _note_once(report: Report, note: str) -> None:
    """One note for all models that it is true of."""
    if note not in report.notes:
        report.notes.append(note)


def check(file: Annotated[Path, typer.Argument(help="A Serve config file.")]) -> None:
    """Check a Serve config file: every key and value, before anything is started."""
    report, out = check_file(file), console()
    for problem in report.problems:
        # soft_wrap: one problem, one line, however narrow the terminal is.
        out.print(Text.assemble(f"{file}: ", (problem, "red")), soft_wrap=True)
    if report.problems:
        raise typer.Exit(1)
    out.print(Text.assemble(f"{file}: ", ("good", "bold green")))
    for application in report.applications:
        out.print(_summary(application))
    for name in report.foreign:
        out.print(Text(f"application {name} is not serve_app's: only Serve's own keys were checked"), style="dim")
    for note in report.notes:
        out.print(Text.assemble(("note: ", "yellow"), note))


def _summary(checked: Checked) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    app, live = checked.app, checked.live
    assert app is not None, "a good file's applications could all be read"
    slot = app.slot
    table.add_row("application", checked.name)
    for model in app.served:
        source = f" from {model.source}" if model.source not in ("", model.id) else ""
        shared = f" of {model.engine_of}" if model.engine_of else ""
        table.add_row("model", f"{', '.join(model.names)}{source}, engine {model.engine}{shared}")
    memory = f", {slot.host_ram_gb:g} GB of host memory" if slot.host_ram_gb else ""
    table.add_row("slot", f"{slot.gpus:g} GPUs, {slot.cpus:g} CPUs{memory}; takes {slot.max_ongoing_requests} requests")
    if live is None:
        table.add_row("pool", "off: a plain Serve application, nothing is live")
        return table
    counts = live.slots
    demote = f"quiet slots are demoted after {counts.demote_after_s:g} s"
    table.add_row("slots", f"{counts.min} to {counts.max}, {counts.standby} standby, refill {counts.refill}; {demote}")
    for model in app.served:
        chosen = live.model(model.id)
        table.add_row("tier", f"{chosen.tier}; {model.id} keeps {chosen.min_active} active")
    table.add_row("live", f"all of Pool.user_config; set here: {', '.join(checked.set_live) or 'nothing'}")
    return table


def diff(
    old: Annotated[Path, typer.Argument(help="The config file that is deployed.")],
    new: Annotated[Path, typer.Argument(help="The config file to deploy.")],
) -> None:
    """Say what deploying NEW over OLD costs: what is live, what rolls slots, what needs a restart of Serve."""
    found, out = changes(_read(old), _read(new)), console()
    if not found:
        out.print("no difference")
        return
    for effect in Effect:
        group = [change for change in found if change.effect is effect]
        if group:
            out.print(Text.assemble((str(effect), f"bold {COLORS[effect]}"), (f"  {MEANING[effect]}", "dim")))
            out.print(_changes(group))


def _read(path: Path) -> dict[str, object]:
    try:
        return read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _changes(group: list[Change]) -> Table:
    table = Table.grid(padding=(0, 2))
    for change in group:
        values = Text.assemble(_value(change.old), (" -> ", "dim"), _value(change.new))
        table.add_row(Text(f"  {change.where}"), values)
    return table


def _value(value: object) -> tuple[str, str]:
    return (MISSING, "dim") if value == MISSING else (str(value), "bold")
