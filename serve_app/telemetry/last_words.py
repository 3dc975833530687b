"""What a process still has to say when it exits, without waiting for who does not listen."""

from __future__ import annotations

import threading
from collections.abc import Callable


class LastWords:
    """Runs `say` once it is called, and returns when that is done or `wait_s` seconds are over, whichever is first.

    The thread is there from the beginning: from Python 3.12 on, none can be started while the interpreter exits.
    """

    def __init__(self, say: Callable[[], object], wait_s: float) -> None:
        self._say, self._wait_s = say, wait_s
        self._now, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="last-words", daemon=True).start()

    def __call__(self) -> None:
        self._now.set()
        self._done.wait(self._wait_s)

    def _run(self) -> None:
        self._now.wait()
        try:
            self._say()
        finally:
            self._done.set()
