"""`plan`: how many slots, how many of them standby, at which tier: a trace against simulated pools."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from serve_app import traces
from serve_app.cli import plan_view
from serve_app.cli.plan_view import Told
from serve_app.cli.text import console
from serve_app.config import Tier
from serve_app.errors import ConfigError
from serve_app.planning import arrivals, candidates, prometheus, times
from serve_app.planning.candidates import Question
from serve_app.planning.times import Times
from serve_app.traces import TraceRequest

# Of `slot.max_ongoing_requests`, as `promote_when.in_flight` without a value.
SOFT_SHARE = 0.8


def plan(
    trace: Annotated[Path | None, typer.Argument(help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens.")] = None,
    ledger: Annotated[list[Path] | None, typer.Option(help="Measured times; may be given several times.")] = None,
    slo_ttft_p99: Annotated[float, typer.Option(min=0.001, help="Seconds to the first token, for 99 %.")] = 2.0,
    gpu_price: Annotated[float, typer.Option(min=0, help="Of one GPU for an hour, in any currency.")] = 0.0,
    gpus: Annotated[float, typer.Option(min=0.001, help="GPUs of one slot.")] = 1.0,
    hard: Annotated[int, typer.Option(min=1, help="slot.max_ongoing_requests")] = 32,
    soft: Annotated[int, typer.Option(min=0, help="promote_when.in_flight; 0: 80 % of --hard.")] = 0,
    max_slots: Annotated[int, typer.Option(min=1, help="slots.max")] = 6,
    active: Annotated[str, typer.Option(help="min_active: values to try.")] = "1",
    standby: Annotated[str, typer.Option(help="slots.standby: values to try.")] = "1,2,3",
    tier: Annotated[str, typer.Option(help="Tiers to try.")] = "host",
    demote_after_s: Annotated[str, typer.Option(help="slots.demote_after_s: values to try.")] = "10,60",
    shrink_after_s: Annotated[float, typer.Option(min=1, help="slots.shrink_after_s")] = 300.0,
    refill_delay_s: Annotated[float, typer.Option(min=0, help="slots.refill_delay_s")] = 0.0,
    existing_slots: Annotated[int, typer.Option(min=0, help="Slots that nodes which stay hold; the others wait.")] = 0,
    node_lead_s: Annotated[float, typer.Option(min=0, help="How long a new node takes to be there.")] = 180.0,
    hours: Annotated[float, typer.Option(min=0, help="Repeat the trace for so long; 0: once.")] = 0.0,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times faster than in the trace.")] = 1.0,
    model: Annotated[str, typer.Option(help="Of a trace with several models, which one.")] = "",
    context: Annotated[int, typer.Option(min=0, help="The model's, in tokens; longer requests scale all.")] = 0,
    prometheus_url: Annotated[str, typer.Option("--prometheus", help="Arrivals from there, not a trace.")] = "",
    since: Annotated[str, typer.Option(help="With --prometheus: how far back, as 12h or 7d.")] = "7d",
    metric: Annotated[str, typer.Option(help="With --prometheus: a counter of requests.")] = prometheus.METRIC,
    tokens: Annotated[str, typer.Option(help="With --prometheus: of each request, IN,OUT.")] = "1024,128",
    layout: Annotated[str, typer.Option(help="Of benchmark results with several: which one.")] = "tp1",
    cold_start_s: Annotated[float, typer.Option(min=0, help="Instead of the ledger's.")] = 0.0,
    pace: Annotated[str, typer.Option(help="STREAMS:MS per token, ..., instead of the ledger's.")] = "",
    prefill: Annotated[float, typer.Option(min=0, help="Prompt tokens/s, instead of the ledger's.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is left to chance: repeated traces, Prometheus.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a page about it, one HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answers as JSON, for scripts.")] = False,
) -> None:
    """Simulate pools over a trace with measured stage times: which one meets an SLO, and what it costs.

    --ledger: what `serve-app ledger --json` printed, and results of benchmarks, which also say how fast tokens come.
    \f
    The model and its limits: docs/planning.md. The JSON: `plan_view.plain`.
    """
    if (trace is None) == (not prometheus_url):
        raise ConfigError("either a TRACE or --prometheus says what requests come: give one of them")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if trace is not None:
        requests, name = _trace(trace, model, speed, context), trace.name
        span_s = arrivals.span_s(requests)
    else:
        counts = prometheus.arrivals(prometheus_url, since, metric)
        into, outof = _numbers("--tokens", tokens, 2)
        requests = arrivals.spread(counts.counts, counts.step_s, int(into), int(outof), seed)
        name, span_s = f"{metric} of the last {since}", counts.step_s * len(counts.counts)
    if hours:
        requests, span_s = arrivals.tiled(requests, hours * 3600, seed), hours * 3600
    asked = Question(
        times=_times(ledger or [], layout, cold_start_s, pace, prefill, _tiers(tier)),
        hard=hard,
        soft=soft or max(1, int(hard * SOFT_SHARE)),
        most=max_slots,
        existing=existing_slots,
        node_lead_s=node_lead_s,
        active=_counts("--active", active),
        standby=_counts("--standby", standby),
        tiers=_tiers(tier),
        demote_after_s=_numbers("--demote-after-s", demote_after_s),
        shrink_after_s=shrink_after_s,
        refill_delay_s=refill_delay_s,
        gpus=gpus,
        gpu_price=gpu_price,
        slo_s=slo_ttft_p99,
    )
    told = _ask(Told(name, asked, span_s, requests), silent=as_json)
    if out is not None:
        from serve_app.cli import plan_page

        out.write_text(plan_page.page(told))
    if as_json:
        typer.echo(json.dumps(plan_view.plain(told), indent=2))
    else:
        console().print(plan_view.render(told, out))


def _ask(told: Told, *, silent: bool) -> Told:
    """Simulate all candidates, one after the other, with a progress bar on a terminal."""
    every = candidates.candidates(told.asked)
    shown = track(
        every,
        "simulating",
        console=console(),
        transient=True,
        disable=silent or not sys.stdout.isatty(),
    )
    found = [candidates.answer(told.asked, one, told.requests, told.span_s) for one in shown]
    return replace(told, answers=found)


def _trace(path: Path, model: str, speed: float, context: int) -> list[TraceRequest]:
    requests = traces.read(path)
    names = sorted({request.model for request in requests})
    if model and model not in names:
        raise ConfigError(f"--model {model}: trace {path} has {', '.join(names)}")
    if len(names) > 1 and not model:
        raise ConfigError(f"trace {path} has several models, a plan is for one: name it by --model {'|'.join(names)}")
    chosen = [request for request in requests if request.model == (model or names[0])]
    factor = traces.scale(chosen, context)
    return [traces.scaled(one, factor) for one in traces.window(chosen, 0.0, float("inf"), speed)]


def _times(ledger: list[Path], layout: str, cold_start_s: float, pace: str, prefill: float, tiers: list[Tier]) -> Times:
    """Measured times with what the command line says instead. Raises ConfigError that names what nobody said."""
    found = times.read(ledger, layout)
    if cold_start_s:
        found = replace(found, cold_start_s=cold_start_s)
    if pace:
        pairs = [part.split(":") for part in pace.split(",")]
        try:
            found = replace(found, token_s={int(streams): float(each) / 1000 for streams, each in pairs})
        except ValueError:
            raise ConfigError(f"--pace is {pace!r}; wanted: STREAMS:MILLISECONDS, ..., as in 1:4.9,32:5.6") from None
    if prefill:
        found = replace(found, prefill_token_s=1 / prefill)
    missing = found.missing(tiers)
    if missing:
        raise ConfigError(
            f"no --ledger says {', '.join(missing)}; give more of them, or --cold-start-s, --pace, --prefill"
        )
    return found


def _tiers(text: str) -> list[Tier]:
    try:
        return [Tier(name.strip()) for name in text.split(",")]
    except ValueError:
        raise ConfigError(f"--tier is {text!r}; allowed: {', '.join(Tier)}, separated by commas") from None


def _counts(option: str, text: str) -> list[int]:
    return [int(number) for number in _numbers(option, text)]


def _numbers(option: str, text: str, count: int | None = None) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0 or count not in (None, len(found)):
        wanted = f"{count} numbers" if count else "numbers"
        raise ConfigError(f"{option} is {text!r}; {wanted} separated by commas are wanted") from None
    return found
