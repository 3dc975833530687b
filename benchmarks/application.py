"""The application under measurement, started as a user starts it: `serve run CONFIG`, with a private Ray below it.

Everything else goes through doors that exist anyway: requests and health over HTTP, live settings by a redeploy as
`serve deploy` does it, status and ledger from the coordinator (what `serve-app status` shows).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import ray
import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

import serve_app
from benchmarks.processes import Server, exit_when_terminated, free_port, parent
from benchmarks.report import ROOT
from serve_app.engine import spare
from serve_app.pool import naming

START_S = 600.0
POLL_S = 0.05
READY_POLL_S = 0.5
RAY_START_FAILED = "The current node timed out during startup"
Config = dict[str, Any]
Status = dict[str, Any]


class Application:
    """One Serve application on a Ray cluster of its own; a context manager that starts and stops it.

    Args:
        config: a Serve config file as plain values; gets a private port.
    """

    def __init__(self, config: Config) -> None:
        self.port, self._gcs_port = free_port(), free_port()
        self.config = config | {"http_options": {"host": "127.0.0.1", "port": self.port}}
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: Server | None = None
        self._dashboard = ""
        self._temp = Path()

    def __enter__(self) -> Application:
        # Ray's socket paths must stay short, so this is not below TMPDIR.
        made = subprocess.run(["mktemp", "-d", "/tmp/bXXXXX"], capture_output=True, text=True, check=True)
        self._temp = Path(made.stdout.strip())
        path = self._temp / "config.yaml"
        path.write_text(yaml.safe_dump(self.config, sort_keys=False))
        try:
            self._start(path)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._dashboard:
            ray.shutdown()
            self._dashboard = ""
        if self.server is not None:
            self.server.stop()
        shutil.rmtree(self._temp, ignore_errors=True)

    def redeploy(self, config: Config) -> None:
        """Deploy another version of the config, with the same port. Returns once Serve has taken it."""
        self.config = config | {"http_options": self.config["http_options"]}
        ServeSubmissionClient(self._connect()).deploy_applications(self.config)

    def status(self) -> Status:
        """What the newest coordinator says. Raises ValueError or RayError while there is none."""
        self._connect()
        names = naming.coordinator_names()
        answers = ray.get([naming.coordinator(name).status.remote() for name in names], timeout=10)
        return max(answers, key=lambda answer: answer["epoch"])

    def wait(self, until: Callable[[Status], bool], what: str, timeout_s: float = START_S) -> Status:
        """Poll the status until it satisfies `until`. Raises TimeoutError with the last status."""
        deadline, status = time.monotonic() + timeout_s, {}
        while time.monotonic() < deadline:
            try:
                status = self.status()
                if until(status):
                    return status
            except (ValueError, ray.exceptions.RayError):
                pass  # the coordinator is just being replaced
            time.sleep(POLL_S)
        raise TimeoutError(f"waited {timeout_s:g} s until {what}; last: {states(status)}")

    def settled(self, active: int, standby: int, tier: str = "") -> Status:
        """Wait until exactly these slots are there, standbys at `tier` (any, if empty), with nothing to do."""

        def quiet(status: Status) -> bool:
            slots = [slot for slot in status["slots"] if not slot["leaving"]]
            names = [slot["state"] for slot in slots]
            parked = all(slot["tier"] == tier for slot in slots if slot["state"] == "standby" and tier)
            idle = not any(slot["pending"] or slot["in_flight"] for slot in slots)
            counts = (names.count("active"), names.count("standby"), len(names))
            return not status["blind"] and counts == (active, standby, active + standby) and parked and idle

        return self.wait(quiet, f"{active} active, {standby} standby {tier}")

    def wait_until_gone(self, name: str) -> None:
        """Wait until the coordinator knows nothing of this slot any more."""
        self.wait(lambda status: all(slot["slot"] != name for slot in status["slots"]), f"slot {name} is gone")

    def ledger(self, kind: str) -> list[dict[str, Any]]:
        """All transitions of one kind that the coordinator remembers, oldest first."""
        entries = [entry for entry in self.status()["ledger"] if entry["kind"] == kind]
        return sorted(entries, key=lambda entry: entry["start_s"])

    def engine_pids(self) -> list[int]:
        """All processes of all slots' engines; empty with `pool: off`."""
        try:
            return [pid for slot in self.status()["slots"] for pid in slot["engine_pids"]]
        except ValueError:
            return []

    def wait_for_spare(self, slot: dict[str, Any]) -> None:
        """Wait until the next slot of this one's node would find a process with vLLM imported; at most START_S."""
        raylet = parent(slot["pid"])
        self.wait(lambda _: spare.is_ready(raylet), "a spare worker has imported vLLM")

    def kill(self, slot: dict[str, Any]) -> None:
        """Kill a slot's process, as an out-of-memory killer would."""
        os.kill(slot["pid"], signal.SIGKILL)

    def replica_starts(self) -> list[float]:
        """When Serve began to start each replica of the slot deployment that it has now: wall clock, sorted."""
        details = ServeSubmissionClient(self._connect()).get_serve_details()
        replicas = details["applications"]["default"]["deployments"]["Slot"]["replicas"]
        return sorted(replica["start_time_s"] for replica in replicas)

    def _environment(self) -> dict[str, str]:
        # Whatever a worker preloads imports this package, which would hand even plain Serve our settings for it.
        preload = serve_app.RAY_ENVIRONMENT if "controller_options" in self.config else {}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return tool_environment() | {
            "PYTHONPATH": path,  # Ray's workers import this working tree, not an installed version
            "RAY_TMPDIR": str(self._temp),
            "RAY_GCS_SERVER_PORT": str(self._gcs_port),
            "RAY_ADDRESS": "local",  # else Ray may join a cluster that somebody else runs on this machine
            "RAY_USAGE_STATS_ENABLED": "0",
            **preload,
        }

    def _start(self, path: Path) -> None:
        """Start it and wait until it serves; Ray gives its own processes 30 s, too little for a busy machine."""
        for attempts_left in (2, 1, 0):
            self.server = Server([tool("serve"), "run", str(path)], self._environment(), self._temp / "serve.log")
            try:
                self._wait_until_served(self.server)
                return
            except RuntimeError as ended:
                if not attempts_left or RAY_START_FAILED not in str(ended):
                    raise
                self.server.stop()

    def _wait_until_served(self, server: Server) -> None:
        deadline = time.monotonic() + START_S
        while not is_served(self.url):
            server.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {START_S:g} s:\n{server.tail()}")
            time.sleep(READY_POLL_S)

    def _connect(self) -> str:
        """Join its Ray cluster, once; one application of a process at a time. Returns the dashboard's address."""
        if not self._dashboard:
            address = f"{ray.util.get_node_ip_address()}:{self._gcs_port}"
            context = ray.init(address=address, namespace="serve", logging_level=logging.ERROR, log_to_driver=False)
            self._dashboard = f"http://{context.dashboard_url}"
            exit_when_terminated()  # Ray has taken SIGTERM for itself
        return self._dashboard


def is_served(url: str) -> bool:
    """Whether an engine behind `url` answers."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def states(status: Status) -> str:
    """One line for people."""
    return ", ".join(f"{slot['slot']} {slot['state']} {slot['tier']}" for slot in status.get("slots", [])) or "no slots"


def tool(name: str) -> str:
    """A command of the environment that this Python runs in, or of the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def tool_environment() -> dict[str, str]:
    """This environment, with its own commands first: servers start `python` of their own.

    Without what importing serve_app has set here for Serve's own processes: a config file sets it, or does without.
    """
    folder = str(Path(sys.executable).parent)
    ours = serve_app.SERVE_ENVIRONMENT | serve_app.RAY_ENVIRONMENT
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PATH": os.pathsep.join([folder, os.environ.get("PATH", "")])}


def stage_s(transition: dict[str, Any], *names: str) -> float:
    """Seconds that a transition spent in these stages, as the slot itself saw them (workers' stages lie inside)."""
    stages = (stage for stage in transition["stages"] if stage["stage"] in names and stage["rank"] < 0)
    return sum(stage["duration_s"] for stage in stages)
