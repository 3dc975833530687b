"""Spans that a receiver got, as trees that a test can compare."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Span = dict[str, Any]


def read(path: Path) -> list[Span]:
    """All spans received so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path: Path, until: Callable[[list[Span]], bool], what: str, timeout_s: float = 60) -> list[Span]:
    """The spans, once they satisfy `until`: exporters send in batches, every few seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        spans = read(path)
        if until(spans):
            return spans
        time.sleep(0.2)
    raise AssertionError(f"waited {timeout_s} s in vain for {what}; got {sorted({s['name'] for s in read(path)})}")


def roots(spans: list[Span], name: str) -> list[Span]:
    """Spans of that name without a parent, oldest first."""
    return sorted((s for s in spans if s["name"] == name and not s["parent"]), key=lambda s: s["start_s"])


def tree(spans: list[Span], root: Span) -> dict[str, Any]:
    """Names below `root`, nested, in order of their start: {"name": {"child": {...}}}."""
    children = sorted((s for s in spans if s["parent"] == root["id"]), key=lambda s: (s["start_s"], s["end_s"]))
    return {child["name"]: tree(spans, child) for child in children}


def outside(spans: list[Span], root: Span) -> list[str]:
    """Which of our spans of the root's trace do not lie within their parents' times, give or take clock precision.

    vLLM's own are its own matter; its spans of requests end some time after the last token.
    """
    by_id = {span["id"]: span for span in spans}
    slack = 0.05
    family = [s for s in spans if s["trace"] == root["trace"] and "serve_app.role" in s["resource"]]
    pairs = [(by_id[s["parent"]], s) for s in family if s["parent"] and s["name"] != "llm_request"]
    return [
        f"{span['name']} {span['start_s'] - parent['start_s']:+.3f} {span['end_s'] - parent['end_s']:+.3f} s "
        f"in {parent['name']}"
        for parent, span in pairs
        if span["start_s"] < parent["start_s"] - slack or span["end_s"] > parent["end_s"] + slack
    ]
