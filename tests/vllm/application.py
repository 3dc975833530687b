"""The application as its users meet it: `serve run`, `serve deploy`, Ctrl-C, and what the operating system shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.processes import free_port

MODEL = "smollm2-135m"
# Requests that one slot may be given at once.
HARD = 4
# Two cold starts at once take half a minute on two idle cores; four minutes were seen on busy ones.
START_S = 480
BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parents[2]

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

Status = dict[str, Any]


class Application:
    """One `serve run` with a Ray of its own; `start` it, and `stop` it in the end.

    Args:
        folder: for its configuration files and its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "serve.log"
        self._temp = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # Ray's socket paths must stay short
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.Client(base_url=self.url, timeout=10)
        self._seen: set[psutil.Process] = set()
        self._serve: psutil.Popen | None = None
        self._observer: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Without what other tests' Ray, or importing serve_app, has put there: the config file must be enough."""
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
        modules = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return clean | {"PATH": path, "PYTHONPATH": modules, "RAY_TMPDIR": self._temp}

    @property
    def client_environment(self) -> dict[str, str]:
        """Ray gives its token to an address that is named only if it is told to."""
        return self.environment | {"RAY_AUTH_MODE": "token"}

    # What a user does.

    def start(self) -> None:
        """Start it and wait until one slot is active and the other one standby."""
        with self._log.open("w") as log:
            self._serve = psutil.Popen(
                [str(BIN / "serve"), "run", str(self._config({}))],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to a process group
            )
        self._until(self.is_ready, "/health/ready", START_S)
        with (self._folder / "observer.log").open("w") as log:
            self._observer = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.observer", self._gcs_address()],
                cwd=REPOSITORY,
                env=self.client_environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.settled(timeout_s=START_S)

    def deploy(self, live: dict[str, Any]) -> None:
        """Change the live settings with `serve deploy`; `settled` waits until they are in force."""
        found = re.search(r"dashboard at\D*(http://[\w.]+:\d+)", _COLOUR.sub("", self._log.read_text()))
        assert found, "`serve run` names its dashboard"
        command = [str(BIN / "serve"), "deploy", str(self._config(live)), "-a", found[1]]
        subprocess.run(command, env=self.client_environment, check=True, capture_output=True, timeout=120)

    def interrupt(self) -> list[psutil.Process]:
        """Press Ctrl-C; returns the processes that are left half a minute after `serve run` has ended."""
        assert self._serve is not None
        self._end_observer()
        self.processes()  # some leave the session, and the tree ends with its root
        os.killpg(self._serve.pid, signal.SIGINT)
        self._serve.wait(timeout=60)
        self._until(lambda: not self._left(), "", 30, fail=False)
        return self._left()

    def end(self) -> None:
        """End whatever is left, by force, and remove Ray's files."""
        self._end_observer()
        self._http.close()
        for process in self._left() if self._serve is not None else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._temp, ignore_errors=True)

    # What can be seen from outside.

    def is_ready(self) -> bool:
        assert self._serve is not None
        if self._serve.poll() is not None:
            raise AssertionError(f"`serve run` has ended:\n{(self._folder / 'serve.log').read_text()[-3000:]}")
        try:
            return self._http.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def status(self) -> Status:
        """The pool's status, as `serve-app status` shows it."""
        assert self._observer is not None and self._observer.stdin is not None and self._observer.stdout is not None
        self._observer.stdin.write("\n")
        self._observer.stdin.flush()
        lines = iter(self._observer.stdout.readline, "")
        answer = next((line for line in lines if line.startswith("STATUS ")), "")
        assert answer, f"the observer has ended:\n{(self._folder / 'observer.log').read_text()}"
        status: Status = json.loads(answer.removeprefix("STATUS "))
        for pid in (pid for slot in status.get("slots", []) for pid in slot["engine_pids"]):
            with suppress(psutil.NoSuchProcess):
                engine = psutil.Process(pid)  # below the node's forkserver and its keeper, not below `serve run`
                self._seen |= {engine, *(above for above in engine.parents() if above.pid != 1)}
        return status

    def slots(self, state: str) -> list[dict[str, Any]]:
        return [slot for slot in self.status().get("slots", []) if slot["state"] == state]

    def wait(self, until: Callable[[Status], bool], what: str, timeout_s: float = 30) -> Status:
        """Poll the status until it satisfies `until`; fails with the last status otherwise."""
        last: Status = {}

        def reached() -> bool:
            nonlocal last
            last = self.status()
            return bool(last) and until(last)

        try:
            self._until(reached, what, timeout_s)
        except AssertionError as late:
            raise AssertionError(f"{late}; last: {json.dumps(last)[:3000]}") from None
        return last

    def settled(self, tier: str | None = None, timeout_s: float = 60) -> Status:
        """Wait until one slot is active, the other one standby (at `tier`), and nothing is under way."""

        def quiet(status: Status) -> bool:
            slots = status["slots"]
            return (
                sorted(slot["state"] for slot in slots) == ["active", "standby"]
                and not any(slot["pending"] or slot["leaving"] or slot["in_flight"] for slot in slots)
                and all(tier in (None, slot["tier"]) for slot in slots if slot["state"] == "standby")
                and self.is_ready()
            )

        return self.wait(quiet, f"one active slot, one standby at tier {tier or 'any'}", timeout_s)

    def processes(self) -> set[psutil.Process]:
        """Every process that was ever seen below `serve run` or in its session, which orphans do not leave."""
        assert self._serve is not None
        self._seen |= {process for process in psutil.process_iter() if _session(process) == self._serve.pid}
        if self._serve.is_running():
            self._seen |= set(self._serve.children(recursive=True))
        return self._seen

    def _left(self) -> list[psutil.Process]:
        return [process for process in self.processes() if is_alive(process)]

    def _config(self, live: dict[str, Any]) -> Path:
        """`configs/cpu.yaml`, smaller, on another port, and with these live settings."""
        config = yaml.safe_load((REPOSITORY / "configs" / "cpu.yaml").read_text())
        (application,) = config["applications"]
        (model,) = application["args"]["models"]
        (pool,) = application["deployments"]
        config["http_options"]["port"] = self._port
        model["engine_kwargs"] |= {"max_model_len": 1024, "max_num_seqs": HARD, "kv_cache_memory_bytes": 128 << 20}
        application["args"]["slot"]["max_ongoing_requests"] = HARD
        pool["user_config"] |= {
            "slots": {"min": 2, "max": 2, "standby": 1, "demote_after_s": 1},
            "promote_when": {"in_flight": HARD},  # not before the active slot is full: then it is known who serves
        } | live
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def _gcs_address(self) -> str:
        flag = "--gcs-address="
        arguments = [word for process in self._left() for word in process.cmdline()]
        return next(word.removeprefix(flag) for word in arguments if word.startswith(flag))

    def _end_observer(self) -> None:
        if self._observer is not None:
            self._observer.kill()
            self._observer.communicate()
            self._observer = None

    def _until(self, condition: Callable[[], bool], what: str, timeout_s: float, fail: bool = True) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                if fail:
                    raise AssertionError(f"waited {timeout_s} s in vain for {what}")
                return
            time.sleep(0.2)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engine_core(slot: dict[str, Any]) -> psutil.Process:
    """The EngineCore of a slot: that of its engine's processes which leads their process group."""
    return next(psutil.Process(pid) for pid in slot["engine_pids"] if os.getpgid(pid) == pid)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None
