"""The config files that come with the project are good, by the same check that users run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app import SERVE_ENVIRONMENT
from serve_app.cli.files import UNCHECKED, check_file
from serve_app.yaml_file import read_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def test_config_files_are_found() -> None:
    """The tests below are about something."""
    assert {"cpu.yaml", "cpu-simulated.yaml", "plain.yaml", "one-gpu.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_config_file_is_good(file: Path) -> None:
    """No problem, and no note about the file either: an example should not need excuses."""
    report = check_file(file)
    assert report.problems == []
    assert [note for note in report.notes if not note.startswith(UNCHECKED)] == []
    assert report.applications


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_config_file_brings_serve_its_environment(file: Path) -> None:
    """The environment in the file and the one that the package sets are the same."""
    content: dict[str, Any] = read_yaml(file)
    assert content["controller_options"]["runtime_env"]["env_vars"] == SERVE_ENVIRONMENT
