"""An application in a Ray and a Serve of its own, whose processes are told of a collector when they start."""

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
from typing import Any

import httpx
import yaml

from benchmarks.processes import free_port

REPOSITORY = Path(__file__).parents[1]
CLIENT_SPAN = "1" * 16


@contextmanager
def receiver(path: Path) -> Iterator[dict[str, str]]:
    """A real OTLP receiver, which writes spans into `path`; yields the variables that name it."""
    port = free_port()
    running = subprocess.Popen([sys.executable, "-m", "tests.otlp", str(port), str(path)], cwd=REPOSITORY)
    try:
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    finally:
        running.terminate()
        running.wait()


@contextmanager
def application(folder: Path, variables: dict[str, str], args: dict[str, Any], live: dict[str, Any]) -> Iterator[str]:
    """`serve run` with the shipped configuration on a free port; yields its address, perhaps before it answers.

    Args:
        variables: OpenTelemetry's, for all of its processes; RAY_ADDRESS, if it is to run on a Ray that is there.
        args, live: of the application, and of its `Pool`.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temp:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        modules = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        environment = clean | {"RAY_TMPDIR": temp} | variables | {"PYTHONPATH": modules}
        url, config = _config(folder, args, live)
        with (folder / "serve.log").open("w") as log:
            # As `serve run` does, where there is no script of that name beside this Python too.
            command = [sys.executable, "-m", "ray.serve.scripts", "run", str(config)]
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


def _config(folder: Path, args: dict[str, Any], live: dict[str, Any]) -> tuple[str, Path]:
    config = yaml.safe_load((REPOSITORY / "configs" / "cpu-simulated.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    (one,) = config["applications"]
    one |= {"args": args, "deployments": [{"name": "Pool", "user_config": live}]}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return f"http://127.0.0.1:{port}", path


def client_headers(client_trace: str) -> dict[str, str]:
    """Of a client that traces its requests itself."""
    return {"traceparent": f"00-{client_trace}-{CLIENT_SPAN}-01"}


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
