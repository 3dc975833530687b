"""What a slot's own process imports of vLLM: a spare worker has done so before it is wanted."""

from __future__ import annotations

import gc
import importlib
from typing import Any

from serve_app.engine.arguments import first_module


def import_vllm() -> None:
    """Import what a slot's own process needs of vLLM. Blocks for 6-20 s, the first time."""
    importlib.import_module("vllm.v1.engine.async_llm")
    api_modules()
    gc.freeze()  # what was imported stays: looking at millions of objects again and again would stop streams meanwhile


def api_modules() -> tuple[Any, Any]:
    """The modules that hold `build_app` and `init_app_state`."""
    old = "vllm.entrypoints.openai.api_server"
    return (
        first_module("vllm.entrypoints.launchers.app", old),
        first_module("vllm.entrypoints.launchers.api_server.app_state", old),
    )
