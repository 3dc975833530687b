"""What the forkserver imports must leave CUDA alone: a process that has initialised it cannot be forked."""

from __future__ import annotations

import subprocess
import sys

from serve_app.engine import forkserver

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_CODE = """
import ctypes, sys
import serve_app.engine.preload
assert "flashinfer" in sys.modules, "the module that would ask CUDA is not there"
print(ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())), flush=True)
"""


def test_preloading_leaves_cuda_alone() -> None:
    """The driver itself says whether this process has initialised it."""
    environment = forkserver.server_environment()
    done = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == [str(_NOT_INITIALIZED)], done.stderr
