"""A real Prometheus, with the configuration and rules that we ship, against a running application."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml

from benchmarks.processes import free_port
from serve_app.telemetry import metrics

from .pool import Pool, served

HERE = Path(__file__).resolve().parents[2] / "cluster" / "observability"
# Models of this module only: the proxy, and with it its counters, serves other modules too.
IDS = ["maroon", "olive"]
LIVE = {"slots": {"min": 2, "max": 3, "standby": 1, "demote_after_s": 0.3, "keep_model_s": 0.3}}
# No GPU here, and a simulated engine without weights: tests/vllm/test_metrics.py is about vLLM's metrics.
ELSEWHERE = re.compile(r"ray_node_g|ray_serve_app_(?:standby_gpu_seconds|node_cache_|allocator_)\w*|ray_vllm_")

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus here: `apt install prometheus`")


@pytest.fixture(scope="module")
def sent() -> list[int]:
    """How many requests were served, one entry for each burst."""
    return []


class Prometheus:
    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        config = yaml.safe_load((HERE / "prometheus.yaml").read_text())
        targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
        # As Ray's dashboard writes it; here it is off.
        (folder / "discovery.json").write_text(json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        [config["rule_files"]] = [[str(HERE / "rules" / "*.yaml")]]
        [scrape] = [job for job in config["scrape_configs"] if job["job_name"] == "ray"]
        scrape["file_sd_configs"] = [{"files": [str(folder / "discovery.json")]}]
        config["scrape_configs"] = [scrape]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=self._log, stderr=self._log
        )

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        return answer["data"]["result"]

    def wait(self, until: Callable[[], object], what: str, timeout_s: float = 80) -> None:
        deadline, last = time.monotonic() + timeout_s, None
        while time.monotonic() < deadline:
            try:
                last = until()
            except httpx.TransportError:
                last = "it does not answer yet"
            if last is None:
                return
            time.sleep(0.5)
        raise AssertionError(f"waited {timeout_s} s in vain for {what}: {last}")

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Watches the application of this module."""
    found = Prometheus(tmp_path_factory.mktemp("prometheus"), free_port())
    yield found
    found.end()


def in_rules() -> list[str]:
    groups = yaml.safe_load((HERE / "rules" / "serve_app.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def in_panels() -> list[str]:
    boards = [json.loads(path.read_text()) for path in (HERE / "grafana" / "dashboards").glob("*.json")]
    found = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    return [expr.replace("$application", ".+").replace("$__rate_interval", "1m") for expr in found]


def names(expressions: list[str]) -> set[str]:
    return {name for expr in expressions for name in re.findall(r"\b(?:ray_|serve_app:)\w+(?::\w+)*", expr)}


def bursts(pool: Pool, sent: list[int]) -> None:
    """One for each model: more than one slot takes at once; adds to `sent` what was served."""
    for model in IDS:
        assert len(served(pool.burst(12, model=model), 20)) == 12
        sent.append(12)


def live_through_everything(pool: Pool, sent: list[int]) -> None:
    """Bursts that promote, requests that are refused, a slot that dies."""
    bursts(pool, sent)
    hasty = pool.burst(30, headers={"x-request-timeout-s": "0.01"}, model=IDS[0])
    assert {answer.status for answer in hasty} >= {503}
    sent.append(len(served(hasty, 20)))
    pool.settled(active=0)
    os.kill(pool.status()["slots"][0]["pid"], signal.SIGKILL)
    pool.settled(active=0)


def test_every_metric_of_rules_and_panels_is_there_with_data(
    pool: Pool, prometheus: Prometheus, sent: list[int]
) -> None:
    """Names, labels and types fit together from the code to the last panel; what the code defines is all exported."""
    pool.deploy(LIVE, ids=IDS)
    live_through_everything(pool, sent)
    ours = {metric.exported + ("_count" if metric.kind is metrics.Kind.HISTOGRAM else "") for metric in metrics.ALL}
    wanted = {name for name in names(in_rules() + in_panels()) | ours if not ELSEWHERE.match(name)}
    assert len(wanted) > 25

    def missing() -> list[str] | None:
        bursts(pool, sent)  # a rate takes two scrapes with something in between
        return sorted(name for name in wanted if not prometheus.query(f"last_over_time({name}[5m])")) or None

    prometheus.wait(missing, "every metric")
    panels = [expr for expr in in_panels() if not ELSEWHERE.search(expr)]

    def empty() -> list[str] | None:
        bursts(pool, sent)
        return [expr for expr in panels if not prometheus.query(expr)] or None

    prometheus.wait(empty, "every panel's query")


def test_what_is_counted_is_what_happened(pool: Pool, prometheus: Prometheus, sent: list[int]) -> None:
    """Slots by role as the coordinator has them; requests as they were sent; alerts that have no cause are silent."""

    pool.settled(active=0)

    def difference() -> object:
        slots = prometheus.query('sum(ray_serve_app_slots{role="standby"})')
        answered = prometheus.query(f'sum(ray_serve_app_ttft_seconds_count{{model=~"{"|".join(IDS)}"}})')
        counted, happened = (_value(slots), _value(answered)), (len(pool.slots("standby")), sum(sent))
        return None if counted == happened else (counted, happened)

    prometheus.wait(difference, "the same counts")
    firing = {alert["metric"]["alertname"] for alert in prometheus.query('ALERTS{alertstate="firing"}')}
    assert not firing - {"FirstTokenSlow", "RequestsShed"}


def _value(found: list[dict[str, Any]]) -> float:
    return float(found[0]["value"][1]) if found else 0.0
