"""NVIDIA's driver library, for what PyTorch has no function for. Its interface does not change with CUDA's version."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_LIBRARY = "libcuda.so.1"


@cache
def driver() -> Any:
    """The library. Raises OSError where there is no driver."""
    return ctypes.CDLL(_LIBRARY)


def check(status: int, what: str) -> None:
    """Raise RuntimeError with the driver's own words, if `status` is not its success."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status} in {what}: {(text.value or b'unknown').decode()}")
