"""How fast new capacity answers: a promoted standby against a cold replica, on the same machine in the same run.

    python -m benchmarks.promotion [--engine vllm|simulated] [--repeat 5]

The burst is the same everywhere. One active slot is filled to its hard capacity with streams that never end: `--hard`
requests, as many as its engine runs at once; the last of them goes out 10 ms before `--extra` more, all at once. Those
find no capacity, so their first tokens can only come from new capacity, and the time to the earliest of them, by the
client's clock and from the moment of sending, is `promoted_first_token_s` or `cold_first_token_s`. Meanwhile the first
slot goes on decoding, and so competes for the CPU with the slot that wakes up or starts; on GPUs it would not. The
early promotion is put off from 80 % of the capacity to all of it: this is the worst case for the pool, a burst without
notice. A burst is thrown out (and kept in `runs`) if a request fails, if one of the long streams ends and so makes
room, if a token comes before the new slot is active, if pool or autoscaler decided before the burst was sent, or if
the application says that the burst was served by the slot that was full.

What is compared:
- promoted: a pool of one active slot and one standby, for each tier. After each burst it returns to rest by itself.
- cold: `pool: off`, one replica, Serve's own autoscaler with its fastest settings spawns the second. `stock` starts
  vLLM's processes as vLLM does; `forkserver` is this package's faster start, without the pool.
- all_active: both slots active, the same number of requests in all. The same hardware without any pool: whoever has
  nothing better to do with a sleeping slot's resources gets this.
- cold_slot: a standby is killed, once the node's spare worker has imported vLLM; the ledger's own entry of its
  replacement, from "Serve wants one more" to standby.

`trigger_s` is from the client's sending to the coordinator's decision, on one wall clock: HTTP, proxy and router are in
it. `decide_s`, `wake_s`, `verify_s` and `publish_s` are the stages of the pool's ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import configs
from benchmarks.application import Application, stage_s
from benchmarks.burst import Burst, burst
from benchmarks.configs import Shape
from benchmarks.processes import exit_when_terminated
from benchmarks.report import Report, median, ratio
from serve_app.percentile import percentile
from serve_app.telemetry.stages import Stage

TIERS = ("host", "ready", "disk")
COLD_REPEAT = 3
Run = dict[str, Any]


@dataclass
class Benchmark:
    """What is measured how often, and where it is written."""

    shape: Shape
    repeat: int
    extra: int
    report: Report = field(default_factory=lambda: Report("promotion"))

    @property
    def cold_repeat(self) -> int:
        return min(self.repeat, COLD_REPEAT)

    def run(self) -> None:
        """All phases, one application at a time."""
        config = configs.pool(self.shape, active=1, standby=1)
        self.report.configs["pool"] = config
        with Application(config) as application:
            for tier in TIERS:
                self._promotions(application, tier)
            self._cold_slots(application)
            self._all_active(application)
        for name, forkserver in (("stock", False), ("forkserver", True)):
            config = configs.plain(self.shape, forkserver=forkserver, autoscaling=configs.FASTEST_AUTOSCALING)
            self.report.configs[f"cold_{name}"] = config
            with Application(config) as application:
                self._cold_replicas(application, name)

    def _promotions(self, application: Application, tier: str) -> None:
        application.redeploy(configs.pool(self.shape, active=1, standby=1, tier=tier))
        for repetition in range(self.repeat):
            application.settled(1, 1, tier)
            seen = self._burst(application, new_slot=True)
            application.settled(1, 1, tier)
            ledger = [entry for entry in application.ledger(Stage.PROMOTION) if ends_after(entry, seen.sent_s)]
            stages = promotion_stages(ledger, seen)
            seen = replace(seen, invalid=seen.invalid or contradiction(stages, seen))
            self._add("promoted", seen, repetition, tier=tier, **stages)

    def _cold_slots(self, application: Application) -> None:
        application.redeploy(configs.pool(self.shape, active=1, standby=1))
        for repetition in range(self.cold_repeat):
            status = application.settled(1, 1, "host")
            [standby] = [slot for slot in status["slots"] if slot["state"] == "standby"]
            if self.shape.engine == "vllm":
                application.wait_for_spare(standby)
            application.kill(standby)
            application.wait_until_gone(standby["slot"])
            status = application.settled(1, 1, "host")
            [replacement] = [slot["slot"] for slot in status["slots"] if slot["state"] == "standby"]
            [entry] = [entry for entry in application.ledger(Stage.COLD_START) if entry["slot"] == replacement]
            stages = [{key: stage[key] for key in ("stage", "rank", "duration_s")} for stage in entry["stages"]]
            run = {"phase": "cold_slot", "repetition": repetition, "valid": not entry["error"]}
            self._keep(run | {"cold_slot_s": entry["duration_s"], "stages": stages})

    def _all_active(self, application: Application) -> None:
        application.redeploy(configs.pool(self.shape, active=2, standby=0))
        for repetition in range(self.repeat):
            application.settled(2, 0)
            self._add("all_active", self._burst(application, new_slot=False), repetition)

    def _cold_replicas(self, application: Application, name: str) -> None:
        for repetition in range(self.cold_repeat):
            wait_for_one_replica(application)
            seen = self._burst(application, new_slot=True)
            trigger_s = application.replica_starts()[-1] - seen.sent_s
            seen = replace(seen, invalid=seen.invalid or _too_early(trigger_s, seen.first_s))
            self._add(f"cold_{name}", seen, repetition, trigger_s=trigger_s)

    def _burst(self, application: Application, *, new_slot: bool) -> Burst:
        return asyncio.run(burst(application.url, self.shape, self.extra, new_slot=new_slot))

    def _add(self, phase: str, seen: Burst, repetition: int, **more: Any) -> None:
        self._keep({"phase": phase, "repetition": repetition} | more | seen.as_dict())

    def _keep(self, run: Run) -> None:
        self.report.runs.append(run)
        shown = {key: value for key, value in run.items() if key != "stages"}  # too many for a line
        print(", ".join(f"{key} {short(value)}" for key, value in shown.items() if value != ""), flush=True)

    def claim(self) -> None:
        """Medians over the valid runs."""
        claim = self.report.claim
        promoted, stock = self._first("promoted", tier="host"), self._first("cold_stock")
        invalid = sum(1 for run in self.report.runs if not run["valid"])
        claim("promoted_first_token_s", promoted, target=0.5, note="tier host; the earliest of the burst")
        claim("cold_over_promoted", ratio(stock, promoted), "x", target=60, bound=">=", note="stock cold / promoted")
        claim("trigger_s", self._median("trigger_s", "promoted"), target=0.05, note="client's sending to decision")
        claim("cold_slot_s", self._median("cold_slot_s", "cold_slot"), target=16, note="our own cold start")
        claim("invalid_runs", float(invalid), "", note="thrown out; see runs" if invalid else "")
        for tier in TIERS:
            claim(f"promoted_{tier}_first_token_s", self._first("promoted", tier=tier))
            claim(f"promoted_{tier}_last_first_token_s", self._last("promoted", tier=tier), note="slowest of the burst")
            for stage in ("decide_s", "wake_s", "verify_s", "publish_s"):
                claim(f"{tier}_{stage}", self._median(stage, "promoted", tier=tier), note="ledger")
        claim("cold_stock_first_token_s", stock, note="Serve's fastest autoscaling")
        claim("cold_stock_trigger_s", self._median("trigger_s", "cold_stock"), note="until Serve starts a replica")
        claim("cold_forkserver_first_token_s", self._first("cold_forkserver"), note="the same with our faster start")
        both = [time for run in self._runs("all_active") for time in run["first_token_s"]]
        claim("all_active_first_token_p50_s", percentile(both, 50), note="equal resources, no pool")
        claim("all_active_first_token_max_s", max(both, default=None))
        for stage, seconds in self._cold_stages().items():
            claim(f"cold_slot:{stage}", seconds, note="ledger")

    def _runs(self, phase: str, **where: str) -> list[Run]:
        wanted = where | {"phase": phase, "valid": True}
        return [run for run in self.report.runs if all(run.get(key) == value for key, value in wanted.items())]

    def _median(self, key: str, phase: str, **where: str) -> float | None:
        return median([run[key] for run in self._runs(phase, **where) if run.get(key) is not None])

    def _first(self, phase: str, **where: str) -> float | None:
        return median([run["first_token_s"][0] for run in self._runs(phase, **where)])

    def _last(self, phase: str, **where: str) -> float | None:
        return median([run["first_token_s"][-1] for run in self._runs(phase, **where)])

    def _cold_stages(self) -> dict[str, float]:
        """Median seconds of each stage of our own cold start, the longest first; stages of workers lie inside."""
        runs = [
            {s["stage"]: s["duration_s"] for s in run["stages"] if s["rank"] < 0} for run in self._runs("cold_slot")
        ]
        names = {name for run in runs for name in run} - {str(Stage.COLD_START)}
        medians = {name: median([run[name] for run in runs if name in run]) or 0.0 for name in names}
        return dict(sorted(medians.items(), key=lambda item: -item[1]))


def promotion_stages(ledger: list[dict[str, Any]], seen: Burst) -> Run:
    """Seconds of the first promotion that answered this burst."""
    if not ledger:
        return {}
    entry = ledger[0]
    decided_s = max(s["start_s"] + s["duration_s"] for s in entry["stages"] if s["stage"] == Stage.DECIDE)
    active_s = max(s["start_s"] for s in entry["stages"] if s["stage"] == Stage.PUBLISH)
    return {
        "trigger_s": decided_s - seen.sent_s,
        "active_after_s": active_s - seen.sent_s,
        "decide_s": stage_s(entry, Stage.DECIDE),
        "wake_s": stage_s(entry, Stage.WAKE_WEIGHTS, Stage.WAKE_KV),
        "verify_s": stage_s(entry, Stage.VERIFY),
        "publish_s": stage_s(entry, Stage.PUBLISH),
        "promotion_s": entry["duration_s"],
        "reason": entry["reason"],
        "promotions": len(ledger),
    }


def contradiction(stages: Run, seen: Burst) -> str:
    """Why the ledger says that this burst cannot have been answered by the promotion that it caused; usually empty."""
    if not stages:
        return "the ledger has no promotion for it"
    if stages["trigger_s"] < 0:
        return f"promoted before the burst: {stages['reason']}"
    if seen.first_s and seen.first_s[0] < stages["active_after_s"]:
        return "a token came before the promoted slot was active"
    return ""


def _too_early(trigger_s: float, first_s: Sequence[float]) -> str:
    """Why a plain replica that Serve began to start `trigger_s` after the burst was not what answered it, if so."""
    if trigger_s < 0:
        return "Serve scaled before the burst"
    return "a token came before Serve had started a replica" if first_s and first_s[0] < trigger_s else ""


def ends_after(entry: dict[str, Any], wall_s: float) -> bool:
    return bool(entry["start_s"] + entry["duration_s"] > wall_s)


def wait_for_one_replica(application: Application, timeout_s: float = 120) -> None:
    """Wait until Serve has scaled down again and the proxy has forgotten the last burst."""
    deadline = time.monotonic() + timeout_s
    while len(application.replica_starts()) != 1:
        if time.monotonic() > deadline:
            raise TimeoutError("Serve has not scaled down to one replica")
        time.sleep(0.5)
    time.sleep(2)


def short(value: object) -> str:
    if isinstance(value, list):
        return "[" + " ".join(short(item) for item in value) + "]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--repeat", type=int, default=5, help=f"bursts per case; cold starts at most {COLD_REPEAT}")
    parser.add_argument("--hard", type=int, default=8, help="requests at once in one slot")
    parser.add_argument("--extra", type=int, default=4, help="requests beyond that; at most --hard")
    parser.add_argument("--max-model-len", type=int, default=8192, help="bounds how long the long streams last")
    parser.add_argument("--start-s", type=float, default=2.0, help="cold start of a simulated engine, seconds")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/promotion.json")
    args = parser.parse_args()
    exit_when_terminated()
    if args.engine == "simulated":
        shape = configs.simulated_shape(args.hard, args.start_s)
    else:
        shape = configs.vllm_shape(args.hard, args.max_model_len)
    benchmark = Benchmark(shape, args.repeat, args.extra)
    benchmark.run()
    benchmark.claim()
    benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
