"""`promote`, `drain`, `freeze`, `unfreeze`: the operator's own orders, carried out by the `Pool` deployment."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli import cluster
from serve_app.cli.text import console

App = Annotated[str | None, typer.Option("--app", help="The application; needed when several run.")]


def promote(
    slot: Annotated[str | None, typer.Argument(help="A standby; any if left out.")] = None,
    model: Annotated[str, typer.Option(help="What to serve; if left out, what the slot has served last.")] = "",
    app: App = None,
) -> None:
    """Make a standby active by hand."""
    _order(app, "operate", "promote", slot, model)


def drain(slot: Annotated[str, typer.Argument(help="An active slot.")], app: App = None) -> None:
    """Make an active slot standby by hand: it finishes its requests and takes no more."""
    _order(app, "operate", "drain", slot)


def freeze(app: App = None) -> None:
    """Stop all automatic promotions, demotions and changes of the number of slots."""
    _order(app, "freeze", True)


def unfreeze(app: App = None) -> None:
    """Let the pool decide by itself again."""
    _order(app, "freeze", False)


def _order(app: str | None, method: str, *arguments: object) -> None:
    cluster.connect()
    console().print(cluster.ask_pool(app, method, *arguments))
