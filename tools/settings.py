"""docs/settings.md: every setting of config.py (static) and live.py, as the models themselves describe it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from serve_app.config import AppConfig
from serve_app.live import LiveSettings

_HEAD = """# Settings

Every setting with its type, its default and what it means; an unknown key is an error. `serve-app check FILE` reads a
file as Serve would, `serve-app diff OLD NEW` says what a change costs. This page is made from `serve_app/config.py` and
`serve_app/live.py` (`python -m tools.observability`).

`models[]` is each entry of a list, `models.ID` the entry of the model with that id.
"""
_HALVES = (
    ("Static: `args` of the application", "A change replaces the slots, one at a time.", AppConfig),
    (
        "Live: `user_config` of the deployment `Pool`",
        "A change replaces nothing and is in force at once.",
        LiveSettings,
    ),
)
_TYPES = {bool: "on / off", int: "whole number", float: "number", str: "text"}
_BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


def page() -> str:
    """The whole page."""
    parts = []
    for title, what, model in _HALVES:
        rows = [f"| `{name}` | {kind} | {default} | {meaning} |" for name, kind, default, meaning in settings(model)]
        parts.append(
            "\n".join([f"## {title}", what, "", "| setting | type | default | meaning |", "|---|---|---|---|", *rows])
        )
    return "\n".join([_HEAD, "\n\n".join(parts)]) + "\n"


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Dotted name, type, default and meaning of each; of one that holds others what they are together comes first."""
    for name, field in model.model_fields.items():
        dotted, inside = prefix + name, _inside(field.annotation)
        if inside is None:
            yield dotted, _kind(field), _default(field), _cell(field.description or "")
            continue
        many, below = inside
        yield (
            f"{dotted}{many}",
            "",
            _default(field) if many else "",
            _cell(field.description or inspect.getdoc(below) or ""),
        )
        yield from settings(below, f"{dotted}{many}.")


def _inside(annotation: Any) -> tuple[str, type[BaseModel]] | None:
    """The settings that one holds, and how a name of them continues."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "", annotation
    arguments = [one for one in get_args(annotation) if inspect.isclass(one) and issubclass(one, BaseModel)]
    if not arguments:
        return None
    return (".ID" if get_origin(annotation) is dict else "[]"), arguments[0]


def _kind(field: FieldInfo) -> str:
    """What a value may be, with its bounds."""
    found = _annotated(field.annotation)
    return ", ".join([found, *_bounds(field.metadata)])


def _annotated(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [bound for one in arguments[1:] for bound in _bounds(getattr(one, "metadata", [one]))]
        return ", ".join([_annotated(arguments[0]), *bounds])
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join("null" if one is NoneType else _annotated(one) for one in arguments)
    if origin is dict:
        return "mapping"
    if issubclass(annotation, Enum):
        return " / ".join(f"`{one.value}`" for one in annotation)
    return _TYPES[annotation]


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for one in metadata:
        for name, words in _BOUNDS.items():
            if isinstance(one, annotated_types.BaseMetadata) and getattr(one, name, None) is not None:
                yield words.format(getattr(one, name))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "must be set"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "null"
    if value in ("", (), {}):
        return "empty"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
