"""Promotion on GPUs: from a burst that finds everything asleep to its first token, per layout and tier.

    python -m benchmarks.gpu.promotion --model DIR [--layouts tp1 tp2 pp2] [--tiers host ready disk] [--repeat 5]
        [--rest 10]

The pool has one slot, which is a standby (`min_active: 0`), so that one set of GPUs is enough and nothing else runs on
it. A burst of `--extra` requests over HTTP finds nothing active; the time to its earliest first token, by the client's
clock, is `first_token_s`. After each burst the slot falls asleep again by itself, with its golden check at the next
promotion: many repetitions are as many sleep/wake cycles, and what the slot holds of GPU and host is read in each.

`--rest` is how long the slot has been standby before each burst, several values in turn; the claims are about the
longest, with the wake alone of the others: for a second or so the driver clears what was given back.

`wake_over_pcie_limit` is the wake alone over the time that its bytes would take at the bandwidth that one GPU gets
from pinned memory in this run (for several GPUs each has a link of its own).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import configs
from benchmarks.application import Application
from benchmarks.burst import Burst, burst
from benchmarks.client import Client, Stream, prompt
from benchmarks.configs import Shape
from benchmarks.gpu import layouts
from benchmarks.processes import exit_when_terminated
from benchmarks.promotion import ends_after, promotion_stages, short
from benchmarks.report import Report, median, ratio
from serve_app.telemetry.stages import Stage

Run = dict[str, Any]
AFTER = 10
TARGETS = {"tp1": 1.0, "tp2": 1.0}


@dataclass
class Benchmark:
    """What is measured, and where it is written."""

    model: Path
    tiers: list[str]
    repeat: int
    cycles: int
    extra: int
    rests: list[float]
    prefix: str
    engine_kwargs: dict[str, Any]
    report: Report = field(default_factory=lambda: Report("gpu_promotion", module="gpu.promotion"))
    pinned: float = 0.0

    def run(self, names: list[str]) -> None:
        """One application after the other."""
        self.pinned = layouts.pinned_bytes_per_s()
        for name in names:
            shape = layouts.shape(self.model, name, hard=64, **self.engine_kwargs)
            config = configs.pool(shape, active=0, standby=1)
            self.report.configs[name] = config
            with Application(config) as application:
                self._cold_start(application, name)
                for tier in self.tiers:
                    self._promotions(application, shape, name, tier)

    def _cold_start(self, application: Application, name: str) -> None:
        application.settled(0, 1, "host")
        entry = application.ledger(Stage.COLD_START)[-1]
        stages = [{key: stage[key] for key in ("stage", "rank", "duration_s")} for stage in entry["stages"]]
        loaded = {s["rank"]: s["attributes"]["bytes"] for s in entry["stages"] if s["stage"] == Stage.WEIGHTS_LOAD}
        run = {"phase": "cold_start", "layout": name, "valid": not entry["error"], "duration_s": entry["duration_s"]}
        self._keep(run | {"weight_bytes": list(loaded.values()), "stages": stages})

    def _promotions(self, application: Application, shape: Shape, name: str, tier: str) -> None:
        application.redeploy(configs.pool(shape, active=0, standby=1, tier=tier))
        for repetition in range(self.cycles if tier == "host" else self.repeat):
            before = application.settled(0, 1, tier)["slots"][0]
            rest_s = self.rests[repetition % len(self.rests)]
            time.sleep(rest_s)
            seen, steady_s = asyncio.run(_burst_and_after(application.url, shape, self.extra))
            application.settled(0, 1, tier)
            ledger = [entry for entry in application.ledger(Stage.PROMOTION) if ends_after(entry, seen.sent_s)]
            run: Run = {"phase": "promoted", "layout": name, "tier": tier, "repetition": repetition, "rest_s": rest_s}
            held = {"asleep_gpu_bytes": before["device_bytes"], "asleep_host_bytes": before["host_bytes"]}
            more = {"steady_first_token_s": steady_s, "copied_gb_per_s": _copied(ledger)}
            self._keep(run | held | promotion_stages(ledger, seen) | seen.as_dict() | more)

    def _keep(self, run: Run) -> None:
        self.report.runs.append(run)
        shown = {key: value for key, value in run.items() if key != "stages"}
        print(", ".join(f"{key} {short(value)}" for key, value in shown.items() if value != ""), flush=True)

    def claim(self) -> None:
        """Medians over the valid runs."""
        claim = self.report.claim
        claim("pinned_gb_per_s", self.pinned / 1e9, "GB/s", note="one GPU, measured in this run")
        for name in self.report.configs:
            for tier in self.tiers:
                self._claim_tier(name, tier)
            self._claim_wake(name)
            self._claim_growth(name)
        invalid = sum(1 for run in self.report.runs if not run["valid"])
        claim("invalid_runs", float(invalid), "", target=0, note="thrown out; see runs" if invalid else "")

    def _claim_tier(self, name: str, tier: str) -> None:
        runs = self._runs("promoted", layout=name, tier=tier, rest_s=max(self.rests))
        target = TARGETS.get(name) if tier == "host" else None
        suffix = "" if tier == "host" else f"_{tier}"
        first = median([run["first_token_s"][0] for run in runs])
        label = f"{self.prefix}_{name}{suffix}"
        self.report.claim(f"{label}_promoted_first_token_s", first, target=target, note=f"tier {tier}")
        for key in ("trigger_s", "wake_s", "verify_s", "publish_s", "steady_first_token_s"):
            self.report.claim(f"{label}_{key}", median([run[key] for run in runs if key in run]), note="ledger")
        for rest_s in sorted(set(self.rests))[:-1]:
            sooner = [run["wake_s"] for run in self._runs("promoted", layout=name, tier=tier, rest_s=rest_s)]
            self.report.claim(f"{label}_wake_after_{rest_s:g}_s_asleep_s", median(sooner), note="ledger")
        rates = [rate for run in runs for rate in run["copied_gb_per_s"]]
        self.report.claim(f"{label}_copied_gb_per_s", median(rates), "GB/s", note="of each rank, by the GPU's clock")
        held = [max(run["asleep_gpu_bytes"]) / 1e9 for run in runs if run["asleep_gpu_bytes"]]
        self.report.claim(f"{label}_asleep_gpu_gb", median(held), "GB", note="of each GPU, by NVML")
        host = median([run["asleep_host_bytes"] / 1e9 for run in runs])
        self.report.claim(f"{label}_asleep_host_gb", host, "GB", note="all processes of the engine, PSS")

    def _claim_wake(self, name: str) -> None:
        cold = self._runs("cold_start", layout=name)  # none, if the time was up before
        limit = max((size for run in cold for size in run["weight_bytes"]), default=0) / self.pinned
        runs = self._runs("promoted", layout=name, tier="host", rest_s=max(self.rests))
        wake = median([run["wake_s"] for run in runs if "wake_s" in run])
        target = 1.5 if name == "tp1" else None
        self.report.claim(f"{self.prefix}_{name}_wake_over_pcie_limit", ratio(wake, limit), "x", target=target)

    def _claim_growth(self, name: str) -> None:
        """From the second to the last cycle of tier host; the first ones fill caches."""
        runs = self._runs("promoted", layout=name, tier="host")[1:]
        if len(runs) < 2:
            return
        for kind, held in (
            ("gpu", [max(run["asleep_gpu_bytes"], default=0) for run in runs]),
            ("host", [run["asleep_host_bytes"] for run in runs]),
        ):
            growth = (held[-1] - held[0]) / 1e6
            self.report.claim(f"{self.prefix}_{name}_{kind}_growth_mb", growth, "MB", note=f"over {len(runs)} cycles")

    def _runs(self, phase: str, **where: str | float) -> list[Run]:
        wanted = where | {"phase": phase, "valid": True}
        return [run for run in self.report.runs if all(run.get(key) == value for key, value in wanted.items())]


def _copied(ledger: list[dict[str, Any]]) -> list[float]:
    """How fast each rank's weights came in the first of these promotions; none at tier `ready`."""
    stages = [stage for entry in ledger[:1] for stage in entry["stages"] if stage["stage"] == Stage.WEIGHTS_COPY]
    return [stage["attributes"]["gb_per_s"] for stage in stages]


async def _burst_and_after(url: str, shape: Shape, extra: int) -> tuple[Burst, float]:
    """A burst, and the time to first token that a lone request gets afterwards: the tenth, in seconds."""
    seen = await burst(url, shape, extra, new_slot=True, fill=False)
    stream = Stream()
    async with Client(url, shape.model) as client:
        for number in range(AFTER):
            stream = await client.stream(prompt(number), 2)
    return seen, stream.first_s or math.nan


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model's files")
    parser.add_argument("--layouts", nargs="+", choices=sorted(layouts.LAYOUTS), default=["tp1"])
    parser.add_argument("--tiers", nargs="+", choices=("host", "ready", "disk"), default=["host", "ready", "disk"])
    parser.add_argument("--repeat", type=int, default=5, help="bursts per tier")
    parser.add_argument("--cycles", type=int, default=20, help="bursts, and so sleep/wake cycles, at tier host")
    parser.add_argument("--rest", type=float, nargs="+", default=[10.0], help="seconds asleep before a burst, in turn")
    parser.add_argument("--extra", type=int, default=4, help="requests of a burst")
    parser.add_argument("--engine-kwargs", default="{}", help="more of them, as JSON")
    parser.add_argument("--prefix", default="h200", help="begins the claims' names: the GPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu_promotion.json")
    args = parser.parse_args()
    exit_when_terminated()
    more = json.loads(args.engine_kwargs)
    benchmark = Benchmark(args.model, args.tiers, args.repeat, args.cycles, args.extra, args.rest, args.prefix, more)
    try:
        benchmark.run(args.layouts)
    finally:  # a time limit must not cost what was measured before
        benchmark.claim()
        benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
