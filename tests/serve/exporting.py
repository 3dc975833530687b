"""An application in a Ray and a Serve of its own, whose processes were told of a collector when they started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from .conftest import free_port
from .pool import MODEL, Answer, stream

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def application(folder: Path, variables: dict[str, str]) -> Iterator[str]:
    """`serve run` with the shipped configuration for simulated engines; yields its address, perhaps before it answers.

    Args:
        variables: OpenTelemetry's, for all of its processes.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temp:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment = clean | variables | {"RAY_TMPDIR": temp, "PYTHONPATH": str(REPOSITORY)}
        url, config = _config(folder)
        with (folder / "serve.log").open("w") as log:
            command = [str(Path(sys.executable).parent / "serve"), "run", str(config)]
            running = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            yield url
        finally:
            os.killpg(running.pid, signal.SIGINT)
            try:
                running.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                raise


def _config(folder: Path) -> tuple[str, Path]:
    """On a free port, with slots of four requests."""
    config = yaml.safe_load((REPOSITORY / "configs" / "cpu-simulated.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    (one,) = config["applications"]
    one["args"] = {
        "models": [{"id": MODEL, "engine": "simulated", "engine_kwargs": {"start_s": 0.2}}],
        "slot": {"cpus": 0.1, "max_ongoing_requests": 4},
    }
    one["deployments"] = [{"name": "Pool", "user_config": {"slots": {"demote_after_s": 0.5}}}]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return f"http://127.0.0.1:{port}", path


async def burst(url: str, client_trace: str) -> list[Answer]:
    """Eight streams at once, all in one client's trace: four more than the active slot takes."""
    headers = {"traceparent": f"00-{client_trace}-{'1' * 16}-01"}
    async with httpx.AsyncClient(timeout=60) as client:
        return await asyncio.gather(*(stream(client, url, 30, headers) for _ in range(8)))


async def ready(url: str, timeout_s: float = 240) -> None:
    """Wait until a slot is active."""
    async with asyncio.timeout(timeout_s), httpx.AsyncClient(timeout=10) as client:
        while True:
            try:
                if (await client.get(f"{url}/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
