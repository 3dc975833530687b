"""`serve-app burst` without a server: what answers say, what the pool's changes are called, and how it is summed up."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from serve_app.cli import burst_pool, burst_view
from serve_app.cli.burst_client import Answer, served_model, take_headers, take_line
from serve_app.cli.burst_pool import Seen
from serve_app.cli.burst_view import PoolStory
from serve_app.errors import NotRunning

from .test_cli import PROMOTION, shown, slot

UNHELD = Answer(200, "aaaa", 0.0, 0.05, 1.0, 20)
HELD = Answer(200, "bbbb", 0.21, 0.31, 1.2, 20)
REFUSED = Answer(503, "", 30.0, None, 30.0, 0, "HTTP 503: no active slot had room in time")
FAILED = Answer(200, "aaaa", 0.0, 0.05, 0.5, 3, "the stream ended before [DONE]")


def stream(*lines: str) -> Answer:
    """An answer whose stream had these lines."""
    answer = Answer(200, error="the stream ended before [DONE]")
    for index, line in enumerate(lines):
        take_line(answer, line, float(index))
    return answer


def chunk(**delta: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta}]})


def pool(*slots: dict[str, Any], held: int = 0) -> Seen:
    return Seen({entry["slot"]: entry for entry in slots}, held, "m")


def end(*answers: Answer, story: PoolStory | None = None) -> list[str]:
    """The lines of the summary."""
    return shown(burst_view.ending(answers, story or PoolStory()), 140).splitlines()


def test_first_token_is_the_first_text() -> None:
    """The chunk that only says the role is no token."""
    answer = stream(chunk(role="assistant", content=""), "", chunk(content="a"), chunk(content="b"), "data: [DONE]")
    assert (answer.first_token_s, answer.chunks, answer.error) == (2.0, 2, "")


def test_stream_that_breaks_off_has_failed() -> None:
    """Without the closing line, or with an error in the stream, the answer is not whole."""
    assert "before [DONE]" in stream(chunk(content="a")).error
    assert "died" in stream(chunk(content="a"), 'data: {"error": {"message": "engine died"}}', "data: [DONE]").error


def test_headers_say_slot_and_hold() -> None:
    """Without the headers nothing is claimed."""
    answer = Answer()
    take_headers(answer, 200, httpx.Headers({"x-serve-app-slot": "aaaa", "x-serve-app-held-s": "0.2100"}))
    assert (answer.slot, answer.held_s) == ("aaaa", 0.21)
    take_headers(answer, 200, httpx.Headers())
    assert (answer.slot, answer.held_s) == ("", None)


def test_outcomes() -> None:
    """503 is a refusal, anything else that went wrong a failure."""
    answers = [Answer(), UNHELD, HELD, REFUSED, FAILED]
    assert [answer.outcome for answer in answers] == ["running", "served", "served", "refused", "failed"]


def test_nobody_at_the_address_is_told() -> None:
    """One line with the address and the way out."""
    with pytest.raises(NotRunning, match=r"nothing answers at http://127\.0\.0\.1:1 .*--url"):
        served_model("http://127.0.0.1:1")


def test_changes_are_sentences() -> None:
    """A promotion as somebody sees it who looks often enough."""
    looks = [
        pool(slot("aaaa", "active"), slot("bbbb", "standby")),
        pool(slot("aaaa", "active"), slot("bbbb", "promoting"), held=6),
        pool(slot("aaaa", "active"), slot("bbbb", "active")),
        pool(slot("aaaa", "draining"), slot("bbbb", "active"), slot("cccc", "starting")),
        pool(slot("bbbb", "active"), slot("cccc", "standby")),
    ]
    told = [burst_pool.changes(before, after) for before, after in zip(looks, looks[1:], strict=False)]
    assert told == [
        ["6 requests are held: no active slot has room for them", "slot bbbb is woken: it was standby, tier host"],
        ["slot bbbb is active: it takes requests from now on", "no request is held any more"],
        [
            "slot aaaa is no longer needed: it finishes its requests and takes no more",
            "slot cccc is being started: a new one, from scratch",
        ],
        ["slot cccc has started: it is standby, ready for the next burst", "slot aaaa is gone"],
    ]


def test_pool_is_summed_up_in_words() -> None:
    """States that nobody is in are left out, but for the two that matter."""
    said = burst_pool.summary(pool(slot("aaaa", "active"), slot("bbbb", "starting")))
    assert said == "1 active (take requests), 0 standby (started, asleep, can wake at once), 1 starting"


def test_refill_counts_from_the_first_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refilled means as many standbys as before, after there were fewer."""
    first = pool(slot("aaaa", "active"), slot("bbbb", "standby"))
    monkeypatch.setattr(burst_pool, "look", lambda app: first)
    monkeypatch.setattr(burst_pool, "ledger", lambda app: [])
    told: list[str] = []
    watcher = burst_pool.Watcher(None, told.append)
    watcher.note(first, 0.1)
    assert (watcher.short, watcher.refilled_s, told) == (False, None, [])
    watcher.note(pool(slot("aaaa", "active"), slot("bbbb", "active")), 0.2)
    assert (watcher.short, watcher.refilled_s) == (True, None)
    watcher.note(pool(slot("aaaa", "standby"), slot("bbbb", "active")), 9.0)
    watcher.note(pool(slot("aaaa", "standby"), slot("bbbb", "active")), 9.5)
    assert watcher.refilled_s == 9.0
    assert told[-1] == "the pool is refilled: as many standbys as before the burst"
    assert watcher.wait_refilled(0)


def test_summary_of_a_promotion() -> None:
    """Three lines: requests, promotion, times."""
    story = PoolStory(promotions=[PROMOTION], short=True, refilled_s=14.2)
    assert end(UNHELD, UNHELD, HELD, story=story) == [
        "3 requests: 2 at once, 1 held up to 0.21 s; 0 failed",
        'slot aaaa promoted from ready in 0.50 s (wake 0.30, verify 0.10, other 0.10): "6 requests held"',
        "time to first token: 0.05 s unheld, 0.31 s held (medians); pool refilled after 14.2 s",
    ]


def test_summary_without_promotion() -> None:
    """Nothing is claimed that did not happen."""
    assert end(UNHELD) == [
        "1 requests: all at once, none held; 0 failed",
        "no slot was promoted: the active ones took it all",
        "time to first token: 0.05 s unheld (median)",
    ]


def test_summary_counts_refused_apart_from_failed() -> None:
    """Each different error stands below, once."""
    lines = end(UNHELD, HELD, REFUSED, REFUSED, FAILED)
    assert lines[0] == "5 requests: 2 at once, 3 held up to 30.00 s; 2 refused (503); 1 failed"
    assert "  2 x HTTP 503: no active slot had room in time" in lines
    assert "  1 x the stream ended before [DONE]" in lines


def test_summary_says_what_cannot_be_known() -> None:
    """No headers, no cluster: HTTP alone."""
    lines = end(Answer(200, "", None, 0.05, 1.0, 20), story=PoolStory(trouble="no Ray cluster to connect to"))
    assert lines[0] == "1 requests: which of them were held is not known, the answers do not say; 0 failed"
    assert lines[1] == "promotions: not known, no Ray cluster to connect to"
    assert lines[2] == "time to first token: 0.05 s (median)"


def test_summary_of_a_failed_promotion_and_no_refill() -> None:
    """Why it failed, and that nobody waited or waited in vain."""
    failed = PROMOTION | {"error": "stage engine.wake took longer than its deadline of 60 s"}
    lines = end(HELD, story=PoolStory(promotions=[failed, PROMOTION], short=True))
    assert lines[1] == "slot aaaa could not be promoted: stage engine.wake took longer than its deadline of 60 s"
    assert lines[3].endswith("; pool not refilled yet")
    assert end(HELD, story=PoolStory(short=True, waited=False))[2].endswith("; refill not waited for")


def test_json_says_the_same() -> None:
    """The counts add up, the promotion's stages make up its seconds."""
    story = PoolStory(promotions=[PROMOTION], short=True, refilled_s=14.2)
    said = burst_view.plain("http://x", "m", [UNHELD, HELD, REFUSED, FAILED], story)
    assert (said["requests"], said["served"], said["refused"], said["failed"]) == (4, 2, 1, 1)
    assert (said["held"], said["held_max_s"], said["slots"]) == (2, 30.0, {"aaaa": 2, "bbbb": 1})
    assert said["first_token_s"] == {"unheld": 0.05, "held": 0.31, "all": 0.05}
    [promotion] = said["pool"]["promotions"]
    assert sum(promotion["stages_s"].values()) == pytest.approx(promotion["duration_s"])
    assert said["pool"]["refilled_s"] == 14.2
    assert json.loads(json.dumps(said)) == said


def test_live_view_shows_requests_beside_the_pool() -> None:
    """Both halves, and what stands there without a pool."""
    answers, seen = [UNHELD, Answer()], pool(slot("aaaa", "promoting", stage="engine.wake.weights"), held=3)
    said = shown(burst_view.live(answers, seen, 0.4), 100)
    for part in ("first token", "1/2", "held 3", "aaaa", "promoting", "engine.wake.weights"):
        assert part in said
    assert "the pool cannot be seen" in shown(burst_view.live(answers, None, 0.4), 100)
