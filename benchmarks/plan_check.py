"""What a plan would have predicted for a run of `benchmarks.bursts`, beside what was measured.

    python -m benchmarks.plan_check [--measured benchmarks/results/bursts.json] [--ledger FILE ...]

The steps of that run are simulated with the settings that it had, and with stage and token times from other benchmarks
of the same machine: `promotion.json` and `overhead.json`. Nothing of the measured run itself goes in but its settings.
`p99_prediction_error` is the difference of the 99th percentiles of the time to the first token over the measured one,
for the pool's steps; the same for all slots active and for Serve's autoscaler with its fastest settings is told too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import traffic
from benchmarks.bursts import ACTIVE, FASTEST, POOL
from benchmarks.report import RESULTS, Report
from serve_app.errors import ConfigError
from serve_app.live import LiveSettings
from serve_app.percentile import percentile
from serve_app.planning import simulate, times
from serve_app.planning.fleet import Setup
from serve_app.planning.simulate import Result
from serve_app.planning.times import Times

# `--tokens` of benchmarks.bursts.
TOKENS = 900
SPAN_S = 300.0
Run = Mapping[str, Any]


def measured(runs: Sequence[Run], case: str) -> list[float]:
    """Times to the first token of a case's valid steps, seconds."""
    steps = [run for run in runs if (run["phase"], run["case"], run["valid"]) == ("step", case, True)]
    return [first_s for run in steps for first_s in run["first_token_s"]]


def predicted(case: str, content: Mapping[str, Any], found: Times) -> list[float]:
    """The same of one simulated step: a median has no spread, so one is as good as many."""
    application = content["configs"][case]["applications"][0]
    hard = int(application["args"]["slot"]["max_ongoing_requests"])
    [model] = [model["id"] for model in application["args"]["models"]]
    run = next(run for run in content["runs"] if (run["phase"], run["case"]) == ("step", case))
    asked = re.search(r"--tokens (\d+)", content["command"])
    base = hard // 2
    trace = traffic.step(model, base, run["requests"] - base, int(asked[1]) if asked else TOKENS)
    pooled = case in (POOL, ACTIVE)
    deployment = next(one for one in application["deployments"] if one["name"] == ("Pool" if pooled else "Slot"))
    live = LiveSettings.model_validate(deployment["user_config"]) if pooled else LiveSettings()
    setup = Setup({model: (model,)}, live, found, hard, existing=live.slots.max)
    result = simulate.pooled(setup, trace, SPAN_S) if pooled else _autoscaled(setup, trace, deployment)
    return [first_s for at_s, first_s in result.firsts if at_s >= traffic.STEP_AFTER_S and first_s is not None]


def _autoscaled(setup: Setup, trace: Sequence[Any], deployment: Mapping[str, Any]) -> Result:
    settings = deployment["autoscaling_config"]
    least, most = int(settings["min_replicas"]), int(settings["max_replicas"])
    return simulate.autoscaled(setup, trace, SPAN_S, least, most, int(settings["target_ongoing_requests"]))


def main() -> None:
    """Compare as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=RESULTS / "bursts.json")
    parser.add_argument(
        "--ledger", type=Path, nargs="+", default=[RESULTS / "promotion.json", RESULTS / "overhead.json"]
    )
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/plan.json")
    args = parser.parse_args()
    if not args.measured.is_file():
        raise SystemExit(f"{args.measured} is not there: run python -m benchmarks.bursts first")
    content, found = json.loads(args.measured.read_text()), times.read(args.ledger)
    missing = found.missing([])
    if missing:
        raise ConfigError(f"--ledger: none says {', '.join(missing)}")
    report = Report("plan", module="plan_check")
    report.configs = {"measured": content["command"], "ledger": [path.name for path in args.ledger]}
    for case, name in ((POOL, ""), (ACTIVE, "active_"), (FASTEST, "fastest_")):
        if case not in content["configs"]:
            continue
        was, would = measured(content["runs"], case), predicted(case, content, found)
        report.runs.append({"case": case, "predicted_s": sorted(would), "measured_s": sorted(was)})
        for percent in (50, 99):
            is_s, said_s = percentile(was, percent), percentile(would, percent)
            error = abs(said_s - is_s) / is_s if is_s and said_s is not None else None
            note = (
                f"predicted {said_s:.3f} s, measured {is_s:.3f} s" if is_s and said_s is not None else "no valid step"
            )
            report.claim(f"{name}p{percent}_prediction_error", error, "", note=note)
    report.write(args.output)


if __name__ == "__main__":
    main()
