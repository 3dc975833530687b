"""Check the outer keys of a config file against Ray Serve's own schema, which by itself ignores keys it does not know.

Imports Ray, which takes seconds: only `serve-app check` and tests come here.
"""

from __future__ import annotations

from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from serve_app.checking import name_of

# Fields for single-application files of old; Serve refuses them in the files that exist today.
_REFUSED = {ServeApplicationSchema: {"host", "port"}}


def problems(config: dict[str, Any]) -> list[str]:
    """All unknown keys and wrong values, one line each."""
    found = _unknown_keys(ServeDeploySchema, config, "")
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        found += [_explain(config, dict(problem)) for problem in error.errors() if problem["type"] != "extra_forbidden"]
    return list(dict.fromkeys(found))


def _unknown_keys(model: type[BaseModel], values: dict[str, Any], prefix: str) -> list[str]:
    """Keys that `model` does not have, and those inside that its parts do not have."""
    allowed = set(model.model_fields) - _REFUSED.get(cast("Any", model), set[str]())
    found: list[str] = []
    for key, value in values.items():
        if key not in model.model_fields:
            found.append(f"{prefix}{key}: unknown key; allowed: {', '.join(sorted(allowed))}")
            continue
        inner = _model_inside(model.model_fields[key].annotation)
        for label, item in _mappings(value) if inner else []:
            found += _unknown_keys(cast("type[BaseModel]", inner), item, f"{prefix}{key}.{label}")
    return found


def _mappings(value: object) -> list[tuple[str, dict[str, Any]]]:
    """A mapping, or the mappings in a list, each with its part of the path."""
    if isinstance(value, dict):
        return [("", cast("dict[str, Any]", value))]
    items: list[Any] = value if isinstance(value, list) else []
    return [(f"{name_of(item, index)}.", item) for index, item in enumerate(items) if isinstance(item, dict)]


def _model_inside(annotation: Any) -> type[BaseModel] | None:
    """The model inside `X`, `X | None`, `dict | X` or `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for part in get_args(annotation) if (inner := _model_inside(part))), None)


def _explain(config: dict[str, Any], problem: dict[str, Any]) -> str:
    """One line with names instead of positions."""
    path: list[str] = []
    value: Any = config
    for part in problem["loc"]:
        value = _at(value, part)
        named = isinstance(part, int) and isinstance(value, dict)
        path.append(name_of(cast("dict[str, Any]", value), part) if named else str(part))
    message = " ".join(problem["msg"].removeprefix("Value error, ").split())
    if problem["type"] == "missing":
        return f"{'.'.join(path)}: missing"
    found = f" (found {problem['input']!r:.80})" if isinstance(value, _SCALAR) else ""
    return f"{'.'.join(path) or 'file'}: {message}{found}"


# Of a whole mapping that is wrong as such, the message says which part; showing it all would not help.
_SCALAR = (str, int, float, bool, type(None))


def _at(value: Any, part: int | str) -> Any:
    try:
        return value[part]
    except (KeyError, IndexError, TypeError):
        return None
