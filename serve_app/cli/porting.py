"""`import`: a configuration of Ray Serve LLM, as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from serve_app.errors import ConfigError
from serve_app.yaml_file import read_yaml


def import_(
    file: Annotated[Path, typer.Argument(help="Its Serve config file, or one LLMConfig.")],
) -> None:
    """Turn a configuration of Ray Serve LLM into one of serve_app's, and print it.

    What has no counterpart stands in comments at its top. Check the result: `serve-app check FILE`.
    """
    from serve_app.porting import port

    try:
        ported = port(read_yaml(file))
    except ConfigError as error:
        raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None
    typer.echo(f"# Made by `serve-app import {file.name}`. Check it: `serve-app check FILE`.")
    for note in dict.fromkeys(ported.notes):
        typer.echo(f"# - {note}")
    typer.echo(yaml.dump(ported.config, Dumper=_Plain, sort_keys=False, width=120).rstrip())


class _Plain(yaml.SafeDumper):
    """Without anchors: people edit the result."""

    def ignore_aliases(self, data: object) -> bool:
        return True
