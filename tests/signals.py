"""What a program started by a test must not inherit."""

from __future__ import annotations

import signal


def let_ctrl_c_through() -> None:
    """For `preexec_fn`: a shell's background job, as this may be one, ignores Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
