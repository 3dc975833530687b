"""How a wake-up's memory is asked for; that the driver gives it needs a GPU (tests/gpu/test_tiers.py)."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engine import mapping


def test_structures_are_cudas() -> None:
    """Sizes and offsets as a C compiler gives them for cuda.h of CUDA 12 and 13."""
    assert ctypes.sizeof(mapping._Properties) == 32 and ctypes.sizeof(mapping._Access) == 12
    fields = {name: getattr(mapping._Properties, name).offset for name in ("location", "win32", "compression", "rdma")}
    assert fields == {"location": 8, "win32": 16, "compression": 24, "rdma": 25}


@pytest.mark.parametrize("handle", [(0, 1 << 21, 4096, [(1, 2)]), (0, 1, 2), "handle", [0, 1, 2, 3]])
def test_a_handle_of_another_shape_is_left_to_vllm(handle: Any) -> None:
    """A version that keeps something else in it maps as it knows."""
    mapped: list[Any] = []
    cumem = SimpleNamespace(create_and_map=mapped.append)
    with mapping.plain_memory(cumem):
        cumem.create_and_map(handle)
    assert mapped == [handle]


def test_vllms_own_function_is_back_after_a_wake_that_failed() -> None:
    """Whatever ends the block."""
    cumem = SimpleNamespace(create_and_map=print)

    def fail() -> None:
        with mapping.plain_memory(cumem):
            assert cumem.create_and_map is not print
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert cumem.create_and_map is print
