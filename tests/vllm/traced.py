"""A cold start, a sleep and a wake under one trace, with OTLP configured: `python -m tests.vllm.traced MODEL`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from serve_app.config import Tier
from serve_app.telemetry import spans
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import recording, stage

from .engines import make


async def main(model: str) -> None:
    assert spans.configure("slot", "traced")
    engine = make(Path(model))
    try:
        with recording(), stage(Stage.COLD_START):
            await engine.start()
            await engine.worker_stages()
        with recording(), stage(Stage.DEMOTION), stage(Stage.SLEEP):
            await engine.sleep(Tier.HOST)
            await engine.worker_stages()
        with recording(), stage(Stage.PROMOTION):
            await engine.wake()
            await engine.worker_stages()
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
