"""Models in which an unknown key is an error, and reading them with messages that name the key and what is allowed."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from serve_app.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


class Strict(BaseModel):
    """An unknown key is an error: a misspelt setting that 'works' is the worst kind of outage."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def parse_strict(kind: type[T], values: dict[str, Any], where: str) -> T:
    """Read one strict model; `where` begins every message. Raises ConfigError with one line for each wrong key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(kind, problem, where) for problem in error.errors())) from None


def _explain(kind: type[BaseModel], problem: Any, where: str) -> str:
    path = ".".join([where, *(str(part) for part in problem["loc"])])
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown key; allowed: {', '.join(_siblings(kind, problem['loc']))}"
    return f"{path}: {problem['msg'].removeprefix('Value error, ')} (found {problem['input']!r:.80})"


def _siblings(kind: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that stand beside the one at `loc`, for an error message."""
    model: Any = kind
    for part in loc[:-1]:
        if isinstance(part, str) and isinstance(model, type) and issubclass(model, BaseModel):
            field = model.model_fields.get(part)
            model = _model_inside(field.annotation) if field else model
    return sorted(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _model_inside(annotation: Any) -> Any:
    """The BaseModel inside `X`, `X | None`, `tuple[X, ...]` or `dict[str, X]`."""
    if isinstance(annotation, type):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = _model_inside(part)
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return annotation
