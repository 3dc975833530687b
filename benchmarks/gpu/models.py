"""Two models in one slot on a GPU: how long a switch takes, and whether memory stays what it was.

    python -m benchmarks.gpu.models --models DIR DIR [--switches 10]

One slot holds an engine for each model, one awake. A request for the model that is not awake finds the slot idle on the
other one: drain, sleep, wake, golden check and publication lie before its first token, whose time by the client's clock
is `switch_first_token_s`. Requests go to the two models in turn, each as soon as the one before is answered. Every
answer must be the one that its model gave at its first turn; models of different weights answer differently.

What the slot holds of GPU and host memory is read after every switch; growth is from the third to the last.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks import configs
from benchmarks.application import Application, Status
from benchmarks.client import Client, prompt
from benchmarks.configs import Config
from benchmarks.gpu import layouts
from benchmarks.processes import exit_when_terminated
from benchmarks.promotion import short
from benchmarks.report import Report, median
from serve_app.telemetry.stages import Stage

NAMES = ("a", "b")
TOKENS = 16
STEADY = 3
# The first switches fill caches and pin memory.
SETTLED = 2
Run = dict[str, Any]


@dataclass
class Benchmark:
    """What is measured, and where it is written.

    Attributes:
        models: directories, one for each model, of different weights.
    """

    models: list[Path]
    switches: int
    prefix: str
    report: Report = field(default_factory=lambda: Report("gpu_models", module="gpu.models"))

    def run(self) -> None:
        config = self._config()
        self.report.configs["shared"] = config
        with Application(config) as application:
            application.settled(0, 1)
            answers: dict[str, list[int]] = {}
            for number in range(2 + self.switches):  # two turns to learn the answers
                name = NAMES[number % 2]
                run = asyncio.run(_switch(application.url, name))
                expected = answers.setdefault(name, run["answer"])
                run |= {"switch": number - 1, "wrong": run["answer"] != expected, "settling": number < 2}
                self._keep(run | _last_promotion(application) | _held(application.status()))

    def _config(self) -> Config:
        # Without a share of the GPU of its own each engine leaves the other one, asleep, its room.
        shapes = [layouts.shape(directory, "tp1", hard=64) for directory in self.models]
        kwargs = {key: value for key, value in shapes[0].engine_kwargs.items() if key != "gpu_memory_utilization"}
        models: list[Config] = [
            {"id": name, "source": shape.source, "engine_kwargs": kwargs}
            for name, shape in zip(NAMES, shapes, strict=True)
        ]
        return configs.shared(models, replace(shapes[0], engine_kwargs=kwargs), slots=1)

    def _keep(self, run: Run) -> None:
        self.report.runs.append(run)
        shown = {key: value for key, value in run.items() if key not in ("stages", "answer")}
        print(", ".join(f"{key} {short(value)}" for key, value in shown.items()), flush=True)

    def claim(self) -> None:
        """Medians over the switches."""
        runs = [run for run in self.report.runs if not run["settling"]]
        claim = self.report.claim
        firsts = [run["first_token_s"] for run in runs if run["first_token_s"] is not None]
        claim(f"{self.prefix}_switch_first_token_s", median(firsts), target=1.5, note=f"median of {len(runs)} switches")
        claim(f"{self.prefix}_switch_first_token_max_s", max(firsts, default=None))
        claim(f"{self.prefix}_steady_first_token_s", median([run["steady_s"] for run in runs]), note="without a switch")
        bad = [run for run in self.report.runs if run["error"] or run["wrong"]]
        same = len({tuple(run["answer"]) for run in self.report.runs}) < len(NAMES)
        claim("wrong_or_failed_answers", float(len(bad)) + same, "answers", target=0)
        for name in dict.fromkeys(stage for run in runs for stage in run["stages"]):
            claim(f"stage:{name}", median([run["stages"][name] for run in runs if name in run["stages"]]))
        for kind in ("gpu", "host"):
            held = [run[f"{kind}_bytes"] for run in runs[SETTLED:]]
            growth = (held[-1] - held[0]) / 1e6 if held else None
            claim(f"{self.prefix}_{kind}_growth_mb", growth, "MB", note=f"over {len(held)} switches, whole slot")
            claim(f"{self.prefix}_{kind}_gb", max(held) / 1e9 if held else None, "GB", note="whole slot")


async def _switch(url: str, model: str) -> Run:
    """One request that finds the other model awake, then some that find this one."""
    async with Client(url, model) as client:
        first = await client.stream(prompt(1), TOKENS)
        answer = await _answer(url, model)
        steady = [await client.stream(prompt(2 + number), 2) for number in range(STEADY)]
    return {
        "model": model,
        "first_token_s": first.first_s,
        "steady_s": median([stream.first_s for stream in steady if stream.first_s is not None]),
        "error": first.error or next((stream.error for stream in steady if stream.error), ""),
        "answer": answer,
    }


async def _answer(url: str, model: str) -> list[int]:
    """The same question to both, answered in token ids: random weights say much that is no text."""
    body = {"model": model, "prompt": "Who are you?", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        answer = await http.post("/v1/completions", json=body | {"return_token_ids": True})
    found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return found


def _last_promotion(application: Application) -> Run:
    """Seconds of each of its stages, as the slot saw them."""
    entry = application.ledger(Stage.PROMOTION)[-1]
    stages = {stage["stage"]: stage["duration_s"] for stage in entry["stages"] if stage["rank"] < 0}
    return {"promotion_s": entry["duration_s"], "promotion_error": entry["error"], "stages": stages}


def _held(status: Status) -> Run:
    [slot] = status["slots"]
    return {"gpu_bytes": max(slot["device_bytes"], default=0), "host_bytes": slot["host_bytes"]}


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs=2, required=True, help="directories of the models' files")
    parser.add_argument("--switches", type=int, default=10)
    parser.add_argument("--prefix", default="h200", help="begins the claims' names: the GPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu_models.json")
    args = parser.parse_args()
    exit_when_terminated()
    benchmark = Benchmark(args.models, args.switches, args.prefix)
    try:
        benchmark.run()
    finally:  # a time limit must not cost what was measured before
        benchmark.claim()
        benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
