"""A collector that is there and never answers: requests and promotions go on as without one."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator

import pytest

from tests import exporting

from . import bursts
from .pool import Answer

PATIENCE_S = 120


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Answer], socket.socket]]:
    """Of bursts beyond the active slot's capacity; and the black hole, which the kernel connects for us."""
    with socket.socket() as black_hole:
        black_hole.bind(("127.0.0.1", 0))
        black_hole.listen(128)
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{black_hole.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600",  # who waits for the collector waits longer than the client does
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_BSP_MAX_QUEUE_SIZE": "4",  # full at once, so that spans are dropped, too
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
        }
        with bursts.application(tmp_path_factory.mktemp("hole"), variables) as url:
            yield asyncio.run(_bursts(url)), black_hole


async def _bursts(url: str) -> list[Answer]:
    """Until a slot has been promoted for one: the standby may still be starting when the first one comes."""
    await exporting.ready(url)
    answers: list[Answer] = []
    async with asyncio.timeout(PATIENCE_S):
        while len({answer.slot for answer in answers}) < 2:
            answers += await bursts.burst(url, secrets.token_hex(16))
    return answers


def test_requests_are_served_and_a_standby_is_promoted(answers: tuple[list[Answer], socket.socket]) -> None:
    """The second slot answers only once it has been promoted, each stage of which made spans."""
    served, _ = answers
    assert {answer.status for answer in served} == {200}
    assert all(answer.done for answer in served)
    assert len({answer.slot for answer in served}) >= 2


def test_spans_were_on_their_way(answers: tuple[list[Answer], socket.socket]) -> None:
    """It did try: proxy, coordinator and slots have connections on which nobody ever answered."""
    _, black_hole = answers
    black_hole.setblocking(False)
    connections = []
    while True:
        try:
            connections.append(black_hole.accept()[0])
        except BlockingIOError:
            break
    for connection in connections:
        connection.close()
    assert len(connections) >= 4
