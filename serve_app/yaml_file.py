"""Read a YAML file so that every mistake in it has a line number."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

import yaml

from serve_app.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error: plain YAML lets the second one win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key: Any = self.construct_object(key_node, deep=True)  # pyright: ignore[reportUnknownMemberType]
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key}' stands here twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError with line and column, or with why it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}{error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError("line 1: not a mapping; a Serve config file has 'applications:' at its outermost level")
    return cast("dict[str, Any]", content)
