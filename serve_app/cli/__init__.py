"""The command `serve-app`.

`serve-app --help` must answer at once: nothing here or in the modules below imports Ray, torch or vLLM before a command
that needs it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app import __version__
from serve_app.cli import files, operator, porting, prepare, trace, watching
from serve_app.cli.burst import burst
from serve_app.cli.calibrate import calibrate
from serve_app.cli.compare import compare
from serve_app.cli.doctor import doctor
from serve_app.cli.leave import leave
from serve_app.cli.plan import plan
from serve_app.cli.replay import replay
from serve_app.errors import ServeAppError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"serve-app {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve LLMs with Ray Serve and vLLM from a pool of pre-warmed replicas."""


# Before there is a cluster.
app.command()(prepare.prepare)
app.command()(files.check)
app.command()(files.diff)
app.command("import")(porting.import_)
app.command()(plan)

# What was measured before.
app.command()(compare)

# On a running cluster; `doctor` also without one.
app.command()(doctor)
app.command()(watching.status)
app.command()(watching.ledger)
app.add_typer(trace.app, name="trace")
app.command()(burst)
app.command()(calibrate)
app.command()(replay)
app.command()(operator.promote)
app.command()(operator.drain)
app.command()(operator.freeze)
app.command()(operator.unfreeze)
app.command()(leave)


def main() -> None:
    """Run the command line; an error of ours ends it with its message instead of a traceback."""
    try:
        app()
    except ServeAppError as error:
        typer.echo(f"serve-app: {error}", err=True)
        raise SystemExit(1) from None
