"""`serve-app plan`: the command, its page, and Prometheus' HTTP API."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from serve_app import cli
from serve_app.cli import plan_plots
from serve_app.planning.fleet import Level
from serve_app.pool.lifecycle import State

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LEDGER = [
    part for name in ("cold_start", "promotion", "overhead") for part in ("--ledger", str(RESULTS / f"gpu_{name}.json"))
]
SAMPLE = str(ROOT / "configs" / "sample-trace.csv")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["plan", *arguments])
    return result.exit_code, result.output or str(result.exception)


def test_plan_compares_pools_with_both_bounds() -> None:
    status, said = invoke(SAMPLE, *LEDGER, "--hard", "4", "--gpu-price", "4.5", "--json")
    assert status == 0, said
    answers = json.loads(said)["answers"]
    assert {one["kind"] for one in answers} == {"pool", "all active", "cold"}
    assert all(one["cost"] == pytest.approx(4.5 * one["gpu_hours"]) for one in answers)
    assert invoke(SAMPLE, *LEDGER, "--hard", "4", "--gpu-price", "4.5", "--json")[1] == said


def test_plan_says_what_is_cheapest_and_what_standbys_buy() -> None:
    status, said = invoke(SAMPLE, *LEDGER, "--hard", "4")
    assert status == 0, said
    assert "The cheapest that keeps 99 % of first tokens within 2.00 s" in said
    assert "What each standby buys" in said and "1st" in said


def test_plan_writes_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    status, said = invoke(SAMPLE, *LEDGER, "--hard", "4", "--out", str(page))
    assert status == 0, said
    text = page.read_text()
    assert text.count("<svg") >= 3 and "GPU-hours" in text
    assert not re.search(r"(src|href)=.http|url\(.?http|@import|<script", text)


def test_many_changes_are_shown_as_means() -> None:
    """Half of the time one slot is active and half of the time it sleeps; then it sleeps."""
    half = plan_plots.PIECES // 2
    levels = [Level(index * 0.5, {State.STANDBY if index % 2 else State.ACTIVE: 1}) for index in range(2 * half)]
    pieces = plan_plots.means(levels, float(plan_plots.PIECES))
    assert all(found == {State.ACTIVE: 0.5, State.STANDBY: 0.5} for _, found in pieces[:half])
    assert all(found == {State.STANDBY: 1.0} for _, found in pieces[half:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a TRACE or --prometheus"),
        ([SAMPLE], "no --ledger says a promotion from tier host"),
        ([SAMPLE, *LEDGER, "--tier", "warm"], "--tier is 'warm'; allowed: ready, host, disk"),
        ([SAMPLE, *LEDGER, "--standby", "x"], "--standby is 'x'; numbers"),
        ([SAMPLE, *LEDGER, "--pace", "4.9"], "--pace is '4.9'"),
        ([SAMPLE, *LEDGER, "--model", "z"], "--model z: trace"),
    ],
)
def test_plan_names_what_is_wrong(arguments: list[str], message: str) -> None:
    status, said = invoke(*arguments)
    assert status == 1 and message in said


class Prometheus(BaseHTTPRequestHandler):
    """Answers a range query as Prometheus does: ten requests in each of the last two steps."""

    def do_GET(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        end, step = float(asked["end"]), float(asked["step"])
        known = "requests_total" in asked["query"]
        values = [[float(asked["start"]) + step * index, "10"] for index in range(2)] if known else []
        assert values == [] or values[-1][0] <= end
        assert step >= 60, "shorter than twice the usual time between scrapes: `increase` is empty then"
        body = json.dumps(
            {"status": "success", "data": {"result": [{"metric": {}, "values": values}] if values else []}}
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def prometheus_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_plan_takes_arrivals_from_prometheus(prometheus_url: str) -> None:
    status, said = invoke("--prometheus", prometheus_url, "--since", "1h", *LEDGER, "--json")
    assert status == 0, said
    assert json.loads(said)["requests"] == 20


def test_plan_says_when_prometheus_knows_of_no_requests(prometheus_url: str) -> None:
    status, said = invoke("--prometheus", prometheus_url, "--metric", "nothing", *LEDGER)
    assert status == 1 and "nothing has not grown" in said
