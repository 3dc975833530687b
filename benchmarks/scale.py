"""How much CPU the decisions take for 100 slots and 20 models, and whether the design's rules hold through a day of it.

    python -m benchmarks.scale [--slots 100] [--models 20] [--hours 24]

`PoolBook`, `Dispatch` and `Roles` as they are, in one process and in virtual time, against simulated slots with stage
times measured on H200s. Requests are those of a made day: for every model bursts and quiet in turn, the models by Zipf,
or those of `--trace`, repeated; every one goes through one of `--routers` routers. A few times an hour a slot
dies, any one and the busiest by turns, and a few times a day the coordinator.

- `router_ms_per_request`: CPU time in `Dispatch` over the whole day, per request.
- `coordinator_core_share`: CPU time in `PoolBook` over virtual time, in windows spread over the day (the busiest minute
  is one of them) in which it is called as often as in production: four reports a second from every slot and router and
  one at every change, a step after each that says anything new, and ten ticks a second. Outside of them it is stepped
  only on changes. `coordinator_core_share_all_new`: the same as if every report said something new, the worst there is.

Throughout: no request meets a shut gate, another model's slot, or a full one; every one ends once, served or refused,
or lost with its slot; none is held while a slot of its model has room; routers count what they have placed.
What Ray takes to carry the messages is not in it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.report import ROOT, Report
from serve_app import traces
from serve_app.live import Hold, LiveModel, LiveSettings, SlotCounts
from serve_app.percentile import percentile
from serve_app.planning import arrivals, times
from serve_app.planning.fleet import Fleet, Setup
from serve_app.planning.loop import Loop
from serve_app.planning.pooled import Pooled
from serve_app.planning.requests import Outcome, Request
from serve_app.planning.slots import InvariantBroken
from serve_app.planning.traffic import Traffic
from serve_app.pool.book import PoolBook
from serve_app.pool.dispatch import Dispatch
from serve_app.pool.holdings import Budget, ModelCost
from serve_app.pool.lifecycle import State
from serve_app.traces import TraceRequest

MEASURED = [ROOT / "benchmarks" / "results" / f"gpu_{name}.json" for name in ("cold_start", "promotion", "overhead")]
# Few, so that many slots are active: a short request on an H200 is in flight for a second or two.
HARD = 4
# Engines that a slot holds: host memory of a machine with 8 H200s (2 TB) over the 20 GB of one 8B engine asleep.
ENGINES = 8
WINDOW_S = 2.0
CHECK_S = 30.0
SETTLE_S = 60.0
# The busiest piece of the day is looked for in pieces of this length.
BUSY_S = 60.0


class Cpu:
    """CPU seconds by who took them; those of one within another count once."""

    spent: defaultdict[str, float] = defaultdict(float)
    inside = False

    @classmethod
    @contextmanager
    def of(cls, who: str) -> Iterator[None]:
        if cls.inside:
            yield
            return
        cls.inside, begun = True, time.thread_time()
        try:
            yield
        finally:
            cls.spent[who] += time.thread_time() - begun
            cls.inside = False


def clocked(who: str, call: Any) -> Any:
    def timed(*args: Any, **more: Any) -> Any:
        with Cpu.of(who):
            return call(*args, **more)

    return timed


class ClockedBook(PoolBook):
    on_report = clocked("coordinator", PoolBook.on_report)
    on_need = clocked("coordinator", PoolBook.on_need)
    step = clocked("coordinator", PoolBook.step)
    target = clocked("coordinator", PoolBook.target)
    suspects = clocked("coordinator", PoolBook.suspects)


class ClockedDispatch(Dispatch):
    offer = clocked("router", Dispatch.offer)
    release = clocked("router", Dispatch.release)
    finished = clocked("router", Dispatch.finished)
    observed = clocked("router", Dispatch.observed)
    accepted = clocked("router", Dispatch.accepted)
    set_roles = clocked("router", Dispatch.set_roles)
    set_present = clocked("router", Dispatch.set_present)
    need = clocked("router", Dispatch.need)


@dataclass
class Window:
    """A piece of the day at production's rates."""

    at_s: float
    cpu_s: float = 0.0
    all_new: bool = False
    active: int = 0
    in_flight: int = 0
    held: int = 0


@dataclass
class Day:
    """One day: the pool, its faults, the windows, and the checks."""

    args: argparse.Namespace
    trace: Sequence[TraceRequest]
    windows: list[Window] = field(default_factory=list)
    deaths: int = 0
    restarts: int = 0
    checks: int = 0

    def __post_init__(self) -> None:
        names = {f"m{index:02d}": (f"m{index:02d}",) for index in range(self.args.models)}
        count = self.args.slots
        live = LiveSettings(
            slots=SlotCounts(min=count, max=count, standby=max(1, count // 10), demote_after_s=30),
            models={name: LiveModel(min_active=0) for name in names},
            hold=Hold(max_held_requests=4096),
        )
        measured = times.read(MEASURED)
        self.chance = Random(self.args.seed)
        self.loop = Loop()
        setup = Setup(names, live, measured, HARD, existing=count, routers=self.args.routers)
        self.fleet = Fleet(self.loop, setup)
        self.traffic = Traffic(self.loop, self.fleet, ClockedDispatch)
        costs = [ModelCost(name, host_bytes=1.0) for name in names]
        budget = Budget(host_bytes=float(min(ENGINES, len(names))))
        self.pool = Pooled(self.loop, self.fleet, self.traffic, book_type=ClockedBook, costs=costs, budget=budget)

    @property
    def span_s(self) -> float:
        return float(self.args.hours) * 3600

    def run(self) -> list[Request]:
        self.pool.begin(self.args.slots)
        self.loop.run(SETTLE_S)
        Cpu.spent.clear()
        self._plan()
        requests = [
            Request(number, SETTLE_S + one.at_s, one.model, one.prompt_tokens, one.output_tokens)
            for number, one in enumerate(self.trace)
        ]
        for request in requests:
            self.loop.run(request.arrived_s)
            self.traffic.arrive(request)
        self.loop.run(SETTLE_S + self.span_s + 600)
        return requests

    def _plan(self) -> None:
        """Set faults, windows and checks for the whole day."""
        for moment in self._moments(self.args.deaths_per_hour * self.args.hours):
            self.loop.at(moment, self._kill)
        for moment in self._moments(self.args.restarts):
            self.loop.at(moment, self._restart)
        for moment in [*self._moments(self.args.windows - 1), SETTLE_S + busiest_s(self.trace)]:
            self.loop.at(moment, self._window)
        for index in range(int(self.span_s / CHECK_S)):
            self.loop.at(SETTLE_S + (index + 0.5) * CHECK_S, self._check)

    def _moments(self, count: float) -> list[float]:
        return [SETTLE_S + self.span_s * (index + self.chance.random()) / int(count) for index in range(int(count))]

    def _kill(self) -> None:
        alive = [slot for slot in self.fleet.slots.values() if slot.alive]
        busiest = max(alive, key=lambda slot: (len(slot.busy), slot.name))
        self.pool.kill(busiest if self.deaths % 2 else self.chance.choice(alive))
        self.deaths += 1

    def _restart(self) -> None:
        self.pool.restart()
        self.restarts += 1

    def _window(self) -> None:
        active = [slot for slot in self.fleet.slots.values() if slot.state is State.ACTIVE]
        held = sum(len(router.held) for router in self.traffic.routers)
        all_new = len(self.windows) % 3 == 2
        window = Window(self.loop.now - SETTLE_S, Cpu.spent["coordinator"], all_new, len(active), held=held)
        window.in_flight = sum(len(slot.busy) for slot in active)
        self.pool.eager(WINDOW_S, all_new=all_new)
        self.loop.at(self.loop.now + WINDOW_S, self._window_ends, window)

    def _window_ends(self, window: Window) -> None:
        window.cpu_s = Cpu.spent["coordinator"] - window.cpu_s
        self.windows.append(window)

    def _check(self) -> None:
        """What must be true at any moment, beside what slots themselves insist on."""
        self.checks += 1
        placed: Counter[tuple[int, str]] = Counter()
        for slot in self.fleet.slots.values():
            self._must(not slot.busy or slot.state in (State.ACTIVE, State.DRAINING), f"{slot.name} works asleep")
            self._must(len(slot.busy) <= HARD, f"{slot.name} has {len(slot.busy)} requests")
            for request in slot.busy:
                self._must(request.model == slot.model, f"{slot.name} serves {slot.model}, not {request.model}")
                placed[request.number % len(self.traffic.routers), slot.name] += 1
        for index, router in enumerate(self.traffic.routers):
            counts = {name: placed[index, name] for name in router.listed if placed[index, name]}
            mine = {name: count for name, count in router.dispatch._mine.items() if count and name in router.listed}
            self._must(counts == mine, f"{router.name} counts {mine}, placed are {counts}")
            self._must(not router.dispatch.release(self.loop.now) or len(self.traffic.routers) > 1, "held beside room")
        book = self.pool.book
        if book is not None and not book.blind(self.loop.now):
            for name in book.role_map.active:
                routed = self.fleet.slots.get(name)
                fine = routed is None or not routed.alive or routed.state in (State.ACTIVE, State.DRAINING)
                self._must(fine, f"{name} is routed to while {routed.state if routed else 'gone'}")

    def _must(self, true: bool, otherwise: str) -> None:
        if not true:
            raise InvariantBroken(f"{self.loop.now:.3f} s: {otherwise}")


def busiest_s(trace: Sequence[TraceRequest]) -> float:
    counts = Counter(int(one.at_s / BUSY_S) for one in trace)
    return max(counts, key=lambda piece: (counts[piece], -piece)) * BUSY_S


def made(models: int, hours: float, rate: float, seed: int) -> list[TraceRequest]:
    """Every model by turns quiet and bursting (tenfold, for minutes), its share of all requests by Zipf; lengths vary.

    Args:
        rate: requests a second, all models together, mean.
    """
    chance, weights = Random(seed), [1 / (rank + 1) for rank in range(models)]
    found: list[TraceRequest] = []
    for rank, weight in enumerate(weights):
        base = rate * weight / sum(weights) / 1.9  # a tenth of the time at ten times the rate
        at_s, until_s, factor = 0.0, 0.0, 1.0
        while at_s < hours * 3600:
            if at_s >= until_s:
                burst = chance.random() < 0.5 and factor == 1.0
                factor = 10.0 if burst else 1.0
                until_s = at_s + chance.expovariate(1 / (120 if burst else 540))
            at_s += chance.expovariate(base * factor)
            prompt, output = int(chance.lognormvariate(6.5, 0.8)), int(chance.lognormvariate(5.8, 0.7))
            found.append(TraceRequest(at_s, max(1, prompt), max(1, output), f"m{rank:02d}"))
    return sorted((one for one in found if one.at_s < hours * 3600), key=lambda one: one.at_s)


def of_trace(path: Path, args: argparse.Namespace) -> list[TraceRequest]:
    """A real trace repeated, its rate scaled, each request for a model by Zipf."""
    trace = traces.read(path)
    speed = args.rate * arrivals.span_s(trace) / len(trace)
    trace = arrivals.tiled(traces.window(trace, 0.0, float("inf"), speed), args.hours * 3600, args.seed)
    names = [f"m{rank:02d}" for rank in range(args.models)]
    chosen = Random(args.seed).choices(names, [1 / (rank + 1) for rank in range(args.models)], k=len(trace))
    return [
        TraceRequest(one.at_s, one.prompt_tokens, one.output_tokens, name)
        for one, name in zip(trace, chosen, strict=True)
    ]


def claim(report: Report, day: Day, requests: Sequence[Request], wall_s: float) -> None:
    outcomes = Counter(request.outcome for request in requests)
    first_s = [request.first_s - request.arrived_s for request in requests if request.first_s is not None]
    shares = [window.cpu_s / WINDOW_S for window in day.windows if not window.all_new]
    all_new = [window.cpu_s / WINDOW_S for window in day.windows if window.all_new]
    ours, said = report.claim, f"{len(shares)} windows of {WINDOW_S:g} s; the worst {max(shares):.3f}"
    per_request = 1000 * Cpu.spent["router"] / len(requests)
    ours("router_ms_per_request", per_request, "ms", target=1.0, note="CPU time, all of Dispatch")
    ours("coordinator_core_share", sum(shares) / len(shares), "", target=0.10, note=said)
    ours("coordinator_core_share_worst", max(shares), "")
    if all_new:
        ours("coordinator_core_share_all_new", sum(all_new) / len(all_new), "", note="as if every report were news")
    ours("invariants_broken", 0.0, "", target=0, note=f"{day.checks} checks, and at every request; ends at the first")
    open_, lost = outcomes[Outcome.OPEN], outcomes[Outcome.LOST]
    ours("requests_without_end", float(open_), "", target=0)
    ours("requests", float(len(requests)), "", note=f"{outcomes[Outcome.SERVED]} served")
    ours("requests_lost", float(lost), "", note=f"they were inside the {day.deaths} slots that died")
    ours("requests_refused", float(outcomes[Outcome.REFUSED]), "")
    ours("p99_ttft_s", percentile(first_s, 99), "s", note="simulated")
    ours("promotions", float(day.pool.promotions), "")
    ours("coordinator_restarts", float(day.restarts), "")
    ours("wall_s", wall_s, "s", note=f"for {day.args.hours:g} hours")
    report.runs += [vars(window) for window in sorted(day.windows, key=lambda window: window.at_s)]


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=100)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, mean")
    parser.add_argument("--windows", type=int, default=18, help="pieces at production's rates")
    parser.add_argument("--deaths-per-hour", type=float, default=3.0)
    parser.add_argument("--restarts", type=int, default=6, help="of the coordinator")
    parser.add_argument("--trace", type=Path, help="instead of a made one")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/scale.json")
    args = parser.parse_args()
    trace = of_trace(args.trace, args) if args.trace else made(args.models, args.hours, args.rate, args.seed)
    day, begun = Day(args, trace), time.monotonic()
    requests = day.run()
    report = Report("scale")
    claim(report, day, requests, time.monotonic() - begun)
    report.write(args.output)


if __name__ == "__main__":
    main()
