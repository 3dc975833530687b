"""Run every notebook top to bottom and store its outputs: `make notebooks`, after results or code have changed."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs made anew. Raises CellExecutionError, which shows the cell."""
    notebook = nbformat.read(path, as_version=4)
    # Without times of execution: they would make every run a change.
    client = NotebookClient(
        notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    notebook.metadata["language_info"] = {"name": "python"}  # not which Python it happened to be
    return notebook


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(run(path), path)
        print(path.name)


if __name__ == "__main__":
    main()
