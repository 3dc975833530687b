"""Imported by every Ray worker process as it starts; one that a slot has asked for imports vLLM, and waits as a spare.

Ray imports the modules named by RAY_preload_python_modules in each worker that it starts, whatever that will become.
vLLM's 6-20 s would delay all of them, so a worker imports it only if it finds an order: a file that a slot of this
node has left (see `serve_app.slot.spare`). Ray then gives the warm process to the next slot that starts on the node.
This module must stay light, and must never raise.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from serve_app.node_folder import node_folder

ORDER, READY = "order", "ready"


def folder(raylet: int) -> Path:
    """Where slots and spares of one raylet (by its pid, the parent of all its workers) leave their files."""
    return node_folder() / f"spares-{raylet}"


def order(raylet: int, environment: dict[str, str]) -> Path:
    """Ask the next worker that this raylet starts to import vLLM, under these environment variables."""
    place = folder(raylet)
    place.mkdir(exist_ok=True)
    for other in place.parent.glob("spares-*"):
        if not _is_alive(other.name.removeprefix("spares-")):
            shutil.rmtree(other, ignore_errors=True)
    unfinished = place / f"{ORDER}.{os.getpid()}"
    unfinished.write_text(json.dumps(environment))
    return unfinished.replace(place / ORDER)


def waiting(raylet: int) -> list[int]:
    """Pids of the raylet's spares, those that still import included."""
    place = folder(raylet)
    files = [entry for entry in place.iterdir() if entry.name.isdigit()] if place.is_dir() else []
    for dead in [file for file in files if not _is_alive(file.name)]:
        dead.unlink(missing_ok=True)
    return [int(file.name) for file in files if _is_alive(file.name)]


def is_ready(raylet: int) -> bool:
    """Whether one of the raylet's spares has imported vLLM."""
    return any((folder(raylet) / str(pid)).read_text() == READY for pid in waiting(raylet))


def taken(raylet: int) -> None:
    """This process is no spare any more: it has become something."""
    (folder(raylet) / str(os.getpid())).unlink(missing_ok=True)


def _is_alive(pid: str) -> bool:
    return (Path("/proc") / pid).exists()


def _obey() -> None:
    """Take the order, if there is one: whoever renames it first has it."""
    place = folder(os.getppid())
    if not (place / ORDER).exists():
        return
    mine = place / str(os.getpid())
    (place / ORDER).rename(mine)
    os.environ.update(json.loads(mine.read_text()))
    from serve_app.engine.imports import import_vllm

    import_vllm()
    mine.write_text(READY)


with suppress(Exception):  # a worker without vLLM is slower, not wrong
    _obey()
