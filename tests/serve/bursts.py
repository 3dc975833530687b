"""An application with simulated engines that exports its spans, and a burst on it from a client that traces itself."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from tests import exporting

from .pool import MODEL, Answer, stream

ARGS: dict[str, Any] = {
    "models": [{"id": MODEL, "engine": "simulated", "engine_kwargs": {"start_s": 0.2}}],
    "slot": {"cpus": 0.1, "max_ongoing_requests": 4},
}
LIVE: dict[str, Any] = {"slots": {"demote_after_s": 0.5}}


def application(folder: Path, variables: dict[str, str]) -> AbstractContextManager[str]:
    """With slots of four requests; `variables` are OpenTelemetry's."""
    return exporting.application(folder, variables, ARGS, LIVE)


async def burst(url: str, client_trace: str) -> list[Answer]:
    """Eight streams at once, all in one client's trace: four more than the active slot takes."""
    headers = exporting.client_headers(client_trace)
    async with httpx.AsyncClient(timeout=60) as client:
        return await asyncio.gather(*(stream(client, url, 30, headers) for _ in range(8)))
