"""The data path under load: our application against plain `vllm serve`, on one engine's GPUs, at 1, 32, 256 streams.

    python -m benchmarks.gpu.overhead --model DIRECTORY [--rounds 2] [--servers vllm pool unmerged]

Servers run one at a time, with the same engine settings; in every round each is started, given the same load by vLLM's
own `vllm bench serve`, and stopped, in an order that turns round. The first of `--servers` is what the others are
compared with:
- `vllm`: `vllm serve`; `vllm_merged`: the same with its own `stream_interval` at what our slots merge under load;
- `pool`: this application with one active slot; `unmerged`: it without merging of tokens (`slot.merge_events`);
- `actors`: `unmerged`, and between proxy and slot what Serve uses by default (streaming actor calls);
- `bare`: plain Ray Serve, one hop (`pool: off`).

`throughput_ratio` is pool / vllm in output tokens per second, `p99_tpot_ratio` the 99th percentile over requests of the
time per output token after the first, both at most streams; per number of streams they carry it in their name. A merged
event holds several tokens, so the gap between events (`p99_itl_s`) is that of several decoding steps: it is reported,
beside the CPU seconds of each process. Nothing is fetched: the tokenizer is the model's own.

A rehearsal without a GPU: `--engine simulated --tokenizer DIRECTORY --servers bare pool --streams 1 8`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import configs
from benchmarks.application import Application
from benchmarks.configs import Config, Shape
from benchmarks.cpu import OTHER, CpuByRole
from benchmarks.gpu import layouts
from benchmarks.processes import exit_when_terminated
from benchmarks.report import Report, median, ratio
from benchmarks.vllm_serve import VllmServe
from serve_app.config import MergeEvents

AnyServer = Application | VllmServe
VLLM, VLLM_MERGED, POOL = "vllm", "vllm_merged", "pool"
SERVERS = (VLLM, VLLM_MERGED, POOL, "unmerged", "actors", "bare")
# What Serve does without us.
SERVE_DEFAULTS = {"RAY_SERVE_PROXY_USE_GRPC": "0"}
# Of vLLM's result, in milliseconds there.
TIMES = ("mean_ttft", "p99_ttft", "mean_tpot", "p99_tpot", "mean_itl", "p99_itl")
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Load:
    """What each server gets.

    Attributes:
        streams: numbers of requests at once, one measurement each. requests: per stream, at least `at_least` in all.
        tokens_in, tokens_out: of each request, exactly. tokenizer: a directory.
    """

    streams: tuple[int, ...]
    requests: int
    tokens_in: int
    tokens_out: int
    tokenizer: str
    at_least: int = 4

    def arguments(self, server: AnyServer, model: str, streams: int, seed: int, tokens_out: int) -> list[str]:
        """Of `vllm bench serve`; the same in 0.26 and 0.32."""
        values = {
            "backend": "openai",
            "base-url": server.url,
            "endpoint": "/v1/completions",
            "model": model,
            "tokenizer": self.tokenizer,
            "dataset-name": "random",
            "random-input-len": self.tokens_in,
            "random-output-len": tokens_out,
            "num-prompts": max(self.at_least, streams * self.requests),
            "max-concurrency": streams,
            "temperature": 0,
            "seed": seed,
            "percentile-metrics": "ttft,tpot,itl",
            "metric-percentiles": "50,99",
        }
        flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        return [*flags, "--ignore-eos", "--disable-tqdm"]


@dataclass
class Benchmark:
    """See the module."""

    shape: Shape
    load: Load
    servers: Sequence[str]
    rounds: int
    report: Report = field(default_factory=lambda: Report("gpu_overhead", module="gpu.overhead"))

    def run(self) -> None:
        made = {name: _maker(name, self.shape) for name in self.servers}
        self.report.configs = {name: config for name, (config, _) in made.items()}
        for index in range(self.rounds):
            shift = index % len(self.servers)
            for name in [*self.servers[shift:], *self.servers[:shift]]:
                with made[name][1]() as server:
                    self._measure(index, name, server)

    def _measure(self, index: int, name: str, server: AnyServer) -> None:
        most = max(self.load.streams)
        # Batches of every size that follows, so that no measurement pays for a first time.
        self._bench(server, most, seed=index, tokens_out=WARM_UP_TOKENS)
        assert server.server is not None
        engines = server.engine_pids() if isinstance(server, Application) else []
        cpu = CpuByRole(server.server.pid, plain=isinstance(server, VllmServe), engines=engines)
        for streams in self.load.streams:
            before = cpu.read()
            # Other prompts each time, the same for every server: nothing comes out of a prefix cache.
            found = self._bench(server, streams, 1000 * (index + 1) + streams, self.load.tokens_out)
            self._add(index, name, streams, found, cpu.since(before))

    def _bench(self, server: AnyServer, streams: int, seed: int, tokens_out: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            saved = ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
            _vllm_bench(self.load.arguments(server, self.shape.model, streams, seed, tokens_out) + saved)
            result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
            return result

    def _add(self, index: int, name: str, streams: int, found: dict[str, Any], cpu_s: dict[str, float]) -> None:
        tokens, wanted = found["total_output_tokens"], found["num_prompts"]
        run = {
            "round": index,
            "server": name,
            "streams": streams,
            "failed": wanted - found["completed"],
            "duration_s": found["duration"],
            "output_tokens": tokens,
            "throughput": found["output_throughput"],
            **{f"{key}_s": found[f"{key}_ms"] / 1000 for key in TIMES},
            "cpu_s": cpu_s,
            "cpu_us_per_token": {role: round(used / max(tokens, 1) * 1e6, 1) for role, used in cpu_s.items()},
        }
        self.report.runs.append(run)
        shown = {key: f"{value:.4g}" for key, value in run.items() if isinstance(value, float)}
        print(
            f"round {index} {name} at {streams}: {shown} {run['cpu_us_per_token']} failed {run['failed']}", flush=True
        )

    def claim(self) -> None:
        """Ratios are taken within a round; the median over rounds is the result."""
        baseline, most = self.servers[0], max(self.load.streams)
        for name in self.servers[1:]:
            prefix, ours = ("", True) if name == POOL else (f"{name}_", False)
            for streams in self.load.streams:
                self._claim_ratio(f"{prefix}throughput_ratio_{streams}", "throughput", name, streams)
                self._claim_ratio(f"{prefix}p99_tpot_ratio_{streams}", "p99_tpot_s", name, streams)
            if ours:
                self._claim_ratio("throughput_ratio", "throughput", name, most, target=0.97, bound=">=")
                self._claim_ratio("p99_tpot_ratio", "p99_tpot_s", name, most, target=1.1)
        failed = sum(run["failed"] for run in self.report.runs)
        self.report.claim("failed_requests", float(failed), "", target=0, note=f"compared with {baseline}")
        for name in self.servers:
            for streams in self.load.streams:
                found = list(self._values("throughput", name, streams).values())
                self.report.claim(f"{name}_throughput_{streams}", median(found), "tokens/s", note=_spread(found))
            self._claim_cpu(name, most)

    def _claim_ratio(self, claim: str, key: str, name: str, streams: int, **aim: Any) -> None:
        ours, theirs = self._values(key, name, streams), self._values(key, self.servers[0], streams)
        ratios = [found for index in ours if (found := ratio(ours[index], theirs.get(index))) is not None]
        self.report.claim(claim, median(ratios), "x", note=_spread(ratios), **aim)

    def _claim_cpu(self, name: str, streams: int) -> None:
        """What each process on the way spent for a token."""
        runs = [run for run in self.report.runs if (run["server"], run["streams"]) == (name, streams)]
        for role in sorted({role for run in runs for role in run["cpu_us_per_token"]} - {OTHER}):
            used = [run["cpu_us_per_token"].get(role, 0.0) for run in runs]
            self.report.claim(f"{name}_{role}_cpu_{streams}", median(used), "us/token", note=_spread(used))

    def _values(self, key: str, name: str, streams: int) -> dict[int, float]:
        """By round."""
        runs = [run for run in self.report.runs if (run["server"], run["streams"]) == (name, streams)]
        return {run["round"]: run[key] for run in runs}


def _maker(name: str, shape: Shape) -> tuple[Any, Callable[[], AbstractContextManager[AnyServer]]]:
    """What to keep in the report about a server, and how to start it."""
    if name in (VLLM, VLLM_MERGED):
        merged = {"stream_interval": MergeEvents().tokens} if name == VLLM_MERGED else {}
        plain = replace(shape, engine_kwargs=shape.engine_kwargs | merged)
        return VllmServe(plain).arguments, lambda: VllmServe(plain)
    config = _application(name, shape)
    return config, lambda: Application(config)


def _application(name: str, shape: Shape) -> Config:
    if name != POOL:
        shape = replace(shape, more=shape.more | {"merge_events": {"tokens": 1}})
    if name == "bare":
        return configs.plain(shape, forkserver=True, autoscaling=None)
    # The tier of standbys, of which there are none: `ready` saves the first sleep.
    config = configs.pool(shape, active=1, standby=0, tier="ready")
    if name == "actors":
        config["controller_options"]["runtime_env"]["env_vars"] |= SERVE_DEFAULTS
    return config


def _vllm_bench(arguments: list[str]) -> None:
    """`vllm bench serve` without its start: importing vLLM once takes longer than a measurement."""
    serve = importlib.import_module("vllm.benchmarks.serve")
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(arguments))


def _spread(values: list[float]) -> str:
    return f"rounds: {min(values):.4g} to {max(values):.4g}" if values else "no round was complete"


def _shape(args: argparse.Namespace) -> Shape:
    most, more = max(args.streams), json.loads(args.engine_kwargs)
    if args.engine == "simulated":
        shape = configs.simulated_shape(most, start_s=0.5)
        return replace(shape, engine_kwargs=shape.engine_kwargs | more)
    # Room for twice the streams: what is measured is the path, not how the pool holds requests.
    shape = layouts.shape(Path(args.model), args.layout, hard=2 * most, max_num_seqs=most)
    return replace(shape, engine_kwargs=shape.engine_kwargs | more)


def _arguments(line: list[str] | None = None) -> argparse.Namespace:
    """What is missing is said before minutes have gone into starting servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a directory; needed with --engine vllm")
    parser.add_argument(
        "--tokenizer", default="", help="a directory; default: the model's; needed with --engine simulated"
    )
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--engine-kwargs", default="{}", help="more of them, or others, as JSON")
    parser.add_argument("--layout", choices=list(layouts.LAYOUTS), default="tp1", help="tensor and pipeline parallel")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=[VLLM, POOL], help="the first is the baseline")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--requests", type=int, default=3, help="per stream")
    parser.add_argument("--tokens-in", type=int, default=256)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu_overhead.json")
    args = parser.parse_args(line)
    if args.engine == "vllm" and not args.model:
        parser.error("--engine vllm needs --model DIRECTORY")
    args.tokenizer = args.tokenizer or args.model
    if not args.tokenizer:
        parser.error("--engine simulated needs --tokenizer DIRECTORY: vLLM's client makes its prompts with it")
    return args


def main() -> None:
    """Run the benchmark as the command line says."""
    args = _arguments()
    exit_when_terminated()
    load = Load(tuple(args.streams), args.requests, args.tokens_in, args.tokens_out, args.tokenizer)
    benchmark = Benchmark(_shape(args), load, args.servers, args.rounds)
    try:
        benchmark.run()
    finally:  # what was measured before a time limit is worth keeping
        benchmark.claim()
        benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
