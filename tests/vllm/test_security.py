"""The public port of a real application: OpenAI's routes and health, for those who have a key, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from serve_app.models import ensure_model
from serve_app.slot.gate import is_public

from .application import MODEL, Application

pytestmark = pytest.mark.timeout(900)

KEY, NEXT, WRONG = "sk-first-5f0c7d6a91", "sk-second-0be41c93aa", "sk-wrong-1111111111"
MOST_BYTES = 100_000

# vLLM's routes for developers and operators: `grep -rn 'router\\.' vllm/entrypoints`, 0.32.
OPERATORS = [
    "/abort_requests",
    "/collective_rpc",
    "/fault_tolerance/apply",
    "/fault_tolerance/status",
    "/finish_weight_update",
    "/generative_scoring",
    "/get_world_size",
    "/inference/v1/generate",
    "/init_weight_transfer_engine",
    "/invocations",
    "/is_paused",
    "/is_scaling_elastic_ep",
    "/is_sleeping",
    "/kv_event_sources",
    "/load",
    "/metrics",
    "/metrics/",
    "/pause",
    "/ready",
    "/readyz",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/static/x",
    "/stop_profile",
    "/tokenizer_info",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
]
# What our own command line can do, by any name that somebody might try.
VERBS = [
    "/promote",
    "/drain",
    "/freeze",
    "/unfreeze",
    "/operate",
    "/configure",
    "/settings",
    "/status",
    "/ledger",
    "/pool",
    "/Pool",
]
# Ways around a list of names.
DETOURS = ["//sleep", "/v1/../sleep", "/v1/%2e%2e/sleep", "/SLEEP", "/sleep/", "/docs/../sleep", "/v1/..%2fsleep"]


class Guarded(Application):
    """With keys, a small limit, and an environment that asks for vLLM's development routes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys, self.folder = folder / "keys", folder
        self.keys.write_text(f"{KEY}\n")

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "SERVE_APP_API_KEYS_FILE": str(self.keys),
            "SERVE_APP_MAX_REQUEST_BYTES": str(MOST_BYTES),
            "VLLM_SERVER_DEV_MODE": "1",
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    ensure_model(MODEL, progress=False)
    application = Guarded(tmp_path_factory.mktemp("guarded"))
    try:
        application.start()
        yield application
    finally:
        application.end()


@pytest.fixture(scope="module")
def http(guarded: Guarded) -> Iterator[httpx.Client]:
    """A client that has a key, so that nothing but the route is in its way."""
    with httpx.Client(base_url=guarded.url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


def complete(guarded: Guarded, key: str) -> str:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=4, temperature=0)
        return answer.choices[0].text


def test_key_lets_in_and_none_does_not(guarded: Guarded) -> None:
    """With the client that people use; the health routes need none."""
    assert "5" in complete(guarded, KEY)
    with pytest.raises(openai.AuthenticationError) as refused:
        complete(guarded, WRONG)
    assert refused.value.code == "invalid_api_key"
    assert httpx.post(f"{guarded.url}/v1/completions", json={}).status_code == 401
    for path in ("/health/live", "/health/ready", "/health/startup", "/-/healthz"):
        assert httpx.get(f"{guarded.url}{path}").status_code == 200
    assert httpx.get(f"{guarded.url}/-/routes").status_code == 401


@pytest.mark.parametrize("path", [*OPERATORS, *VERBS])
def test_route_must_not_be_there(http: httpx.Client, path: str) -> None:
    """404 for every method, with a valid key, though vLLM's server has the route."""
    for method in ("GET", "POST", "PUT", "DELETE"):
        answer = http.request(method, path, json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error"), (method, path)


@pytest.mark.parametrize("path", DETOURS)
def test_route_is_not_there_by_another_spelling(guarded: Guarded, http: httpx.Client, path: str) -> None:
    """Whatever the proxy or vLLM make of it, no engine falls asleep."""
    raw = httpx.URL(guarded.url).copy_with(raw_path=path.encode())
    for method in ("GET", "POST"):
        assert http.request(method, raw).status_code in (404, 405)
    assert "5" in complete(guarded, KEY)


def test_list_of_routes_is_the_one_that_vllm_has(http: httpx.Client) -> None:
    """vLLM's server has routes behind the gate, the development ones not even there, though the node's environment
    asks for them; a route that a later vLLM adds has to be looked at."""
    there = set(http.get("/openapi.json").json()["paths"])
    hidden = {path for path in there if not is_public(path)}
    assert hidden and hidden <= set(OPERATORS)
    assert not {"/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache"} & there


def test_large_request_is_refused(http: httpx.Client) -> None:
    """By its declared length, and in chunks that never end."""
    body = {"model": MODEL, "prompt": "x" * MOST_BYTES, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    chunked = http.post("/v1/completions", content=(b"x" * 10_000 for _ in range(20)))
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "request_too_large")


def test_keys_change_without_a_restart_and_stand_nowhere(guarded: Guarded) -> None:
    """The next request counts with the new file; no log of Ray or Serve, and no status, has any of the keys."""
    renewed = guarded.folder / "renewed"
    renewed.write_text(f"{NEXT}\n")
    os.replace(renewed, guarded.keys)
    assert "5" in complete(guarded, NEXT)
    with pytest.raises(openai.AuthenticationError):
        complete(guarded, KEY)
    texts = {"status": repr(guarded.status())}
    for folder in (guarded.folder, Path(guarded.environment["RAY_TMPDIR"])):
        logs = [file for file in folder.rglob("*") if file.is_file() and file.suffix in (".log", ".out", ".err")]
        texts |= {str(file): file.read_text(errors="replace") for file in logs}
    assert len(texts) > 5
    assert [name for name, said in texts.items() if any(key in said for key in (KEY, NEXT, WRONG))] == []
