"""Where a cold start's seconds go on a GPU, and what each of our measures against them brings.

    python -m benchmarks.gpu.cold_start --model DIR [--variants node_cache uncompiled ...] [--repeat 2]

A standby is killed, as an out-of-memory killer would; its replacement's own ledger entry is the measurement, from
"Serve wants one more" to "it can serve". The first sleep, which at tier `host` pins memory, is a figure of its own: the
slot could serve before it. Every variant keeps the compiled code and the KV cache's size of its own first start, which
is kept in `runs` too (phase `first_start`): with empty caches it is the worst case.

Variants, each with all the measures of those after it, but for the first:
- uncompiled: as node_cache, without torch.compile, and with CUDA graphs of the whole model;
- node_cache: the weights are in the node's shared memory (`slot.node_cache`), and the standby sleeps at tier `disk`,
  which then wakes as fast as `host` and pins nothing;
- spare: the slot's own process has imported vLLM before it is wanted;
- forkserver: processes forked from one that has imported vLLM; graphs: few CUDA graph sizes;
- stock: vLLM starts its processes by itself and captures CUDA graphs for all of its default sizes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import configs
from benchmarks.application import Application, stage_s
from benchmarks.configs import Shape
from benchmarks.gpu import layouts
from benchmarks.processes import exit_when_terminated
from benchmarks.promotion import short
from benchmarks.report import Report, median
from serve_app.telemetry.stages import Stage

Run = dict[str, Any]
OFF = {"forkserver": False, "spare_worker": False}
NODE_CACHE = {"node_cache": {"enabled": True}}
ALL, UNCOMPILED, STOCK = "node_cache", "uncompiled", "stock"
# The one that matters most first: device time may run out.
VARIANTS: dict[str, dict[str, Any]] = {
    ALL: NODE_CACHE,
    UNCOMPILED: NODE_CACHE,
    "spare": {},
    "forkserver": {"spare_worker": False},
    "graphs": OFF,
    STOCK: OFF,
}
ENGINE_KWARGS: dict[str, dict[str, Any]] = {
    UNCOMPILED: {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    # vLLM's own bound: naming it keeps vLLM's own list of sizes.
    STOCK: {"max_cudagraph_capture_size": 512},
}


@dataclass
class Benchmark:
    """What is measured, and where it is written."""

    model: Path
    layout: str
    repeat: int
    prefix: str
    engine_kwargs: dict[str, Any]
    report: Report = field(default_factory=lambda: Report("gpu_cold_start", module="gpu.cold_start"))

    def run(self, names: list[str]) -> None:
        """One application after the other; the first that is named meets the caches as they are."""
        for name in names:
            self.report.configs[name] = self._config(name)
            with Application(self._config(name)) as application:
                self._variant(application, name)

    def _config(self, name: str) -> configs.Config:
        kwargs = ENGINE_KWARGS.get(name, {}) | self.engine_kwargs
        shape: Shape = layouts.shape(self.model, self.layout, hard=256, **kwargs)
        return configs.pool(replace(shape, more=VARIANTS[name]), active=0, standby=1, tier=_tier(name))

    def _variant(self, application: Application, name: str) -> None:
        """The slot that the deployment has started, then replacements for killed ones."""
        tier = _tier(name)
        self._add(application, name, "first_start", application.settled(0, 1, tier)["slots"][0])
        for _ in range(self.repeat):
            status = application.settled(0, 1, tier)
            killed = status["slots"][0]
            if VARIANTS[name].get("spare_worker", True):
                application.wait_for_spare(killed)
            application.kill(killed)
            application.wait_until_gone(killed["slot"])
            self._add(application, name, "cold_start", application.settled(0, 1, tier)["slots"][0])

    def _add(self, application: Application, name: str, phase: str, slot: dict[str, Any]) -> None:
        [entry] = [entry for entry in application.ledger(Stage.COLD_START) if entry["slot"] == slot["slot"]]
        first_sleep_s = stage_s(entry, Stage.FIRST_SLEEP)
        run: Run = {
            "phase": phase,
            "variant": name,
            "slot": slot["slot"],
            "valid": not entry["error"],
            "can_serve_s": entry["duration_s"] - first_sleep_s,
            "first_sleep_s": first_sleep_s,
            "host_bytes": slot["host_bytes"],
            "stages": [{key: stage[key] for key in ("stage", "rank", "duration_s")} for stage in entry["stages"]],
        }
        self.report.runs.append(run)
        print(", ".join(f"{key} {short(value)}" for key, value in run.items() if key != "stages"), flush=True)

    def claim(self) -> None:
        """Medians over the valid runs."""
        claim = self.report.claim
        full = self._median(ALL, "can_serve_s")
        claim(f"{self.prefix}_{self.layout}_cold_start_s", full, target=15, note="all measures; until it can serve")
        for name in self.report.configs:
            claim(f"{name}_can_serve_s", self._median(name, "can_serve_s"))
            firsts = [run["can_serve_s"] for run in self._runs(name, "first_start")]
            claim(f"{name}_first_start_s", median(firsts), note="caches as they were when the variant came")
            claim(f"{name}_first_sleep_s", self._median(name, "first_sleep_s"), note=f"once, tier {_tier(name)}")
        for stage, seconds in self._stages(ALL).items():
            claim(f"stage:{stage}", seconds, note=f"ledger, {ALL}")

    def _runs(self, name: str, phase: str = "cold_start") -> list[Run]:
        return [r for r in self.report.runs if r["variant"] == name and r["phase"] == phase and r["valid"]]

    def _median(self, name: str, key: str) -> float | None:
        return median([run[key] for run in self._runs(name)])

    def _stages(self, name: str) -> dict[str, float]:
        """Median seconds of each stage, the slot's own and (after an @) those of rank 0 inside them."""
        runs = [
            {s["stage"] + ("@0" if s["rank"] == 0 else ""): s["duration_s"] for s in run["stages"] if s["rank"] <= 0}
            for run in self._runs(name)
        ]
        names = dict.fromkeys(name for run in runs for name in run)
        return {name: median([run[name] for run in runs if name in run]) or 0.0 for name in names}


def _tier(variant: str) -> str:
    return "disk" if "node_cache" in VARIANTS[variant] else "host"


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model's files")
    parser.add_argument("--layout", choices=sorted(layouts.LAYOUTS), default="tp1")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--repeat", type=int, default=2, help="kills per variant")
    parser.add_argument("--engine-kwargs", default="{}", help="more of them, as JSON")
    parser.add_argument("--prefix", default="h200", help="begins the claims' names: the GPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu_cold_start.json")
    args = parser.parse_args()
    exit_when_terminated()
    benchmark = Benchmark(args.model, args.layout, args.repeat, args.prefix, json.loads(args.engine_kwargs))
    try:
        benchmark.run(args.variants)
    finally:  # a time limit must not cost what was measured before
        benchmark.claim()
        benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
