"""Write what is made from one place: `python -m tools.observability`.

docs/metrics.md from serve_app/telemetry/metrics.py, docs/settings.md from config.py and live.py (settings.py), the
dashboards from tools/dashboards.py, the PrometheusRule from the rules file. A test notices when one is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from serve_app.telemetry import metrics
from tools import dashboards, settings

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "cluster" / "observability"
RULES = HERE / "rules" / "serve_app.yaml"

_METRICS = """# Metrics

Every Ray node serves them, with Ray's own, on its metrics port; `cluster/observability/` has what scrapes them, the
alerts ([runbooks](runbooks.md)) and the dashboards. All have the label `application`, and Ray's (`WorkerId`,
`NodeAddress`, `SessionName`, ...): one series for each process, so sum over what you do not ask for. This page is made
from `serve_app/telemetry/metrics.py` (`python -m tools.observability`).

- **Who scrapes**: `cluster/observability/compose.yaml` on one machine, through the file that Ray's head node writes as
  long as its dashboard runs; on Kubernetes `cluster/observability/prometheus-operator/`. Grafana opens with three
  dashboards: pool, cold starts and promotions, GPUs and nodes.
- **vLLM's own** come from each slot as `ray_vllm_*`: the slot is `ReplicaId`, the model `model_name`. They are not on
  the slots' `/metrics`, which a proxy would send to any one of them.
  Their gauges are set while an engine works: those of an idle or sleeping one are absent after a while.
- Our gauges are set every second (headroom: five), and reach the agent every `RAY_metrics_report_interval_ms` (10 000).
  What has gone (a slot) is forgotten after some of these intervals.
- Counters begin with the first thing they count, and again with their process: `rate` and `increase` see all but the
  very first.
- Labels are bounded by the configuration, by lists in the code or, for `slot` and `node`, by what lives now: histograms
  have neither.

"""


def files() -> dict[Path, str]:
    """Path -> text."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "serve-app", "labels": {"app.kubernetes.io/part-of": "serve-app"}},
        "spec": yaml.safe_load(RULES.read_text()),
    }
    made = "# Made from rules/serve_app.yaml by `python -m tools.observability`; see pod-monitor.yaml.\n"
    texts = {
        ROOT / "docs" / "metrics.md": _METRICS + metrics.table() + "\n",
        ROOT / "docs" / "settings.md": settings.page(),
        HERE / "prometheus-operator" / "prometheus-rule.yaml": made + yaml.safe_dump(rule, sort_keys=False, width=1000),
    }
    for name, board in dashboards.everything().items():
        texts[HERE / "grafana" / "dashboards" / name] = json.dumps(board, indent=1) + "\n"
    return texts


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
