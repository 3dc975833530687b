"""Transitions as coordinators tell them, made up: what cold starts and promotions of several ranks look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serve_app.cli import ledger_view
from serve_app.telemetry.stages import Stage

GB = 10**9
START_S = 1_790_000_000.0


def record(stage: Stage, start_s: float, duration_s: float, rank: int = -1, **attributes: Any) -> dict[str, Any]:
    """One stage, `start_s` seconds after the transition's own start."""
    return {
        "stage": str(stage),
        "start_s": START_S + start_s,
        "duration_s": duration_s,
        "rank": rank,
        "attributes": attributes,
        "error": "",
        "done": True,
    }


def transition(kind: Stage, slot: str, duration_s: float, *stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """One transition; its own record comes first, as slots write it."""
    usual = {
        "application": "default",
        "slot": slot,
        "model": "",
        "kind": str(kind),
        "start_s": START_S,
        "duration_s": duration_s,
        "reason": "",
        "error": "",
        "stages": [record(kind, 0.0, duration_s), *stages],
    }
    return usual | changes


def cold_start(slot: str = "k3x9", ranks: int = 2, slower: float = 1.0) -> dict[str, Any]:
    """Of one engine whose weights take `slower` times as long; the last rank is the slowest."""
    load_s = 2.0 * slower
    workers = [
        one
        for rank in range(ranks)
        for one in (
            record(Stage.DEVICE_CONTEXT, 6.0, 1.5, rank),
            record(Stage.COMM_INIT, 6.5, 0.8, rank),
            record(
                Stage.WEIGHTS_LOAD, 7.6, load_s * (1 + rank / ranks / 4), rank, bytes=16 * GB // ranks, gb_per_s=4.0
            ),
            record(Stage.KV_ALLOCATE, 8 + load_s * 1.5, 0.3, rank),
            record(Stage.GRAPH_CAPTURE, 8.5 + load_s * 1.5, 1.4, rank),
        )
    ]
    core_s = 6.0 + load_s * 1.5
    return transition(
        Stage.COLD_START,
        slot,
        core_s + 8.5,
        record(Stage.SCHEDULE, 0.0, 0.4),
        record(Stage.SPAWN, 0.4, 1.1),
        record(Stage.IMPORT, 1.6, 3.4),
        record(Stage.ENGINE_CORE, 5.0, core_s, forkserver=True),
        record(Stage.WARM_UP, 5.1 + core_s, 0.6),
        record(Stage.VERIFY, 5.7 + core_s, 0.2),
        record(Stage.FIRST_SLEEP, 5.9 + core_s, 2.4, tier="host"),
        *workers,
    )


def promotion(slot: str = "k3x9", ranks: int = 2, slower: float = 1.0) -> dict[str, Any]:
    """A wake whose copies of the weights overlap the mapping of the KV cache, as they really do."""
    wake_s = 0.3 * slower
    workers = [
        record(Stage.WAKE_WEIGHTS, 0.02, wake_s * (1 - rank / 20), rank, bytes=16 * GB // ranks)
        for rank in range(ranks)
    ]
    return transition(
        Stage.PROMOTION,
        slot,
        wake_s + 0.2,
        record(Stage.DECIDE, 0.0, 0.008),
        record(Stage.WAKE_WEIGHTS, 0.015, wake_s, tier="host"),
        record(Stage.WAKE_KV, 0.1, wake_s - 0.05, bytes=100 * GB),
        record(Stage.VERIFY, wake_s + 0.06, 0.12),
        record(Stage.PUBLISH, wake_s + 0.185, 0.01),
        *workers,
        model="chat",
        reason="6 requests held",
    )


def failed(slot: str = "b0rk") -> dict[str, Any]:
    """A cold start that came to nothing, with characters that a web page must not take for its own."""
    said = "EngineError: <model> & co: no such file"
    core = record(Stage.ENGINE_CORE, 1.0, 2.0) | {"error": said}
    return transition(Stage.COLD_START, slot, 3.5, core, error=said)


def save(path: Path, *transitions: dict[str, Any]) -> Path:
    """As `serve-app ledger --json` writes it."""
    shown = ledger_view.recent(list(transitions), len(transitions))
    path.write_text(json.dumps(ledger_view.plain(list(transitions), shown)))
    return path


def later(transition: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same, so many seconds later."""
    stages = [one | {"start_s": one["start_s"] + seconds} for one in transition["stages"]]
    return transition | {"start_s": transition["start_s"] + seconds, "stages": stages}
