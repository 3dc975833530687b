"""`serve-app replay` without a server: what is sent, how rows are made, what is told and what the page contains."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from serve_app.cli import burst_pool, replay_plots, replay_pool, replay_report, replay_rows, replay_run, replay_view
from serve_app.cli.burst_client import Answer, take_line
from serve_app.cli.replay_plan import Plan, model_names, plan
from serve_app.cli.replay_pool import Event, Level, PoolRecord
from serve_app.cli.replay_rows import Row
from serve_app.cli.replay_view import Replay
from serve_app.errors import ConfigError, NotRunning
from serve_app.traces import TraceRequest

from .test_burst import chunk, pool
from .test_cli import PROMOTION, invoke, shown, slot

REQUEST = TraceRequest(1.0, 100, 20, "m")
ACTIVE = Answer(200, "aaaa", 0.0, 0.05, 1.0, 2, "", [0.05, 0.55], 130, 11)
HELD = Answer(200, "bbbb", 0.4, 0.5, 1.5, 1, "", [0.5])
COLD = Answer(200, "cccc", 9.0, 9.5, 10.0, 1, "", [9.5])
REFUSED = Answer(503, "", 2.0, None, 2.0, 0, "HTTP 503: <no> room")
FAILED = Answer(200, "aaaa", 0.0, 0.05, 0.5, 3, "the stream ended before [DONE]")
RUNNING = Answer(200, "aaaa", 0.0, 0.05, None, 3, "the stream ended before [DONE]")
USABLE = {"aaaa": -math.inf, "bbbb": -math.inf, "cccc": 8.0}


def row(answer: Answer, index: int = 0, at_s: float = 1.0) -> Row:
    request = TraceRequest(at_s, 100, 20, "m")
    return replay_rows.row(index, request, at_s + 0.001, answer, USABLE)


def told(*answers: Answer, seen: PoolRecord | None = None) -> Replay:
    rows = [row(answer, index, float(index)) for index, answer in enumerate(answers)]
    begun = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    work = Plan([REQUEST] * len(rows), {"m": 0.25})
    return Replay("some<b>.csv", "http://x", 10.0, work, begun, rows, seen or PoolRecord("no Ray cluster"))


SEEN = PoolRecord(
    "",
    [Level(0.0, {"active": 1, "standby": 1}), Level(2.0, {"active": 2}), Level(6.0, {"active": 2, "starting": 1})],
    [
        Event("promotion", "bbbb", 1.9, 0.25, "host", "6 requests held"),
        Event("cold_start", "cccc", 3.0, 5.0),
        Event("promotion", "dddd", 4.0, 2.0, "host", "", "golden check: differs"),
    ],
    (0.0, 10.0),
)


def test_request_asks_for_what_the_trace_has() -> None:
    """Output as long as in the trace unless told otherwise; usage is asked for, so that rows have true counts."""
    body = replay_run.body(7, REQUEST, exact=True)
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("m", 20, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in replay_run.body(7, REQUEST, exact=False)


def test_prompts_are_as_long_as_asked_and_never_alike() -> None:
    """The first word differs, so no prefix cache helps; the same index gives the same prompt."""
    prompts = [replay_run.prompt(index, 50) for index in range(20)]
    assert {len(prompt.split()) for prompt in prompts} == {50}
    assert len({prompt.split()[0] for prompt in prompts}) == 20
    assert replay_run.prompt(3, 50) == prompts[3]
    assert replay_run.prompt(3, 1) == "3"


def test_usage_of_a_stream_is_kept_with_every_events_time() -> None:
    """What the server counts stands in the event at the end, which is no token of its own."""
    answer = Answer(200, error="the stream ended before [DONE]")
    usage = 'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}'
    for at, line in enumerate([chunk(role="assistant"), chunk(content="a"), chunk(content="b"), usage, "data: [DONE]"]):
        take_line(answer, line, float(at))
    assert (answer.chunk_s, answer.prompt_tokens, answer.output_tokens, answer.error) == ([1.0, 2.0], 9, 4, "")


@pytest.mark.parametrize(
    ("answer", "usable", "path"),
    [
        (ACTIVE, USABLE, "active"),
        (HELD, USABLE, "held"),
        (COLD, USABLE, "cold"),
        (COLD, {"cccc": 1.0}, "held"),  # it had just finished starting when the request came
        (COLD, {}, "held"),  # a slot that was never seen: nothing is claimed
        (COLD, None, "held"),  # no pool in sight
        (REFUSED, USABLE, ""),
        (Answer(200, "", None, 0.1, 1.0), USABLE, ""),  # a server that is not ours
    ],
)
def test_path_is_cold_only_if_the_slot_was_not_there(
    answer: Answer, usable: dict[str, float] | None, path: str
) -> None:
    assert replay_rows.path(answer, 1.001, usable) == path


def test_row_has_everything_and_is_json() -> None:
    """Asked for and served, times rounded to a tenth of a millisecond; a request that was cut off has no error."""
    made = row(ACTIVE)
    said = json.loads(json.dumps(made.as_dict()))
    assert (said["arrival_s"], said["late_s"], said["outcome"], said["path"]) == (1.0, 0.001, "served", "active")
    assert (said["prompt_tokens"], said["served_prompt_tokens"], said["served_output_tokens"]) == (100, 130, 11)
    assert said["chunk_s"] == [0.05, 0.55]
    assert made.token_s == pytest.approx(0.05)
    assert row(HELD).token_s is None
    cut = row(RUNNING)
    assert (cut.outcome, cut.error, cut.total_s) == ("cut", "", None)


def test_lines_count_only_served_requests_times() -> None:
    """All, then each path that occurs; a refused request is counted and has no time."""
    rows = [row(answer) for answer in (ACTIVE, HELD, HELD, COLD, REFUSED, FAILED)]
    found = {line.name: (line.requests, line.p50_s, line.p99_s) for line in replay_rows.lines(rows)}
    assert found == {
        "all": (6, 0.5, 9.5),
        "active": (2, 0.05, 0.05),
        "held": (2, 0.5, 0.5),
        "cold": (1, 9.5, 9.5),
    }
    assert replay_rows.outcomes(rows) == {"served": 4, "refused": 1, "failed": 1, "cut": 0}


def test_lines_tell_several_models_apart() -> None:
    """A single one is the same as all, and gets no line of its own."""
    rows = [row(ACTIVE), replace(row(HELD), model="other")]
    assert [line.name for line in replay_rows.lines(rows)] == ["all", "active", "held", "m", "other"]


def test_plan_scales_by_the_whole_trace() -> None:
    """Which part is replayed does not change how long a request is; every model by its own context."""
    trace = [TraceRequest(0.0, 900, 100, "a"), TraceRequest(5.0, 90, 10, "a"), TraceRequest(6.0, 90, 10, "b")]
    made = plan(trace, {"a": "one", "b": "two"}, {"one": 564}, start_s=5, seconds=10, speed=2)
    assert made.requests == [TraceRequest(0.0, 45, 5, "one"), TraceRequest(0.5, 90, 10, "two")]
    assert (made.factors, made.unknown, made.seconds) == ({"one": 0.5, "two": 1.0}, ["two"], 0.5)
    assert made.scaling() == "token counts scaled to the context: one x 0.5; nobody says how long the context of two is"
    with pytest.raises(ConfigError, match="no request of the trace lies in these seconds; it has 3 in 6 s"):
        plan(trace, {"a": "one", "b": "two"}, {}, start_s=7, seconds=10, speed=1)


@pytest.mark.parametrize(
    ("options", "found", "names"),
    [
        ([], {""}, {"": "served"}),
        (["x"], {""}, {"": "x"}),
        (["x"], {"a", "b"}, {"a": "x", "b": "x"}),
        (["a=x"], {"a", "b"}, {"a": "x", "b": "b"}),
        (["a=x", "b=y"], {"a", "b"}, {"a": "x", "b": "y"}),
        (["a=x"], {"a", ""}, {"a": "x", "": "served"}),
    ],
)
def test_model_names_are_mapped(options: list[str], found: set[str], names: dict[str, str]) -> None:
    assert model_names(options, found, "served") == names


def test_model_names_that_make_no_sense_are_refused() -> None:
    """Two ids, an unknown name, and nobody who says what is served."""
    with pytest.raises(ConfigError, match="one id for all, or NAME=ID"):
        model_names(["x", "y"], {""}, "")
    with pytest.raises(ConfigError, match="one id for all, or NAME=ID"):
        model_names(["x", "a=y"], {"a"}, "")
    with pytest.raises(ConfigError, match="the trace has no such model; it has a, b"):
        model_names(["c=y"], {"a", "b"}, "")
    with pytest.raises(NotRunning, match="name it with --model"):
        model_names([], {""}, "")


def test_slot_seconds_end_with_the_replay() -> None:
    """A level lasts until the next one; what lies outside the two moments does not count."""
    assert replay_pool.slot_seconds(SEEN.levels, 0.0, 10.0) == {"active": 18.0, "standby": 2.0, "starting": 4.0}
    assert replay_pool.slot_seconds(SEEN.levels, 1.0, 3.0) == {"active": 3.0, "standby": 1.0}


def test_events_of_a_ledger_are_told_once() -> None:
    """A promotion that was seen again as a whole is the same one; what ended before the replay is none of it."""
    start_s, took_s = PROMOTION["start_s"], PROMOTION["duration_s"]
    whole = PROMOTION | {"start_s": start_s - 0.1, "duration_s": took_s + 0.1}
    later = PROMOTION | {"start_s": start_s + 50}
    demotion = PROMOTION | {"kind": "demotion"}
    found = replay_pool.events([later, PROMOTION, whole, demotion], start_s - 1)
    assert [(event.at_s, event.duration_s) for event in found] == [
        (pytest.approx(0.9), pytest.approx(took_s + 0.1)),
        (pytest.approx(51), pytest.approx(took_s)),
    ]
    assert replay_pool.events([PROMOTION], start_s + took_s) == []


def test_recorder_notes_since_when_slots_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first look always were; a starting one from the look on at which it has started."""
    looks = [
        pool(slot("aaaa", "active")),
        pool(slot("aaaa", "active"), slot("bbbb", "starting")),
        pool(slot("aaaa", "active"), slot("bbbb", "standby")),
    ]
    monkeypatch.setattr(burst_pool, "look", lambda app: looks[0])
    recorder = replay_pool.Recorder(None)
    for at_s, seen in enumerate(looks[1:], start=1):
        recorder._note(seen, float(at_s))
    assert recorder.usable == {"aaaa": -math.inf, "bbbb": 2.0}


def test_progress_says_what_matters() -> None:
    """Failures only where there are some, the pool only where it can be seen."""
    assert replay_view.so_far([], 3, None) == "running 3"
    rows = [row(ACTIVE), row(FAILED)]
    said = replay_view.so_far(rows, 1, pool(slot("aaaa", "active"), slot("bbbb", "standby"), held=2))
    assert said == "running 1  failed 1  first token 0.050 s  1 active, 1 standby, held 2"


def test_summary_for_people() -> None:
    """How requests ended, the table, the pool, each error, and where the files are."""
    said = shown(replay_view.ending(told(ACTIVE, HELD, REFUSED, seen=SEEN), Path("r.jsonl"), Path("r.html")), 120)
    assert "3 requests: 2 served; 1 refused" in said
    assert re.search(r"held +1 +0\.500 s", said)
    assert "2 promotions, 1 cold start; slot-seconds: 4 starting, 2 standby, 18 active" in said
    assert "  1 x HTTP 503: <no> room" in said
    assert "rows: r.jsonl; report: r.html" in said
    assert "the pool was not seen: no Ray cluster" in shown(replay_view.ending(told(ACTIVE), Path("r"), None), 120)


def test_summary_as_json_says_the_same() -> None:
    said = json.loads(json.dumps(replay_view.plain(told(ACTIVE, HELD, REFUSED, FAILED, seen=SEEN))))
    assert (said["requests"], said["served"], said["refused"], said["failed"]) == (4, 2, 1, 1)
    assert [event["slot"] for event in said["promotions"]] == ["bbbb", "dddd"]
    assert said["slot_seconds"]["active"] == 18.0
    assert said["factors"] == {"m": 0.25}


def test_page_contains_the_whole_story() -> None:
    """Sentences, numbers, every plot, promotions and cold starts, failures; what the user gave is escaped."""
    page = replay_report.page(told(ACTIVE, HELD, COLD, REFUSED, FAILED, RUNNING, seen=SEEN))
    for part in (
        "3 of 6 requests were served in full.",
        "1 request refused with status 503; 1 request failed; 1 request cut off",
        "3 went to a slot at once; 1 waited until a slot had room; 1 waited for a slot that was only being started.",
        "The pool woke a standby 2 times; from need to active it took 0.250 s (median).",
        "In the background 1 new slot started, in 5.00 s (median).",
        "golden check: differs",
        "woken from tier host",
        "HTTP 503: &lt;no&gt; room",
        "some&lt;b&gt;.csv",
        "2026-01-02 03:04:05",
    ):
        assert part in page, part
    assert page.count("<svg") == 4
    assert "prefers-color-scheme: dark" in page


def test_page_needs_no_network() -> None:
    """No script, no image, style or font from elsewhere; the only addresses are names of XML namespaces."""
    page = replay_report.page(told(ACTIVE, HELD, seen=SEEN))
    assert "<script" not in page and "@import" not in page and "url(http" not in page
    outside = set(re.findall(r"""(?:src|href)=["'](?!#|data:)([^"']*)""", page))
    assert outside == set()


def test_page_without_pool_says_why() -> None:
    page = replay_report.page(told(ACTIVE))
    assert page.count("<svg") == 3
    assert "The pool itself was not seen: no Ray cluster." in page


def test_page_of_many_requests_stays_small() -> None:
    """An hour of a trace, 20,000 requests: still below 5 MB."""
    answers = [ACTIVE, HELD, COLD, REFUSED]
    rows = [row(answers[index % 4], index, index * 0.18) for index in range(20_000)]
    many = Replay("t", "u", 1.0, Plan([REQUEST], {"m": 1.0}), datetime(2026, 1, 1, tzinfo=UTC), rows, SEEN)
    assert len(replay_report.page(many)) < 5_000_000


def test_plots_take_their_colours_from_the_page() -> None:
    """No stand-in is left, no colour is fixed, and what is drawn is well-formed."""
    rows = told(ACTIVE, HELD, COLD, REFUSED).rows
    for drawing in (replay_plots.first_tokens(rows, SEEN, 10.0), replay_plots.slots(SEEN, 10.0)):
        assert "#0f0e" not in drawing and "var(--held)" in drawing
        assert "#000000" not in drawing
        ElementTree.fromstring(drawing)


def test_bars_are_round_and_not_too_many() -> None:
    assert [replay_plots.bin_s(end_s) for end_s in (1.0, 60.0, 3600.0)] == [0.1, 0.5, 30]


def test_thinned_steps_keep_their_peaks() -> None:
    """What a plot has no pixels for is left out, but not the highest."""
    steps = [(index / 1000, 0, 1 + (index == 777)) for index in range(10_000)]
    kept = replay_plots.thinned(steps, 10.0)
    assert len(kept) <= replay_plots.MAX_STEPS and max(kept, key=lambda step: step[2]) == (0.777, 0, 2)
    assert replay_plots.thinned(steps[:5], 10.0) == steps[:5]


def test_speed_must_be_positive(tmp_path: Path) -> None:
    """A wrong option is the command line's own error."""
    code, said = invoke("replay", "--speed", "0", str(tmp_path / "trace.csv"))
    assert code == 2 and "--speed" in said
