"""What a simulated slot takes for its stages and its tokens, read from measured files.

Two kinds of files are understood: what `serve-app ledger --json` prints, and results of this project's benchmarks
(`promotion`, `cold_start`, `overhead`, with or without GPUs). Each file gives what it has; later files go first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from serve_app.config import Tier
from serve_app.errors import ConfigError
from serve_app.telemetry.stages import Stage

# What the benchmark of overhead asks by default: tokens of a prompt.
OVERHEAD_PROMPT = 256
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Times:
    """All durations in seconds; None or empty where no file said it.

    Attributes:
        promotion_s: by tier, from the decision until every router knows.
        sleep_s: a demotion from the shut gate to standby.
        cold_start_s: of one of our slots, until it is standby.
        stock_start_s: of a slot without pool, until it can serve; what the cold baseline pays.
        trigger_s: from a request that finds no capacity to the decision. publish_s: from there to the routers.
        token_s: streams at once -> seconds from one token of a stream to its next.
        prefill_token_s, prefill_request_s: of the prompt of one request: per token, and besides.
        first_token_s: what a first token takes beyond its prefill and one decoding step.
    """

    promotion_s: Mapping[Tier, float] = field(default_factory=dict[Tier, float])
    sleep_s: float | None = None
    cold_start_s: float | None = None
    stock_start_s: float | None = None
    trigger_s: float = 0.0
    publish_s: float = 0.0
    token_s: Mapping[int, float] = field(default_factory=dict[int, float])
    prefill_token_s: float | None = None
    prefill_request_s: float = 0.0
    first_token_s: float = 0.0

    def missing(self, tiers: Iterable[Tier]) -> list[str]:
        """What a simulation needs and no file said."""
        lacking = [f"a promotion from tier {tier}" for tier in tiers if tier not in self.promotion_s]
        needed = {
            "a demotion's engine.sleep": self.sleep_s,
            "a cold start": self.cold_start_s,
            "the pace of tokens": self.token_s or None,
            "the pace of prompts": self.prefill_token_s,
        }
        return lacking + [what for what, value in needed.items() if value is None]


def read(paths: Sequence[Path], layout: str = "tp1") -> Times:
    """Times from several files. Raises ConfigError for one that cannot be read or says nothing.

    Args:
        layout: of the runs that name one (results of the GPU benchmarks), those to take.
    """
    found: dict[str, Any] = {}
    for path in paths:
        said = _said(path, layout)
        if not said:
            raise ConfigError(
                f"--ledger {path}: says nothing of promotions, cold starts or tokens; it takes what `serve-app ledger "
                "--json` prints, and results of benchmarks.promotion, benchmarks.overhead and benchmarks.gpu"
            )
        said["promotion_s"] = found.get("promotion_s", {}) | said.get("promotion_s", {})
        found |= said
    return Times(**found)


def _said(path: Path, layout: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ledger {path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        return {}
    if "transitions" in content:
        return _of_ledger(content["transitions"])
    runs = [run for run in content.get("runs", ()) if run.get("layout", layout) == layout and run.get("valid", True)]
    return _of_promotions(runs) | _of_cold_starts(runs) | _of_overhead(runs, content.get("command", ""))


def _of_ledger(transitions: Sequence[Json]) -> dict[str, Any]:
    """A promotion's tier is the one at which that slot fell asleep last."""
    promotions: dict[Tier, list[float]] = {}
    slept: dict[str, Tier] = {}
    good = sorted((one for one in transitions if not one["error"]), key=lambda one: float(one["start_s"]))
    for one in good:
        if one["kind"] == Stage.PROMOTION and one["slot"] in slept:
            promotions.setdefault(slept[one["slot"]], []).append(one["duration_s"])
        for record in one["records"]:
            if tier := record.get("attributes", {}).get("tier"):
                slept[one["slot"]] = Tier(tier)
    sleeps = [one["duration_s"] for one in _stages(good, Stage.SLEEP, Stage.DEMOTION)]
    cold = [one["duration_s"] for one in good if one["kind"] == Stage.COLD_START]
    publish = [one["duration_s"] for one in _stages(good, Stage.PUBLISH, Stage.PROMOTION)]
    decide = [one["duration_s"] for one in _stages(good, Stage.DECIDE, Stage.PROMOTION)]
    return _known(
        promotion_s={tier: median(durations) for tier, durations in promotions.items()},
        sleep_s=_median(sleeps),
        cold_start_s=_median(cold),
        publish_s=_median(publish),
        trigger_s=_median(decide),
    )


def _of_promotions(runs: Sequence[Json]) -> dict[str, Any]:
    promoted = [run for run in runs if run.get("phase") == "promoted"]
    tiers = {Tier(run["tier"]) for run in promoted}
    return _known(
        promotion_s={tier: median(run["promotion_s"] for run in promoted if run["tier"] == tier) for tier in tiers},
        trigger_s=_median([run["trigger_s"] for run in promoted]),
        publish_s=_median([run["publish_s"] for run in promoted]),
    )


def _of_cold_starts(runs: Sequence[Json]) -> dict[str, Any]:
    """The first sleep of an engine pins host memory; the last one of a start is an everyday one."""
    runs = [run for run in runs if run.get("valid", True)]
    ours = [
        run
        for run in runs
        if run.get("phase") in ("cold_start", "cold_slot") and run.get("stages") and run.get("variant") != "stock"
    ]
    first = [run for run in runs if run.get("phase") == "first_start" and run.get("stages")]
    whole = [stage["duration_s"] for run in ours or first for stage in run["stages"] if stage["stage"] == "cold_start"]
    sleeps = [_last_sleep(run["stages"]) for run in ours or first]
    stock = [run["can_serve_s"] for run in runs if run.get("variant") == "stock" and run["phase"] == "cold_start"]
    stock += [
        min(run["first_token_s"]) - run["trigger_s"]
        for run in runs
        if run.get("phase") == "cold_stock" and run.get("first_token_s")
    ]
    return _known(
        cold_start_s=_median(whole),
        sleep_s=_median([one for one in sleeps if one is not None]),
        stock_start_s=_median(stock),
    )


def _of_overhead(runs: Sequence[Json], command: str) -> dict[str, Any]:
    """Only what went through the pool."""
    ours = [run for run in runs if run.get("server") == "pool"]
    if ours and "streams" in ours[0]:
        asked = re.search(r"--tokens-in (\d+)", command)
        return _of_streams(ours, int(asked[1]) if asked else OVERHEAD_PROMPT)
    if ours and "token_8_s" in ours[0]:
        one, eight = (median(run[key] for run in ours) for key in ("ttft_s", "ttft_8_s"))
        pace = {1: median(run["token_s"] for run in ours), 8: median(run["token_8_s"] for run in ours)}
        # Its prompts are short: what seven more of them delay the first token by is counted per request.
        each = max(0.0, (eight - one) / 7)
        return {
            "token_s": pace,
            "prefill_token_s": 0.0,
            "prefill_request_s": each,
            "first_token_s": max(0.0, one - each - pace[1]),
        }
    return {}


def _of_streams(runs: Sequence[Json], prompt: int) -> dict[str, Any]:
    """Prompts of a burst are taken one after the other: the last of n waits for all n."""
    pace = {n: median(run["mean_tpot_s"] for run in runs if run["streams"] == n) for n in {r["streams"] for r in runs}}
    last = {n: median(run["p99_ttft_s"] for run in runs if run["streams"] == n) for n in pace}
    few, many = sorted(pace)[:2] if len(pace) > 1 else (0, 0)
    if few != 1:
        return {"token_s": pace}
    each = max(0.0, (last[many] - last[few]) / (many - few) / prompt)
    one = median(run["mean_ttft_s"] for run in runs if run["streams"] == 1)
    return {"token_s": pace, "prefill_token_s": each, "first_token_s": max(0.0, one - each * prompt - pace[1])}


def _stages(transitions: Sequence[Json], stage: Stage, within: Stage) -> list[Json]:
    of_kind = [one for one in transitions if one["kind"] == within]
    return [record for one in of_kind for record in one["records"] if record["stage"] == stage]


def _last_sleep(stages: Sequence[Json]) -> float | None:
    return next((float(one["duration_s"]) for one in reversed(stages) if one["stage"] == Stage.SLEEP), None)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _known(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {})}
