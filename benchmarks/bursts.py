"""What bursts and a real trace meet: a warm pool, Serve's autoscaler, and the same slots all active.

    python -m benchmarks.bursts [--engine vllm|simulated] [--repeat 5] [--trace FILE]

Four cases of the same application, each of at most two slots, the same engine and the same requests, in one run:
- pool: one active slot and one standby (tier `host`).
- default: no pool, one replica, Serve's autoscaler with its own defaults; its replicas start as vLLM starts by itself.
- fastest: the same with its fastest settings.
- active: both slots active all the time, the same resources without any pool.

A step is half a slot's load (`--hard` / 2 streams), and 5 s later so many more at once that one slot has no room for
`--extra` of them: within active and standby. All are `--tokens` long, longer than a cold start takes, and run to their
end; so where no new capacity comes in time, a request waits until an earlier one has ended. What counts is the time to
the first token of those that came with the step, over all repetitions; `pool_failures` counts every request that was
not served in full. The pool promotes as late as can be, when its slot is full; it is given no notice.
Steps begin once the node's spare worker has imported vLLM, which takes one of two cores for seconds after a start; the
first one of a pool (phase `warm_up`) is not counted, since a pool that has just started answers it more slowly.
A step is thrown out (and kept in `runs`) if new capacity was asked for before it, or if the load before it had ended.

Then a piece of a trace, token counts scaled to the model's context, at `--trace-speed`; here the pool has its everyday
settings. `slot_s` are the seconds of all slots that existed, `awake_slot_s` without those asleep, whose GPUs could do
something else meanwhile. A page about each case is written with `--pages DIR`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import configs, traffic
from benchmarks.application import Application
from benchmarks.configs import Shape
from benchmarks.processes import exit_when_terminated
from benchmarks.promotion import COLD_REPEAT, short, wait_for_one_replica
from benchmarks.report import ROOT, Report, ratio
from benchmarks.traffic import Traffic
from serve_app import traces
from serve_app.cli import replay_plan, replay_report, replay_rows
from serve_app.cli.replay_view import Replay
from serve_app.percentile import percentile
from serve_app.telemetry.stages import Stage

POOL, DEFAULT, FASTEST, ACTIVE = "pool", "default", "fastest", "active"
CASES = (POOL, DEFAULT, FASTEST, ACTIVE)
COLD = (DEFAULT, FASTEST)
DEMOTE_AFTER_S = 10.0
# Serve scales down while streams still run; it must let them end.
GRACE_S = 600
Run = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        extra: requests of a step beyond one slot's capacity. tokens: output of each request of a step.
        plan: the piece of the trace. speed: how many times faster than it came.
    """

    extra: int
    tokens: int
    trace: Path
    plan: replay_plan.Plan
    speed: float


@dataclass
class Benchmark:
    """What is measured how often, and where it is written."""

    shape: Shape
    load: Load
    repeat: int
    cases: Sequence[str] = CASES
    pages: Path | None = None
    report: Report = field(default_factory=lambda: Report("bursts"))

    @property
    def cold_repeat(self) -> int:
        return min(self.repeat, COLD_REPEAT)

    def run(self) -> None:
        """All cases, one application at a time."""
        for case, measure in (
            (POOL, self._pool),
            (ACTIVE, self._active),
            (FASTEST, self._fastest),
            (DEFAULT, self._default),
        ):
            if case in self.cases:
                measure()

    def _pool(self) -> None:
        config = configs.pool(self.shape, active=1, standby=1)
        with self._started(POOL, config) as application:
            self._warm_up(application, POOL)
            for repetition in range(self.repeat):
                application.settled(1, 1, "host")
                self._step(application, POOL, repetition)
            application.settled(1, 1, "host")
            self.report.configs["pool_trace"] = everyday(config)
            application.redeploy(everyday(config))
            self._trace(application, POOL)

    def _active(self) -> None:
        with self._started(ACTIVE, configs.pool(self.shape, active=2, standby=0)) as application:
            self._warm_up(application, ACTIVE)
            for repetition in range(self.repeat):
                application.settled(2, 0)
                self._step(application, ACTIVE, repetition)
            application.settled(2, 0)
            self._trace(application, ACTIVE)

    def _fastest(self) -> None:
        config = configs.plain(self.shape, forkserver=False, autoscaling=configs.FASTEST_AUTOSCALING)
        with self._started(FASTEST, config) as application:
            for repetition in range(self.cold_repeat):
                wait_for_one_replica(application)
                self._step(application, FASTEST, repetition)
            wait_for_one_replica(application)
            self._trace(application, FASTEST)

    def _default(self) -> None:
        """By default Serve scales down after ten minutes, so each measurement gets an application of its own."""
        config = configs.plain(self.shape, forkserver=False, autoscaling=configs.DEFAULT_AUTOSCALING)
        for repetition in range(self.cold_repeat):
            with self._started(DEFAULT, config) as application:
                self._step(application, DEFAULT, repetition)
        with self._started(DEFAULT, config) as application:
            self._trace(application, DEFAULT)

    @contextmanager
    def _started(self, name: str, config: configs.Config) -> Iterator[Application]:
        self.report.configs[name] = config
        with Application(config) as application:
            yield application

    def _warm_up(self, application: Application, case: str) -> None:
        status = application.settled(1, 1, "host") if case == POOL else application.settled(2, 0)
        if self.shape.engine == "vllm":
            application.wait_for_spare(status["slots"][0])
        self._step(application, case, 0, "warm_up")

    def _step(self, application: Application, case: str, repetition: int, phase: str = "step") -> None:
        base = self.shape.hard // 2
        requests = traffic.step(self.shape.model, base, self.shape.hard - base + self.load.extra, self.load.tokens)
        seen = traffic.send(application, requests, pool=case in (POOL, ACTIVE))
        invalid = self._invalid(application, case, seen, base)
        run = {"phase": phase, "case": case, "repetition": repetition, "valid": not invalid, "invalid": invalid}
        self._keep(run | seen.as_dict(seen.rows[base:]))

    def _invalid(self, application: Application, case: str, seen: Traffic, base: int) -> str:
        """Why a step says nothing about new capacity; usually empty."""
        if any(row.total_s is not None and row.total_s < traffic.STEP_AFTER_S for row in seen.rows[:base]):
            return "a stream of the base load had ended before the step: ask for more --tokens"
        begins = [event.at_s + event.duration_s for event in seen.pool.events if event.kind == Stage.PROMOTION]
        if case == POOL and not begins:
            return "no standby was promoted"
        if case in COLD:
            begins = [started - seen.sent_s for started in application.replica_starts()[1:]]
        early = any(begin < traffic.STEP_AFTER_S for begin in begins)
        return "new capacity was asked for before the step" if early else ""

    def _trace(self, application: Application, case: str) -> None:
        seen = traffic.send(application, self.load.plan.requests, pool=case in (POOL, ACTIVE))
        run = {"phase": "trace", "case": case, "valid": True, "invalid": ""}
        promotions = sum(1 for event in seen.pool.events if event.kind == Stage.PROMOTION)
        self._keep(run | seen.as_dict(seen.rows) | {"promotions": promotions})
        if self.pages is not None:
            begun = datetime.fromtimestamp(seen.sent_s, UTC)
            told = Replay(self.load.trace.name, case, self.load.speed, self.load.plan, begun, seen.rows, seen.pool)
            (self.pages / f"{case}.html").write_text(replay_report.page(told))

    def _keep(self, run: Run) -> None:
        self.report.runs.append(run)
        shown = {key: value for key, value in run.items() if key != "first_token_s" and value not in ("", [])}
        print(", ".join(f"{key} {short(value)}" for key, value in shown.items()), flush=True)

    def claim(self) -> None:
        """Over all first tokens of the valid steps; of the trace as it was."""
        claim, p99_s = self.report.claim, {case: self._percentile(case, 99) for case in CASES}
        cold = min((found for case in COLD if (found := p99_s[case]) is not None), default=None)
        invalid = sum(1 for run in self.report.runs if not run["valid"])
        failures = sum(self._failures(phase, POOL) for phase in ("warm_up", "step", "trace"))
        note = "steps; the better of Serve's two settings / pool"
        claim("p99_ttft_cold_over_pool", ratio(cold, p99_s[POOL]), "x", target=20, bound=">=", note=note)
        claim(
            "pool_failures",
            float(failures),
            "",
            target=0,
            note="requests of all steps and the trace not served in full",
        )
        claim("p99_ttft_pool_over_active", ratio(p99_s[POOL], p99_s[ACTIVE]), "x", note="steps; equal resources")
        claim("invalid_runs", float(invalid), "", note="thrown out; see runs" if invalid else "")
        for case in CASES:
            for percent in replay_rows.PERCENTS:
                claim(f"step_{case}_p{percent}_ttft_s", self._percentile(case, percent))
            claim(f"step_{case}_failures", float(self._failures("step", case)), "")
        for case in CASES:
            for run in (run for run in self.report.runs if (run["phase"], run["case"]) == ("trace", case)):
                for percent in replay_rows.PERCENTS:
                    claim(f"trace_{case}_p{percent}_ttft_s", run[f"p{percent}_s"])
                claim(f"trace_{case}_failures", float(run["requests"] - run["served"]), "")
                claim(f"trace_{case}_slot_s", run["slot_s"], note=f"{run['awake_slot_s']:.0f} s of them awake")

    def _percentile(self, case: str, percent: float) -> float | None:
        steps = [run for run in self.report.runs if (run["phase"], run["case"]) == ("step", case) and run["valid"]]
        return percentile([first_s for run in steps for first_s in run["first_token_s"]], percent)

    def _failures(self, phase: str, case: str) -> int:
        """Also of runs that were thrown out: a failure is one whenever it happens."""
        runs = [run for run in self.report.runs if (run["phase"], run["case"]) == (phase, case)]
        return sum(run["requests"] - run["served"] for run in runs)


def everyday(config: configs.Config) -> configs.Config:
    """A pool's config with what a user would leave as it is: promote early, demote after ten quiet seconds."""
    config = deepcopy(config)
    [pool] = config["applications"][0]["deployments"]
    del pool["user_config"]["promote_when"]
    pool["user_config"]["slots"]["demote_after_s"] = DEMOTE_AFTER_S
    return config


def piece(trace: Sequence[traces.TraceRequest], shape: Shape, args: argparse.Namespace) -> replay_plan.Plan:
    """The piece of the trace that the command line asks for, for the one model that is served."""
    names = dict.fromkeys((request.model for request in trace), shape.model)
    contexts = {shape.model: args.max_model_len}
    return replay_plan.plan(
        trace, names, contexts, start_s=args.trace_start, seconds=args.trace_seconds, speed=args.trace_speed
    )


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--repeat", type=int, default=5, help=f"steps per case; Serve's at most {COLD_REPEAT}")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="leave out what need not be measured")
    parser.add_argument("--hard", type=int, default=8, help="requests at once in one slot")
    parser.add_argument("--extra", type=int, default=4, help="requests beyond that; at most --hard")
    parser.add_argument("--tokens", type=int, default=900, help="output of each request of a step")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--start-s", type=float, default=2.0, help="cold start of a simulated engine, seconds")
    parser.add_argument("--trace", type=Path, default=ROOT / "configs" / "sample-trace.csv")
    parser.add_argument("--trace-start", type=float, default=0.0, help="seconds into the trace")
    parser.add_argument("--trace-seconds", type=float, default=120.0, help="how long the piece lasts")
    parser.add_argument("--trace-speed", type=float, default=1.0)
    parser.add_argument("--pages", type=Path, help="a folder for a page about each case's trace piece")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/bursts.json")
    args = parser.parse_args()
    exit_when_terminated()
    if args.pages is not None:
        args.pages.mkdir(parents=True, exist_ok=True)
    if args.engine == "simulated":
        shape = configs.simulated_shape(args.hard, args.start_s)
    else:
        shape = configs.vllm_shape(args.hard, args.max_model_len, streams=args.hard // 2)
    shape = replace(shape, more={"shutdown_grace_s": GRACE_S})
    plan = piece(traces.read(args.trace), shape, args)
    load = Load(args.extra, args.tokens, args.trace, plan, args.trace_speed)
    benchmark = Benchmark(shape, load, args.repeat, args.cases, args.pages)
    benchmark.run()
    benchmark.claim()
    benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
