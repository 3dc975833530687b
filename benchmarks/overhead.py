"""What serving through the pool costs: against plain `vllm serve`, and against Ray Serve without the pool.

    python -m benchmarks.overhead [--rounds 5]

Three servers with the same engine, the same model and the same engine settings:
- `pool`: this application with one active slot;
- `bare`: the same slot behind plain Ray Serve, one hop (`pool: off`, Serve's own router and proxy settings);
- `vllm`: `vllm serve`, in the environment that a slot sets for its engine.

All three are started once and stay; in every round each gets the same load, one server at a time, in an order that
rotates. With one stream the requests alternate between the servers one by one, so that a drift of the machine meets all
of them. What the idle servers use meanwhile is in the result (`idle_cpu_share`: of one core); it slows all three alike,
but `vllm` would be without it. `--alone` starts and stops each server in every round instead, which takes minutes more.

`throughput_ratio` is pool / vllm in output tokens per second at 8 streams, `added_ttft_s` the median time to first
token of pool less that of bare at one stream. Both are taken within a round; the median over rounds is the result, and
the note tells how far the rounds lie apart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import configs
from benchmarks.application import Application
from benchmarks.client import Client, Stream, prompt
from benchmarks.configs import Shape
from benchmarks.processes import exit_when_terminated
from benchmarks.report import Report, median
from benchmarks.vllm_serve import VllmServe

POOL, BARE, VLLM = "pool", "bare", "vllm"
NAMES = (POOL, BARE, VLLM)
WARM_UP = 3
IDLE_S = 10.0
AnyServer = Application | VllmServe
Running = dict[str, AnyServer]

_numbers = itertools.count(int(time.time()) % 500_000)


@dataclass
class Benchmark:
    """What is sent, and where it is written.

    Attributes:
        singles: requests one after another, `single_tokens` each: for the times at one stream.
        streams: at once, each sending `requests` one after another, `tokens` each: for the throughput.
    """

    shape: Shape
    rounds: int
    singles: int
    streams: int
    requests: int
    tokens: int
    single_tokens: int = 16
    report: Report = field(default_factory=lambda: Report("overhead"))

    def run(self, *, alone: bool) -> None:
        makers = self._makers()
        with ExitStack() as stack:
            resident: Running = {}
            for name, make in makers.items() if not alone else ():
                resident[name] = stack.enter_context(make())
            if resident:
                self.report.runs.append({"idle_cpu_share": _idle_cpu_share(resident)})
            for index in range(self.rounds):
                order = [NAMES[(index + shift) % len(NAMES)] for shift in range(len(NAMES))]
                if resident:
                    asyncio.run(self._round(index, {name: resident[name] for name in order}))
                    continue
                for name in order:
                    with makers[name]() as server:
                        asyncio.run(self._round(index, {name: server}))

    def _makers(self) -> dict[str, Callable[[], AbstractContextManager[AnyServer]]]:
        pool = configs.pool(self.shape, active=1, standby=0)
        bare = configs.plain(self.shape, forkserver=True, autoscaling=None)
        self.report.configs = {POOL: pool, BARE: bare, VLLM: VllmServe(self.shape).arguments}
        return {
            POOL: lambda: Application(pool),
            BARE: lambda: Application(bare),
            VLLM: lambda: VllmServe(self.shape),
        }

    async def _round(self, index: int, servers: Running) -> None:
        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(Client(server.url, self.shape.model))
                for name, server in servers.items()
            }
            for client in clients.values():
                for _ in range(WARM_UP):
                    await client.stream(prompt(next(_numbers)), self.single_tokens)
            single: dict[str, list[Stream]] = {name: [] for name in clients}
            for _ in range(self.singles):
                text = prompt(next(_numbers))
                for name, client in clients.items():
                    single[name].append(await client.stream(text, self.single_tokens))
            for name, client in clients.items():
                begin = time.perf_counter()
                many = await self._many(client)
                self._add(index, name, single[name], many, time.perf_counter() - begin)

    async def _many(self, client: Client) -> list[Stream]:
        """The closed loop: `streams` requests are always under way until each stream has sent all of its own."""

        async def one() -> list[Stream]:
            return [await client.stream(prompt(next(_numbers)), self.tokens) for _ in range(self.requests)]

        return [stream for streams in await asyncio.gather(*(one() for _ in range(self.streams))) for stream in streams]

    def _add(self, index: int, name: str, single: list[Stream], many: list[Stream], wall_s: float) -> None:
        errors = [stream.error for stream in single + many if stream.error]
        run = {
            "round": index,
            "server": name,
            "errors": errors,
            "ttft_s": median([s.first_s for s in single if s.first_s is not None]),
            "token_s": median([s.token_s for s in single if s.token_s is not None]),
            f"ttft_{self.streams}_s": median([s.first_s for s in many if s.first_s is not None]),
            f"token_{self.streams}_s": median([s.token_s for s in many if s.token_s is not None]),
            "throughput": sum(stream.tokens for stream in many) / wall_s,
            "all_ttft_s": [stream.first_s for stream in single],
        }
        self.report.runs.append(run)
        shown = {key: f"{value:.4f}" for key, value in run.items() if isinstance(value, float)}
        print(f"round {index} {name}: {shown} {errors or ''}", flush=True)

    def claim(self) -> None:
        """Medians over rounds."""
        ratios = [above / below for above, below in self._pairs("throughput", POOL, VLLM)]
        added = [ours - theirs for ours, theirs in self._pairs("ttft_s", POOL, BARE)]
        claim = self.report.claim
        claim("throughput_ratio", median(ratios), "x", target=0.97, bound=">=", note=_spread(ratios))
        claim("added_ttft_s", median(added), target=0.002, note=_spread(added))
        to_bare = [above / below for above, below in self._pairs("throughput", POOL, BARE)]
        claim("throughput_ratio_to_bare", median(to_bare), "x", note=_spread(to_bare))
        failed = sum(len(run["errors"]) for run in self.report.runs if "errors" in run)
        claim("failed_requests", float(failed), "", target=0)
        for name in NAMES:
            units = {"throughput": "tokens/s"}
            for key in ("throughput", "ttft_s", "token_s", f"ttft_{self.streams}_s", f"token_{self.streams}_s"):
                values = list(self._values(key, name).values())
                claim(f"{name}_{key}", median(values), units.get(key, "s"), note=_spread(values))

    def _values(self, key: str, name: str) -> dict[int, float]:
        """By round."""
        runs = [run for run in self.report.runs if run.get("server") == name and run[key] is not None]
        return {run["round"]: run[key] for run in runs}

    def _pairs(self, key: str, one: str, other: str) -> list[tuple[float, float]]:
        first, second = self._values(key, one), self._values(key, other)
        return [(first[index], second[index]) for index in sorted(set(first) & set(second))]


def _idle_cpu_share(servers: Running) -> dict[str, float]:
    """CPU seconds a second that each server uses while nobody asks it for anything."""

    def used() -> dict[str, float]:
        return {name: server.server.cpu_s() for name, server in servers.items() if server.server is not None}

    before = used()
    time.sleep(IDLE_S)
    after = used()
    return {name: round((after[name] - before[name]) / IDLE_S, 3) for name in servers}


def _spread(values: list[float]) -> str:
    return f"rounds: {min(values):.4g} to {max(values):.4g}" if values else "no round was complete"


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--singles", type=int, default=20, help="requests at one stream, per server and round")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2, help="per stream, server and round")
    parser.add_argument("--tokens", type=int, default=128, help="per request at many streams")
    parser.add_argument("--alone", action="store_true", help="only one server exists at a time")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/overhead.json")
    args = parser.parse_args()
    exit_when_terminated()
    shape = configs.vllm_shape(args.streams, max_model_len=2048)
    benchmark = Benchmark(shape, args.rounds, args.singles, args.streams, args.requests, args.tokens)
    benchmark.run(alone=args.alone)
    benchmark.claim()
    benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
