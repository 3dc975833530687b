"""Several models share one standby pool: does every request get its answer, and from the right model?

    python -m benchmarks.models [--engine vllm|simulated] [--requests 500] [--slots 2]

Four models on two slots, each slot with a sleeping engine for every one of them: SmolLM2-135M, and three tiny Llamas
(`benchmarks/parrot.py`) that say one word each, so that an answer shows who gave it. Half of the requests come in turns
(a burst for one model, then for the next: every burst finds the slots with other models), half at the same time (all
models mixed, in waves that are larger than both slots together). An answer is wrong if it says another model's name or
words, and failed if it is not whole; nothing is tried again.

`switch_first_token_s` is the time to the first token of the first request of each burst in turns: drain, sleep, wake,
golden check and publication, wherever they are needed. `body_read_ms` is what the proxy spends on finding the model in
a chat body of 1 and of 100 KB (`pool/body_model.py`), the price of one hop instead of two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import configs, parrot
from benchmarks.application import Application
from benchmarks.client import Client, Stream, prompt
from benchmarks.configs import Config, Shape
from benchmarks.processes import exit_when_terminated
from benchmarks.report import Report, median
from serve_app.config import DEFAULT_MODEL
from serve_app.percentile import percentile
from serve_app.pool.body_model import with_model

WORDS = ("red", "green", "blue")
TOKENS = 8
Run = dict[str, Any]


@dataclass
class Benchmark:
    """What is asked for, and where it is written.

    Attributes:
        models: entries of `args.models`. hard: requests that a slot is given at once.
    """

    models: list[Config]
    shape: Shape
    requests: int
    slots: int
    report: Report = field(default_factory=lambda: Report("models"))

    def run(self) -> None:
        config = configs.shared(self.models, self.shape, self.slots)
        self.report.configs["shared"] = config
        with Application(config) as application:
            application.settled(0, self.slots)
            asyncio.run(self._ask(application))
            status = application.settled(0, self.slots)
        for size in (1, 100):
            self.report.claim(f"body_read_ms_{size}_kb", asyncio.run(body_read_ms(size << 10)), "ms")
        self._conclude(status)

    @property
    def _names(self) -> list[str]:
        return [model["id"] for model in self.models]

    async def _ask(self, application: Application) -> None:
        clients = {name: Client(application.url, name) for name in self._names}
        burst = self.shape.hard + 2
        for number in range(0, self.requests // 2, burst):
            name = self._names[number // burst % len(self._names)]
            asked = [name] * min(burst, self.requests // 2 - number)
            self._keep("in turns", await _burst(clients, asked, number))
        wave = 2 * self.shape.hard * self.slots
        for number in range(self.requests // 2, self.requests, wave):
            asked = [self._names[i * 7 % len(self._names)] for i in range(min(wave, self.requests - number))]
            self._keep("at the same time", await _burst(clients, asked, number))

    def _keep(self, phase: str, answers: list[tuple[str, Stream]]) -> None:
        begin_s = min(stream.sent_s for _, stream in answers)
        for name, stream in answers:
            run: Run = {"phase": phase, "model": name, "burst_s": begin_s, "first_token_s": stream.first_s}
            run |= {"slot": stream.slot, "status": stream.status, "error": stream.error, "wrong": wrong(name, stream)}
            self.report.runs.append(run | {"tokens": stream.tokens, "text": stream.text[:40]})

    def _conclude(self, status: dict[str, Any]) -> None:
        runs = self.report.runs
        bad = [run for run in runs if run["wrong"] or run["error"] or run["tokens"] != TOKENS]
        self.report.claim("wrong_or_failed_answers", len(bad), "answers", target=0)
        self.report.claim("answers", len(runs), "answers")
        bursts: dict[float, float] = {}
        for run in runs:
            if run["phase"] == "in turns" and run["first_token_s"] is not None:
                bursts[run["burst_s"]] = min(run["first_token_s"], bursts.get(run["burst_s"], float("inf")))
        self.report.claim("switch_first_token_s", median(list(bursts.values())))
        for phase in ("in turns", "at the same time"):
            times = [run["first_token_s"] for run in runs if run["phase"] == phase and run["first_token_s"]]
            self.report.claim(f"p99_first_token_s_{phase.replace(' ', '_')}", percentile(times, 99))
        wakes = [e["duration_s"] for e in status["ledger"] if e["kind"] == "promotion" and not e["error"]]
        self.report.claim("promotion_s", median(wakes), note=f"of the last {len(wakes)} promotions")


async def _burst(clients: dict[str, Client], asked: Sequence[str], number: int) -> list[tuple[str, Stream]]:
    """One request for each of `asked`, at the same time."""
    streams = await asyncio.gather(
        *(clients[name].stream(prompt(number + index), TOKENS) for index, name in enumerate(asked))
    )
    return list(zip(asked, streams, strict=True))


def wrong(name: str, stream: Stream) -> bool:
    """Whether a whole answer comes from another model: by what it says of itself, and by its words."""
    words = set(stream.text.split())
    expected = words <= {name} if name in WORDS else not words & set(WORDS)
    return stream.done and not (stream.model == name and expected)


async def body_read_ms(size: int, repeat: int = 200) -> float:
    """Median milliseconds to find the model in a chat body of `size` bytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * size}], "model": "m"}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    times: list[float] = []
    for _ in range(repeat):
        begin = time.perf_counter()
        await with_model({"type": "http", "method": "POST", "headers": []}, receive)
        times.append(time.perf_counter() - begin)
    return 1000 * (median(times) or 0.0)


def vllm_models(folder: Path) -> list[Config]:
    """SmolLM2 and three parrots, made in `folder`."""
    kwargs = {"max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True, "kv_cache_memory_bytes": 128 << 20}
    parrots = [{"id": word, "source": str(parrot.make(folder / word, word)), "engine_kwargs": kwargs} for word in WORDS]
    return [{"id": DEFAULT_MODEL, "engine_kwargs": kwargs}, *parrots]


def simulated_models() -> list[Config]:
    """They answer with their name as `model`, and cost no CPU time."""
    kwargs = {"start_s": 0.1, "max_num_seqs": 4}
    return [{"id": name, "engine": "simulated", "engine_kwargs": kwargs} for name in (*("a", "b", "c"), DEFAULT_MODEL)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "simulated"], default="vllm")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    exit_when_terminated()
    with tempfile.TemporaryDirectory() as folder:
        simulated = arguments.engine == "simulated"
        models = simulated_models() if simulated else vllm_models(Path(folder))
        shape = Shape(engine=arguments.engine, hard=4, cpus=0.1 if simulated else 0.5)
        benchmark = Benchmark(models, shape, arguments.requests, arguments.slots)
        benchmark.run()
        benchmark.report.write(arguments.output)


if __name__ == "__main__":
    main()
