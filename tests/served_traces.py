"""What one application with real vLLM tells a collector of a cold start, and of a request that a standby was woken for.

The same on CPU (tests/vllm) and on GPUs (tests/gpu), whichever way vLLM runs its workers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from tests import exporting, spans

# Starts a Ray whose processes have these variables; gives those of a client of it. Without one `serve run` has its own.
Cluster = Callable[[dict[str, str]], AbstractContextManager[dict[str, str]]]

MODEL = "tiny"
CLIENT_TRACE = secrets.token_hex(16)
# Stages that only the workers see.
RANKS = {"device.context", "comm.init", "weights.load", "kv_cache.allocate", "graph.capture"}
LATENCIES = {f"gen_ai.latency.{name}" for name in ("time_in_queue", "time_to_first_token", "e2e")}
LATENCIES |= {f"gen_ai.latency.time_in_model_{name}" for name in ("prefill", "decode")}
# One standby, which a request wakes.
LIVE: dict[str, Any] = {
    "slots": {"min": 1, "max": 1, "standby": 1, "demote_after_s": 1},
    "models": {MODEL: {"min_active": 0, "tier": "host"}},
}


def collect(
    folder: Path, model: Path, kwargs: dict[str, Any], slot: dict[str, Any], on: Cluster = nullcontext
) -> list[spans.Span]:
    """Start an application, wait for its standby, ask once, wait for all spans."""
    path = folder / "spans.jsonl"
    args = {"models": [{"id": MODEL, "source": str(model), "engine_kwargs": kwargs}], "slot": slot}
    with (
        exporting.receiver(path) as variables,
        on(variables) as environment,
        exporting.application(folder, environment, args, LIVE) as url,
    ):
        try:
            spans.wait_for(path, lambda found: bool(spans.roots(found, "cold_start")), "a cold start", 400)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{(folder / 'serve.log').read_text()[-5000:]}") from None
        asyncio.run(_ask(url))
        return spans.wait_for(path, _is_complete, "the request and its promotion")


def _is_complete(found: list[spans.Span]) -> bool:
    """Each process exports on its own, the workers' spans by their slot once the request is being served."""
    requests = {span["name"] for span in found if span["trace"] == CLIENT_TRACE}
    roots = spans.roots(found, "promotion")
    promotion = [span for span in found if roots and span["trace"] == roots[0]["trace"]]
    wakes = [
        span for span in promotion if span["name"] == "engine.wake.kv_cache" and "serve_app.rank" in span["attributes"]
    ]
    return requests >= {"request.hold", "llm_request"} and bool(wakes)


async def _ask(url: str) -> None:
    body = {"model": MODEL, "prompt": list(range(3, 40)), "max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/completions", json=body, headers=exporting.client_headers(CLIENT_TRACE))
        assert answer.status_code == 200, answer.text


def check_cold_start(found: list[spans.Span], ranks: int, gpus: bool) -> None:
    """One tree; of each rank its own stages, with where it ran."""
    [root] = spans.roots(found, "cold_start")
    family = [span for span in found if span["trace"] == root["trace"]]
    assert {"slot.schedule", "process.spawn", "engine.core", "engine.warmup", "engine.verify"} <= set(
        spans.tree(found, root)
    )
    for name in RANKS:
        ours = [
            span["attributes"] for span in family if span["name"] == name and "serve_app.rank" in span["attributes"]
        ]
        assert sorted(said["serve_app.rank"] for said in ours) == list(range(ranks)), f"{name}: {ours}"
        assert all(said["host.name"] for said in ours)
        assert len({said.get("serve_app.gpu_uuid") for said in ours} - {None}) == (ranks if gpus else 0)
    assert spans.outside(found, root) == []


def check_promotion(found: list[spans.Span], ranks: int, gpus: bool) -> None:
    """The wake of each rank, and on GPUs how fast its weights came."""
    [root] = spans.roots(found, "promotion")
    family = [span for span in found if span["trace"] == root["trace"]]
    assert {"promotion.decide", "engine.wake.weights", "engine.wake.kv_cache", "promotion.publish"} <= {
        span["name"] for span in family
    }
    for name in ("engine.wake.weights", "engine.wake.kv_cache"):
        ours = [span["attributes"] for span in family if span["name"] == name]
        assert sorted(said["serve_app.rank"] for said in ours if "serve_app.rank" in said) == list(range(ranks))
    copies = [span["attributes"] for span in family if span["name"] == "weights.copy"]
    assert sorted(said["serve_app.rank"] for said in copies) == (list(range(ranks)) if gpus else [])
    assert all(said["serve_app.bytes"] > 0 and said["serve_app.gb_per_s"] > 0 for said in copies)
    assert spans.outside(found, root) == []


def check_request(found: list[spans.Span]) -> None:
    """In its client's trace: how long it was held and for which promotion, and what the engine did with it."""
    [promotion] = spans.roots(found, "promotion")
    family = [span for span in found if span["trace"] == CLIENT_TRACE]
    [hold] = [span for span in family if span["name"] == "request.hold"]
    [request] = [span for span in family if span["name"] == "llm_request"]
    assert hold["parent"] == exporting.CLIENT_SPAN and promotion["trace"] in hold["links"]
    assert hold["attributes"]["gen_ai.request.model"] == MODEL
    assert set(request["attributes"]) >= LATENCIES, sorted(request["attributes"])
    assert request["attributes"]["gen_ai.usage.completion_tokens"] == 8
    assert hold["end_s"] <= request["end_s"]
