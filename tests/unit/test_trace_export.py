"""The ledger's spans as files: OTLP/JSON as its receivers read it, Chrome's trace format as its viewers nest it."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from serve_app import cli
from serve_app.errors import Refused, UnusableFile
from serve_app.telemetry import chrome_trace, otlp_file
from serve_app.telemetry.ledger import SLACK_S
from serve_app.telemetry.stages import Stage
from tests import otlp, spans

from . import transitions as made


def exported(*transitions: dict[str, Any]) -> list[dict[str, Any]]:
    """The spans as a receiver gets them: parsed by OTLP's own classes, which refuse what they do not know."""

    def to_base64(value: Any) -> Any:  # what Protobuf's mapping has where OTLP/JSON has hexadecimal digits
        if isinstance(value, list):
            return [to_base64(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            key: base64.b64encode(bytes.fromhex(one)).decode() if key in otlp_file.IDS else to_base64(one)
            for key, one in value.items()
        }

    sent = json.loads(otlp_file.dumps(transitions))
    request = ParseDict(to_base64(sent), ExportTraceServiceRequest())
    return otlp.spans_of(request)


def test_otlp_json_has_hexadecimal_ids_numbers_as_strings_and_enums_as_numbers() -> None:
    """The three places where OTLP/JSON and Protobuf's usual mapping, or a careless writer, part."""
    said = json.loads(otlp_file.dumps([made.cold_start()]))
    found = [span for one in said["resourceSpans"] for scope in one["scopeSpans"] for span in scope["spans"]]
    assert len(found) == 8 + 2 * 5
    for span in found:
        assert re.fullmatch("[0-9a-f]{32}", span["traceId"])
        assert re.fullmatch("[0-9a-f]{16}", span["spanId"])
        assert re.fullmatch("[0-9]{19}", span["startTimeUnixNano"])
        assert span["kind"] == 1
    assert sum("parentSpanId" in span for span in found) == len(found) - 1
    [moved] = {
        a["value"]["intValue"] for span in found for a in span.get("attributes", []) if a["key"].endswith("bytes")
    }
    assert moved == str(8 * made.GB)


def test_otlp_trace_is_the_tree_that_the_ledger_shows() -> None:
    """Workers' spans stand below the slot's stage during which they ran, with their rank."""
    found = exported(made.cold_start(ranks=1), made.promotion(ranks=1))
    [cold], [hot] = spans.roots(found, Stage.COLD_START), spans.roots(found, Stage.PROMOTION)
    assert cold["trace"] != hot["trace"]
    assert spans.tree(found, cold) == {
        "slot.schedule": {},
        "process.spawn": {},
        "runtime.import": {},
        "engine.core": {
            "device.context": {"comm.init": {}},
            "weights.load": {},
            "kv_cache.allocate": {},
            "graph.capture": {},
        },
        "engine.warmup": {},
        "engine.verify": {},
        "engine.first_sleep": {},
    }
    assert spans.outside(found, cold) == spans.outside(found, hot) == []
    assert cold["resource"]["service.instance.id"] == "k3x9"
    assert hot["attributes"]["serve_app.reason"] == "6 requests held"
    [load] = [span for span in found if span["name"] == Stage.WEIGHTS_LOAD]
    assert load["attributes"] == {"serve_app.bytes": 16 * made.GB, "serve_app.gb_per_s": 4.0, "serve_app.rank": 0}
    assert load["end_s"] - load["start_s"] == pytest.approx(2.0)


def test_otlp_failure_is_an_error_of_the_stage_and_of_the_trace() -> None:
    """Whoever searches for errors finds both."""
    found = exported(made.failed())
    assert [span["name"] for span in found if span["error"]] == ["engine.core", "cold_start"]


def test_otlp_same_transition_is_the_same_trace() -> None:
    """Exported twice it is not two; another slot's is another."""
    once, twice, other = (
        exported(one)[0]["trace"] for one in (made.promotion(), made.promotion(), made.promotion("b"))
    )
    assert once == twice != other


def threads(*transitions: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Slices by the name of their thread, as a viewer shows them."""
    events = json.loads(chrome_trace.dumps(transitions))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def test_chrome_trace_has_a_track_for_the_slot_and_one_for_each_rank() -> None:
    """Ranks are told apart; the arguments are the stage's attributes."""
    found = threads(made.cold_start(ranks=2))
    assert list(found) == ["slot", "rank 0", "rank 1"]
    assert [slice["name"] for slice in found["rank 1"]] == [
        "device.context",
        "comm.init",
        "weights.load",
        "kv_cache.allocate",
        "graph.capture",
    ]
    assert found["rank 0"][2]["args"] == {"bytes": 8 * made.GB, "gb_per_s": 4.0}
    assert found["rank 0"][2]["dur"] == 2_000_000


def test_chrome_trace_puts_stages_that_overlap_on_tracks_of_their_own() -> None:
    """Viewers misplace slices of one thread that neither contain nor follow each other."""
    found = threads(made.promotion(ranks=1))
    assert list(found) == ["slot", "slot (2)", "rank 0"]
    assert [slice["name"] for slice in found["slot (2)"]] == ["engine.wake.kv_cache"]


def test_chrome_trace_gives_no_number_to_two_threads() -> None:
    """Perfetto would draw them as one; seen in version 52."""
    two = [made.cold_start("a"), made.later(made.promotion("a"), 60), made.cold_start("b")]
    events = json.loads(chrome_trace.dumps(two))["traceEvents"]
    threads = [(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert len({tid for tid, _ in threads}) == len(threads) == 4 + 3
    assert {tid for tid, name in threads if name == "slot"} == {event["pid"] for event in events}


def test_chrome_trace_clips_what_clocks_make_stick_out() -> None:
    """A stage that seems to end a millisecond after the one around it is still within it."""
    late = made.transition(
        Stage.DEMOTION,
        "k3x9",
        1.0,
        made.record(Stage.DRAIN, 0.0, 0.4 + SLACK_S / 2),
        made.record(Stage.SLEEP, 0.4, 0.6 + SLACK_S / 2),
    )
    [(name, slices)] = threads(late).items()
    assert name == "slot"
    ends = {slice["name"]: slice["ts"] + slice["dur"] for slice in slices}
    starts = {slice["name"]: slice["ts"] for slice in slices}
    assert ends["engine.sleep"] == ends["demotion"]
    assert starts["engine.sleep"] >= ends["demotion.drain"]


def test_export_reads_a_saved_ledger_and_writes_both(tmp_path: Path) -> None:
    """No cluster is needed for that; only the slot that was asked for is written."""
    saved = made.save(tmp_path / "ledger.json", made.cold_start(), made.promotion(), made.promotion("b"))
    out = {"--otlp": tmp_path / "spans.json", "--chrome": tmp_path / "trace.json"}
    files = [part for option, path in out.items() for part in (option, str(path))]
    done = CliRunner().invoke(cli.app, ["trace", "export", "--from", str(saved), *files, "--slot", "k3x9"])
    assert done.exit_code == 0, done.output
    assert out["--otlp"].read_text() == otlp_file.dumps([made.cold_start(), made.promotion()]) + "\n"
    assert json.loads(out["--chrome"].read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not what `serve-app ledger --json` writes"),
        ("[]", "not what `serve-app ledger --json` writes"),
        ('{"transitions": [{"slot": "a"}]}', "a transition without duration_s, error"),
    ],
)
def test_export_names_a_file_that_is_no_ledger(tmp_path: Path, text: str, said: str) -> None:
    """And says what is missing."""
    saved = tmp_path / "ledger.json"
    saved.write_text(text)
    done = CliRunner().invoke(cli.app, ["trace", "export", "--from", str(saved), "--otlp", str(tmp_path / "x")])
    assert isinstance(done.exception, UnusableFile)
    assert str(done.exception).startswith(f"{saved}: ") and said in str(done.exception)


def test_export_refuses_to_write_nothing(tmp_path: Path) -> None:
    """Neither a format nor a transition."""
    saved = made.save(tmp_path / "ledger.json")
    for options, said in (([], "nothing to write"), (["--otlp", "x"], "no transition has been recorded yet")):
        done = CliRunner().invoke(cli.app, ["trace", "export", "--from", str(saved), *options])
        assert isinstance(done.exception, Refused) and said in str(done.exception)
