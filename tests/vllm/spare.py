"""On a Ray of its own: a slot's process asks for a spare, then another one starts. Prints what the second found."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import serve_app  # noqa: F401  (tells Ray's workers to look for orders)

import ray  # isort: skip

DEADLINE_S = 120
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Process:
    """Stands for a slot's process: an actor."""

    def pid(self) -> int:
        return os.getpid()

    def has_vllm(self) -> bool:
        return "vllm.v1.engine.async_llm" in sys.modules

    def compile_cache(self) -> str | None:
        """Torch chooses one as it is imported, if nobody has before."""
        return os.environ.get(COMPILE_CACHE)

    def ensure_spare(self) -> list[int]:
        """Ask twice, as two slots of a node would; returns the spares' pids, once there is one."""
        os.environ[COMPILE_CACHE] = "/chosen"
        from serve_app.engine import spare
        from serve_app.slot.spare import ensure

        ensure()
        ensure()
        return spare.waiting(os.getppid())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temp:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=temp, logging_level="ERROR", log_to_driver=False)
        actor: Any = ray.remote(num_cpus=0)(Process)
        first = actor.remote()
        spares = ray.get(first.ensure_spare.remote())
        # Until it has imported vLLM it is no worker that Ray could give to anybody.
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            second = actor.remote()
            if ray.get(second.pid.remote()) in spares:
                asked = (first.has_vllm, second.has_vllm, second.compile_cache)
                print("SPARE", len(spares), *(ray.get(method.remote()) for method in asked))  # noqa: T201
                break
            time.sleep(1)
        ray.shutdown()


if __name__ == "__main__":
    main()
