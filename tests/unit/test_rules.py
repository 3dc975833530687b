"""Alerts: each fires on a made series that shows its trouble, alone, and is silent on one that does not.

promtool (of Debian's package `prometheus`) evaluates them as Prometheus does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from serve_app.telemetry import metrics

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "cluster" / "observability" / "rules" / "serve_app.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}


class Case(NamedTuple):
    """Series (name and labels -> values in promtool's notation), read at a time; then the alert fires, or does not."""

    alert: str
    fires: bool
    series: dict[str, str]
    at: str = "8m"
    interval: str = "1m"
    labels: str = ""


def durations(fast: str, slow: str, **labels: str) -> dict[str, str]:
    """Buckets of promotions that take up to 0.5 s, and up to 5 s."""
    return {f'promotion_seconds_bucket{{model="m",le="{le}"}}': values for le, values in (
        ("0.5", fast), ("5.0", slow), ("+Inf", slow))}  # fmt: skip


def stages(sums: dict[str, str]) -> dict[str, str]:
    """Cold starts, one in five minutes for a week, with the sum of each stage's seconds."""
    found = {}
    for stage, values in sums.items():
        found[f'stage_seconds_sum{{stage="{stage}",path="cold_start"}}'] = values
        found[f'stage_seconds_count{{stage="{stage}",path="cold_start"}}'] = "0+1x2016"
    return found


STEADY, GROWN = "0+10x2016", "0+10x2000 20000+60x16"
WEEK = {"at": "10060m", "interval": "5m"}
CASES = [
    Case("FirstTokenSlow", True, {'ttft_seconds_bucket{le="2.5"}': "0+8x120", "ttft_seconds_count": "0+10x120"}, "90m"),
    Case("FirstTokenSlow", False, {'ttft_seconds_bucket{le="2.5"}': "0+9x99", "ttft_seconds_count": "0+10x99"}, "90m"),
    Case(
        "FirstTokenSlow",  # five bad minutes in a good hour
        False,
        {'ttft_seconds_bucket{le="2.5"}': "0+10x84 840+5x6", "ttft_seconds_count": "0+10x90"},
        "90m",
    ),
    Case("RequestsShed", True, {'shed_total{reason="deadline",model="m"}': "1+1x9"}, labels='reason="deadline"'),
    Case("RequestsShed", False, {'shed_total{reason="deadline",model="m"}': "5x9"}),
    Case("PoolEmpty", True, {'slots{role="active",model="m"}': "0x9", 'slots{role="starting",model=""}': "1x9"}),
    Case("PoolEmpty", False, {'slots{role="active",model="m"}': "0x9", 'slots{role="standby",model=""}': "1x9"}),
    Case("RefillStuck", True, {'slot_pending_seconds{reason="waiting"}': "0+60x9"}, labels='reason="waiting"'),
    Case("RefillStuck", False, {'slot_pending_seconds{reason="waiting"}': "0+60x4 0x9"}),
    Case("SlotsCrash", True, {"slot_deaths_total": "1+1x3 4x9"}),
    Case("SlotsCrash", True, {'cold_starts_total{outcome="failed"}': "1+1x3 4x9"}),
    Case("SlotsCrash", False, {"slot_deaths_total": "1x9", 'cold_starts_total{outcome="ok"}': "1+1x9"}),
    Case("PromotionsFail", True, {'promotions_total{outcome="failed",reason="held",model="m"}': "1+1x3 4x9"}),
    Case("PromotionsFail", False, {'promotions_total{outcome="ok",reason="held",model="m"}': "1+1x9"}),
    Case("PromotionSlow", True, durations("0+10x2000 20000x16", "0+10x2016"), **WEEK),
    Case("PromotionSlow", False, durations("0x2016", "0+10x2016"), **WEEK),
    Case("ColdStartSlow", True, stages({"weights.load": GROWN, "graph.capture": STEADY, "cold_start": GROWN}), **WEEK,
         labels='stage="weights.load"'),
    Case("ColdStartSlow", True, stages({"engine.core": GROWN, "graph.capture": STEADY, "cold_start": GROWN}), **WEEK,
         labels='stage="cold_start"'),
    Case("ColdStartSlow", False, stages({"weights.load": STEADY, "cold_start": STEADY}), **WEEK),
    Case("GoldenCheckFails", True, {"golden_failed_slots": "0 1x9"}),
    Case("GoldenCheckFails", False, {"golden_failed_slots": "0x9"}),
    Case("GoldenBreakerOpen", True, {"breaker_open": "0 1x9"}),
    Case("GoldenBreakerOpen", False, {"breaker_open": "0x9"}),
    Case("MemoryNotReturned", True, {'sleeping_memory_bytes{kind="gpu",slot="s",model="m"}': "2.4e9x60 4e9x20"}, "79m"),
    Case("MemoryNotReturned", False, {'sleeping_memory_bytes{kind="gpu",slot="s",model="m"}': "2e9x9 2.5e9x99"}, "79m"),
    Case("MemoryNotReturned", False, {'sleeping_memory_bytes{kind="host",slot="s",model="m"}': "0x60 16e9x20"}, "79m"),
    Case("GpuFenced", True, {'gpus{state="fenced"}': "0 2x9", 'gpus{state="active"}': "2x9"}),
    Case("GpuFenced", False, {'gpus{state="fenced"}': "0x9", 'gpus{state="active"}': "2x9"}),
    Case("RouterViewStale", True, {"router_view_age_seconds": "0+5x9"}),
    Case("RouterViewStale", False, {"router_view_age_seconds": "5x9"}),
    Case("CoordinatorRestarts", True, {"coordinator_start_time_seconds": "100x2 200x2 300x2 400x9"}, "12m"),
    Case("CoordinatorRestarts", False, {"coordinator_start_time_seconds": "100x2 200x9"}, "10m"),
    Case("HeadroomLow", True, {'memory_headroom_bytes{node="n",slot="s",kind="host"}': "1e9x9"}, labels='kind="host"'),
    Case("HeadroomLow", True, {'memory_headroom_bytes{node="n",slot="s",kind="gpu"}': "1e8x9"}, labels='kind="gpu"'),
    Case("HeadroomLow", False, {'memory_headroom_bytes{node="n",slot="s",kind="host"}': "9e9x9",
                                'memory_headroom_bytes{node="n",slot="s",kind="gpu"}': "1e9x9"}),
    Case("PoolFrozen", True, {"frozen": "1x90"}, "80m"),
    Case("PoolFrozen", False, {"frozen": "1x30 0x60"}, "80m"),
]  # fmt: skip


def test_every_alert_is_tried_both_ways() -> None:
    """A new alert comes with its series."""
    assert {(case.alert, case.fires) for case in CASES} == {(name, fires) for name in ALERTS for fires in (True, False)}


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here: `apt install prometheus`")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{'fires' if case.fires else 'silent'}")
def test_alert(case: Case, tmp_path: Path) -> None:
    """It fires with the labels that name the cause, and no other alert does."""
    labels = "".join(f",{label}" for label in [case.labels] if label)
    by = ", ".join(["alertname", *re.findall(r"(\w+)=", case.labels)])
    fired = [{"labels": f'{{alertname="{case.alert}"{labels}}}', "value": 1}] if case.fires else []
    check = {
        "expr": f'count by ({by}) (ALERTS{{alertstate="firing"}})',
        "eval_time": case.at,
        "exp_samples": fired,
    }
    series = [{"series": exported(name), "values": values} for name, values in case.series.items()]
    tests = [{"interval": case.interval, "input_series": series, "promql_expr_test": [check]}]
    file = tmp_path / "test.yaml"
    interval = "5m" if case.interval == "5m" else "15s"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": interval, "tests": tests}))
    found = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def exported(series: str) -> str:
    """As Prometheus has it: with Ray's prefix, and the application."""
    name, _, labels = series.partition("{")
    return f'ray_serve_app_{name}{{application="a"{"," + labels if labels else "}"}'


def test_every_alert_has_its_runbook() -> None:
    """The address leads to a section that is there, and every section belongs to an alert."""
    headings = set(re.findall(r"^## (\w+)", (ROOT / "docs" / "runbooks.md").read_text(), re.M))
    assert headings == set(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_alerts_ask_for_labels_and_buckets_that_metrics_have() -> None:
    """What a rule groups by or selects is in the code's table."""
    text = RULES.read_text()
    assert {float(le) for le in re.findall(r'le="([\d.]+)"', text)} <= set(metrics.SECONDS)
    known = {label for metric in metrics.ALL for label in metric.labels} | {"le", "NodeAddress"}
    grouped = {label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", text) for label in labels.split(",")}
    assert grouped <= known
