"""Pages: one HTML file each that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from serve_app.cli.text import seconds


def render(template: str, values: Mapping[str, Any]) -> str:
    """A page from one of the templates beside this file, in the style that they share."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["seconds"] = lambda value: "-" if value is None else seconds(value)
    folder = files("serve_app.cli")
    style = folder.joinpath("page.css").read_text()
    return environment.from_string(folder.joinpath(template).read_text()).render(values, style=style)
