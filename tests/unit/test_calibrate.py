"""The prefill rate from times by prompt length."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from serve_app import cli
from serve_app.cli.calibrate import prefill_rate
from serve_app.errors import NotRunning


def test_what_every_request_costs_does_not_count() -> None:
    """Only what each further token adds."""
    assert prefill_rate({256: 1.0256, 1024: 1.1024, 4096: 1.4096}) == pytest.approx(10_000)


def test_times_that_do_not_rise_say_nothing() -> None:
    """Rather than a negative or endless rate."""
    with pytest.raises(NotRunning, match="longer prompts did not take longer"):
        prefill_rate({256: 0.1, 1024: 0.1})


class WithKey(BaseHTTPRequestHandler):
    """An OpenAI server that lets in who has the key, and takes a second for 5000 prompt tokens."""

    def do_GET(self) -> None:
        cards = {"data": [{"id": "m", "max_model_len": 4096}]}
        self._answer(200, {}) if self.path == "/health/ready" else self._let_in(cards)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(len(body["prompt"]) / 5_000)
        self._let_in({})

    def _let_in(self, content: object) -> None:
        known = self.path in ("/v1/models", "/v1/completions") and self.headers["authorization"] == "Bearer right"
        self._answer(200 if known else 401, content if known else {"error": {"message": "no such API key"}})

    def _answer(self, status: int, content: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), WithKey)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def test_the_key_is_sent_where_one_is_demanded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the address as people paste it, its slash included."""
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    result = CliRunner().invoke(cli.app, ["calibrate", "--url", url, "--longest", "1024", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens_per_s"] > 0


def test_a_wrong_key_is_what_is_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that no slot is active."""
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    result = CliRunner().invoke(cli.app, ["calibrate", "--url", url])
    assert result.exit_code != 0
    assert isinstance(result.exception, NotRunning | SystemExit)
    assert "no such API key" in f"{result.exception} {result.output}"
