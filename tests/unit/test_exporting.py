"""Spans on their way to a collector: a real one over gRPC and HTTP, and one that is there and never answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.telemetry.last_words import LastWords
from serve_app.telemetry.spans import EXIT_S as EXIT_WAIT_S
from tests import spans

ROOT = Path(__file__).resolve().parents[2]
PROTOCOLS = ["grpc", "http/protobuf"]
QUEUE, BATCH, MANY = 64, 16, 1000
# Ten times what we grant a collector at exit, and less than the exporter's own half minute.
EXIT_S = 10 * EXIT_WAIT_S

# A slot's process, as far as its spans are concerned: it does what it is told, line by line, and says when it is done.
SLOT = """
import sys
from serve_app.telemetry import spans, tracing
from serve_app.telemetry.stages import Stage

assert spans.configure("slot", "k3x9")
for line in sys.stdin:
    name, count = line.split()
    for number in range(int(count)):
        with tracing.recording(), tracing.stage(Stage.PROMOTION, reason=name, number=number):
            with tracing.stage(Stage.WAKE_WEIGHTS, bytes=7, tier="host"):
                pass
    print(name, flush=True)
"""


class Slot:
    """The process above."""

    def __init__(self, port: int, protocol: str) -> None:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600",  # who waits for the collector waits longer than any test
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_BSP_MAX_QUEUE_SIZE": str(QUEUE),
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": str(BATCH),
        }
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        environment = clean | variables | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def make(self, name: str, count: int = 1) -> None:
        """Make so many promotions of two spans each; returns when all have ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{name} {count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{name}\n"

    def leave(self) -> int:
        """Let it exit by itself, which takes it seconds at most; returns its exit status."""
        self.process.communicate(timeout=EXIT_S)
        return self.process.returncode


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Collector:
    """The receiver's process, which can be made a black hole: the kernel takes connections, nobody answers."""

    def __init__(self, path: Path, protocol: str) -> None:
        self.path, self.port = path, free_port()
        command = [sys.executable, "-m", "tests.otlp", str(self.port), str(path), protocol]
        self.process = subprocess.Popen(command, cwd=ROOT)

    def got(self, reason: str) -> list[spans.Span]:
        return [one for one in spans.read(self.path) if one["attributes"].get("serve_app.reason") == reason]

    def wait_for(self, reason: str) -> None:
        spans.wait_for(self.path, lambda _: bool(self.got(reason)), reason)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def collector(tmp_path: Path, protocol: str) -> Iterator[Collector]:
    one = Collector(tmp_path / "spans.jsonl", protocol)
    yield one
    one.process.kill()
    one.process.wait()


@pytest.fixture
def slot(collector: Collector, protocol: str) -> Iterator[Slot]:
    one = Slot(collector.port, protocol)
    yield one
    one.process.kill()
    one.process.communicate()


def test_receiver_gets_stages_as_they_were(collector: Collector, slot: Slot) -> None:
    """Names, nesting, attributes and who they are from, over both protocols; also the last ones before the exit."""
    slot.make("first")
    collector.wait_for("first")
    slot.make("last")
    assert slot.leave() == 0
    found = spans.read(collector.path)
    assert len(found) == 4
    for root in spans.roots(found, "promotion"):
        assert spans.tree(found, root) == {"engine.wake.weights": {}}
        assert spans.outside(found, root) == []
    wake = next(one for one in found if one["name"] == "engine.wake.weights")
    assert wake["attributes"] == {"serve_app.bytes": 7, "serve_app.tier": "host"}
    resource = wake["resource"]
    assert (resource["service.name"], resource["service.instance.id"]) == ("serve_app", "k3x9")
    assert resource["process.pid"] == slot.process.pid


def test_collector_that_stops_answering_delays_nothing_and_loses_no_more_than_the_buffer(
    collector: Collector, slot: Slot
) -> None:
    """A thousand promotions end while it is silent; afterwards it gets what the buffer held, and all that follows."""
    slot.make("before")
    collector.wait_for("before")
    collector.process.send_signal(signal.SIGSTOP)
    slot.make("silent", MANY)
    assert collector.got("silent") == []
    collector.process.send_signal(signal.SIGCONT)
    spans.wait_for(
        collector.path, lambda found: found[-1]["attributes"].get("serve_app.number") == MANY - 1, "the last"
    )
    slot.make("after")
    assert slot.leave() == 0
    assert len(collector.got("after")) == 1
    kept = [one["attributes"]["serve_app.number"] for one in collector.got("silent")]
    # Two spans a promotion. Beyond the queue there is the batch that was on its way.
    assert QUEUE // 2 <= len(kept) <= (QUEUE + BATCH) // 2 + 1
    assert kept[-QUEUE // 2 :] == list(range(MANY - QUEUE // 2, MANY))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_process_exits_though_nobody_ever_answered(protocol: str) -> None:
    """A slot that is replaced must give its GPU back; the exporter alone would wait for half a minute."""
    with socket.socket() as black_hole:
        black_hole.bind(("127.0.0.1", 0))
        black_hole.listen()
        slot = Slot(black_hole.getsockname()[1], protocol)
        slot.make("silent", MANY)
        connection, _ = black_hole.accept()  # it did try
        with connection:
            assert slot.leave() == 0


def test_last_words_end_where_nobody_listens() -> None:
    """What does not return is left alone; what does is waited for."""
    never, said = threading.Event(), threading.Event()
    LastWords(never.wait, 0.01)()
    LastWords(said.set, 60)()
    assert said.is_set()
