"""The notebooks run top to bottom, and what is stored in them is what they give now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(path: Path) -> Any:
    """As `make notebooks` does it."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run(path)


def outputs(notebook: Any) -> list[list[str]]:
    """Of each cell with code what it printed, and the kinds of what it showed."""
    return [
        [
            output["text"] if output["output_type"] == "stream" else str(sorted(output["data"]))
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_both_are_there() -> None:
    """Those that the documentation names."""
    assert [path.name for path in NOTEBOOKS] == ["burst_replay.ipynb", "cold_start_ledger.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_what_it_gives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell fails, and every number printed is that of today's results: `make notebooks` stores them anew."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored = outputs(nbformat.read(path, as_version=4))
    assert outputs(run(path)) == stored
    assert sum("image/png" in shown for cell in stored for shown in cell) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_axis_has_a_unit(path: Path) -> None:
    """Each plot says in what its numbers are."""
    notebook = nbformat.read(path, as_version=4)
    labels = [
        label
        for cell in notebook.cells
        if cell.cell_type == "code"
        for label in re.findall(r'set_[xy]label\("([^"]+)"\)', cell.source)
    ]
    plots = sum("plt.show()" in cell.source for cell in notebook.cells)
    assert len(labels) >= plots
    assert all(re.search(r"\((s|%)( .+|, .+)?\)$", label) for label in labels), labels


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_a_machine_is_stored(path: Path) -> None:
    """No path of whoever ran it last, no error, no warning."""
    text = path.read_text()
    assert not re.search(r'"/(home|root|work|Users)/|Traceback|Warning', text)
