"""The application under test, used through the doors that people use: HTTP, a config deploy, and processes to kill."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema

from serve_app.pool import naming

MODEL = "sim"


@dataclass
class Answer:
    """What a client got: status, the slot process and model that answered, tokens, seconds to the first token."""

    status: int
    slot: str = ""
    model: str = ""
    tokens: int = 0
    first_s: float = 0.0
    done: bool = False
    body: str = ""
    retry_after: str = ""


class Pool:
    def __init__(self, port: int, script: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.script_file = script

    def deploy(
        self, live: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, wait: bool = True, **args: Any
    ) -> dict[str, Any]:
        """Deploy as `serve deploy` does, and (`wait`) wait until the pool has settled.

        Args:
            engine: beyond the usual `engine_kwargs`, for every model.
            args: may name several models as `ids`, and for some of them whose engine they use as `engine_of`.
        """
        self.script({})
        engine_kwargs = {"start_s": 0.2, "script": str(self.script_file), **(engine or {})}
        ids, engine_of = args.pop("ids", [MODEL]), args.pop("engine_of", {})
        models = [
            {"id": name, "engine": "simulated", "engine_kwargs": engine_kwargs, "engine_of": engine_of.get(name, "")}
            for name in ids
        ]
        slot = {"max_ongoing_requests": 4, "cpus": 0.1, "health_check_period_s": 0.5, **args.pop("slot", {})}
        application = {
            "name": "default",
            "import_path": "serve_app:app",
            "args": {"models": models, "slot": slot, **args},
            "deployments": [{"name": "Pool", "user_config": live or {}}] if args.get("pool", True) else [],
        }
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        serve.context._get_global_client().deploy_apps(schema, _blocking=wait)
        if wait and args.get("pool", True):
            self.wait(lambda status: _configured(status, live or {}), "the live settings arrive")
            self.freeze(False)  # an earlier test that failed may have left it frozen
            standby = None if (live or {}).get("slots", {}).get("standby", 1) else 0
            return self.settled(
                sum(status["min_active"] for status in self.status()["live"]["models"].values()), standby
            )
        return {}

    def script(self, entries: dict[str, str]) -> None:
        """What the simulated engines do from now on (see SimulatedTimes.script)."""
        self.script_file.write_text(json.dumps(entries))

    def coordinators(self) -> list[str]:
        return naming.coordinator_names("default")

    def status(self) -> dict[str, Any]:
        """The newest coordinator's status."""
        answers = [ray.get(naming.coordinator(name).status.remote(), timeout=5) for name in self.coordinators()]
        return max(answers, key=lambda answer: answer["epoch"])

    def wait(self, until: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 60) -> dict[str, Any]:
        """Poll the status until it satisfies `until`; fails with the last status otherwise."""
        deadline, status = time.monotonic() + timeout_s, {}
        while time.monotonic() < deadline:
            try:
                status = self.status()
                if until(status):
                    return status
            except (ValueError, ray.exceptions.RayError):
                pass
            time.sleep(0.05)
        raise AssertionError(
            f"waited {timeout_s} s in vain until {what}; last: {json.dumps(status, default=str)[:3000]}"
        )

    def settled(self, active: int = 1, standby: int | None = None) -> dict[str, Any]:
        """Wait until `active` slots are active (and `standby` standby), all others standby, and clients are served."""

        def quiet(status: dict[str, Any]) -> bool:
            states = [slot["state"] for slot in status["slots"] if not slot["leaving"]]
            enough = states.count("standby") >= 1 if standby is None else states.count("standby") == standby
            return (
                not status["blind"]
                and states.count("active") == active
                and enough
                and set(states) <= {"active", "standby"}
                and not any(slot["pending"] for slot in status["slots"])
                and httpx.get(f"{self.url}/health/ready").status_code == 200
            )

        return self.wait(quiet, f"{active} active, {standby} standby")

    def slots(self, state: str) -> list[dict[str, Any]]:
        return [slot for slot in self.status()["slots"] if slot["state"] == state]

    def operate(self, verb: str, slot: str | None = None) -> str:
        return serve.get_deployment_handle("Pool", "default").operate.remote(verb, slot).result()

    def freeze(self, frozen: bool) -> None:
        serve.get_deployment_handle("Pool", "default").freeze.remote(frozen).result()

    def promotions(self) -> list[dict[str, Any]]:
        return [entry for entry in self.status()["ledger"] if entry["kind"] == "promotion"]

    def burst(self, count: int, tokens: int = 20, **kwargs: Any) -> list[Answer]:
        return asyncio.run(self.burst_async(count, tokens, **kwargs))

    async def burst_async(self, count: int, tokens: int = 20, **kwargs: Any) -> list[Answer]:
        limits = httpx.Limits(max_connections=1000)
        async with httpx.AsyncClient(timeout=90, limits=limits) as client:
            return await asyncio.gather(*(self.stream(client, tokens, **kwargs) for _ in range(count)))

    async def stream(
        self, client: httpx.AsyncClient, tokens: int, headers: dict[str, str] | None = None, model: str = MODEL
    ) -> Answer:
        return await stream(client, self.url, tokens, headers, model)


async def stream(
    client: httpx.AsyncClient, url: str, tokens: int, headers: dict[str, str] | None = None, model: str = MODEL
) -> Answer:
    """One streamed chat completion; what goes wrong on the way is in the answer's body."""
    body = {"model": model, "messages": [], "max_tokens": tokens, "stream": True}
    begin, answer = time.monotonic(), Answer(0)
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers or {}) as response:
            answer.status = response.status_code
            answer.retry_after = response.headers.get("retry-after", "")
            async for line in response.aiter_lines():
                _take_line(answer, line, begin)
    except httpx.HTTPError as error:
        answer.body += f" {error!r}"
    return answer


def _take_line(answer: Answer, line: str, begin: float) -> None:
    if line.startswith("data: {"):
        answer.first_s = answer.first_s or time.monotonic() - begin
        event = json.loads(line[6:])
        answer.slot, answer.model = event["id"].removeprefix("sim-"), event["model"]
        answer.tokens += 1
    elif line == "data: [DONE]":
        answer.done = True
    else:
        answer.body += line


def _configured(status: dict[str, Any], live: dict[str, Any]) -> bool:
    """Whether the coordinator has the live settings that were deployed."""
    return all(
        status["live"][key] == value
        if not isinstance(value, dict)
        else all(
            status["live"][key].get(inner) == wanted or isinstance(wanted, dict) for inner, wanted in value.items()
        )
        for key, value in live.items()
    )


def served(answers: list[Answer], tokens: int) -> list[Answer]:
    """The answers that are whole."""
    return [answer for answer in answers if answer.status == 200 and answer.done and answer.tokens == tokens]
