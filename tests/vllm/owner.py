"""A process that owns two engines, for a test to kill: `python -m tests.vllm.owner MODEL` prints all of its pids."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from serve_app.engine import processes

from .engines import make


async def main(model: str) -> None:
    engines = [make(Path(model), fork) for fork in (True, False)]
    for engine in engines:
        await engine.start()
    print("PIDS", *(pid for engine in engines for pid in processes.members(engine._groups)), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
