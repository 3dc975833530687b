"""The directories through which this user's processes of one node find what they share: helpers, locks, weights.

What stands there starts processes, sets their environment and is served, so nobody else may write to it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from serve_app.errors import EngineError


def node_folder(below: Path | None = None) -> Path:
    """Return it, made if it was not there. Raises EngineError if others could have put something there.

    Args:
        below: where it lies; None: the directory for temporary files.
    """
    folder = (below or Path(tempfile.gettempdir())) / f"serve_app-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # a link would lead to what somebody else owns
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineError(f"{folder} must be a directory that only this user can enter: engines are started through it")
    return folder
