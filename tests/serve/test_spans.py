"""Traces as a real OTLP receiver gets them, across proxy, coordinator and slots."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import exporting, spans

from . import bursts
from .pool import MODEL

CLIENT_TRACE = secrets.token_hex(16)


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A receiver process, and an application that was told of it and has served one burst; yields the spans' file."""
    folder = tmp_path_factory.mktemp("spans")
    path = folder / "spans.jsonl"
    with exporting.receiver(path) as variables, bursts.application(folder, variables) as url:
        spans.wait_for(path, lambda s: len(spans.roots(s, "cold_start")) == 2, "two cold starts", 240)
        spans.wait_for(path, lambda s: bool(spans.roots(s, "promotion")), "the first active slot", 120)
        assert [answer.status for answer in asyncio.run(bursts.burst(url, CLIENT_TRACE))] == [200] * 8
        yield path


def test_cold_start_is_one_tree_from_wanting_to_first_sleep(received: Path) -> None:
    """Every stage of a cold start stands below its root, in order, within its parent's times."""
    found = spans.wait_for(received, lambda s: len(spans.roots(s, "cold_start")) == 3, "three cold starts")
    for root in spans.roots(found, "cold_start"):
        assert spans.tree(found, root) == {
            "slot.schedule": {},
            "process.spawn": {},
            "engine.core": {},
            "engine.warmup": {},
            "engine.verify": {},
            "engine.first_sleep": {"engine.wake.weights": {}, "engine.wake.kv_cache": {}},
        }
        assert spans.outside(found, root) == []
        assert root["resource"]["service.name"] == "serve_app"
        [warm_up] = [span for span in found if span["name"] == "engine.warmup" and span["trace"] == root["trace"]]
        assert warm_up["attributes"]["serve_app.model"] == MODEL


def bursts_promotion(received: Path) -> tuple[list[spans.Span], spans.Span]:
    """All spans, and the first promotion that the burst asked for, by load or by waiting, whichever was told first.

    Waits for the slot's part too: coordinator and slot export on their own.
    """

    def asked(found: list[spans.Span]) -> list[spans.Span]:
        return [r for r in spans.roots(found, "promotion") if "min_active" not in r["attributes"]["serve_app.reason"]]

    def complete(found: list[spans.Span]) -> bool:
        return any(len(spans.tree(found, root)) == 5 for root in asked(found)[:1])

    found = spans.wait_for(received, complete, "the burst's promotion")
    return found, asked(found)[0]


def test_promotion_is_one_tree_across_coordinator_and_slot(received: Path) -> None:
    """The coordinator's span holds its own decision and publication and the slot's wake and check."""

    found, promotion = bursts_promotion(received)
    assert spans.tree(found, promotion) == {
        "promotion.decide": {},
        "engine.wake.weights": {},
        "engine.wake.kv_cache": {},
        "engine.verify": {},
        "promotion.publish": {},
    }
    assert spans.outside(found, promotion) == []
    children = [span for span in found if span["parent"] == promotion["id"]]
    assert {span["resource"]["serve_app.role"] for span in children} == {"coordinator", "slot"}
    assert promotion["attributes"]["serve_app.hot"] is True
    assert promotion["attributes"]["serve_app.tier"] == "host"


def test_held_request_stays_in_its_clients_trace_and_links_to_the_promotion(received: Path) -> None:
    """A request's own traceparent is honoured, and both sides of the wait point at each other."""
    found = spans.wait_for(received, lambda s: len([x for x in s if x["name"] == "request.hold"]) == 4, "four holds")
    holds = [span for span in found if span["name"] == "request.hold"]
    assert {span["trace"] for span in holds} == {CLIENT_TRACE}
    _, promotion = bursts_promotion(received)
    assert any(promotion["trace"] in span["links"] for span in holds)
    assert CLIENT_TRACE in promotion["links"]


def test_demotion_is_a_tree_of_drain_and_sleep(received: Path) -> None:
    """What a demotion consists of is visible alone."""
    found = spans.wait_for(received, lambda s: bool(spans.roots(s, "demotion")), "a demotion")
    assert spans.tree(found, spans.roots(found, "demotion")[0]) == {"demotion.drain": {}, "engine.sleep": {}}
