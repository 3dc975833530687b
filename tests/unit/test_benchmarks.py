"""Every benchmark can at least be started: most of them run for minutes, which no test does."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks

MODULES = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("benchmarks.load")])
def test_benchmark_imports(module: str) -> None:
    """What it takes from elsewhere is still there; Locust's files are run by tests/serve/test_load.py."""
    assert importlib.import_module(module).__doc__
