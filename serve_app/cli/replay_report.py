"""The page about a replay: one HTML file that needs no network and no knowledge of how it was made. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from serve_app.cli import pages, replay_plots, replay_rows
from serve_app.cli.replay_pool import Event
from serve_app.cli.replay_rows import Row
from serve_app.cli.replay_view import LATE_S, Replay
from serve_app.cli.text import counted, seconds
from serve_app.percentile import percentile
from serve_app.telemetry.stages import Stage

MAX_EVENTS = 40


def page(told: Replay) -> str:
    """The whole page."""
    return pages.render("replay_report.html", _values(told))


def _values(told: Replay) -> dict[str, Any]:
    end_s, pool = _end_s(told), told.pool
    promotions = [event for event in pool.events if event.kind == Stage.PROMOTION]
    cold_starts = [event for event in pool.events if event.kind == Stage.COLD_START]
    seen = not pool.trouble and bool(pool.levels)
    return {
        "told": told,
        "paths": {row.path for row in told.rows if row.first_token_s is not None},
        "counts": replay_rows.outcomes(told.rows),
        "lines": replay_rows.lines(told.rows),
        "tokens": _tokens(told.rows),
        "story": story(told, promotions, cold_starts),
        "late": told.late_s > LATE_S,
        "end_s": end_s,
        "bin_s": replay_plots.bin_s(end_s),
        "arrivals": replay_plots.arrivals(told.rows, end_s),
        "requests": replay_plots.requests(told.rows, end_s),
        "slots": replay_plots.slots(pool, end_s) if seen else "",
        "first_tokens": replay_plots.first_tokens(told.rows, pool, end_s),
        "slot_seconds": pool.slot_seconds(),
        "events": [*promotions, *cold_starts][:MAX_EVENTS],
        "left_out": max(0, len(pool.events) - MAX_EVENTS),
    }


def _end_s(told: Replay) -> float:
    """When the last request had ended: how far the plots go."""
    ends = (row.arrival_s + row.late_s + (row.total_s or 0.0) for row in told.rows)
    return max(1.0, told.pool.seen_s[1], *ends)


def _tokens(rows: Sequence[Row]) -> dict[str, float | None]:
    """Medians of what the server counted, and of the time per output token."""
    prompt = [row.served_prompt_tokens for row in rows if row.served_prompt_tokens]
    output = [row.served_output_tokens for row in rows if row.served_output_tokens]
    paces = [row.token_s for row in rows if row.token_s is not None]
    return {
        "prompt": median(prompt) if prompt else None,
        "output": median(output) if output else None,
        "pace_s": median(paces) if paces else None,
    }


def story(told: Replay, promotions: Sequence[Event], cold_starts: Sequence[Event]) -> list[str]:
    """What happened, in sentences for somebody who was not there."""
    counts, ways = replay_rows.outcomes(told.rows), Counter(row.path for row in told.rows)
    bad = [
        f"{counted(count, 'request')} {MEANING[name]}" for name, count in counts.items() if name in MEANING and count
    ]
    sentences = [f"{counts['served']} of {counted(len(told.rows), 'request')} were served in full."]
    sentences.append(f"{'; '.join(bad)}." if bad else "None failed and none was refused.")
    if ways.keys() != {""}:
        cold = f"; {ways['cold']} waited for a slot that was only being started" if ways["cold"] else ""
        sentences.append(f"{ways['active']} went to a slot at once; {ways['held']} waited until a slot had room{cold}.")
    first_s = replay_rows.first_tokens(told.rows)
    if first_s:
        half, most = percentile(first_s, 50) or 0.0, percentile(first_s, 99) or 0.0
        sentences.append(f"Half of them had their first token within {seconds(half)}, 99 % within {seconds(most)}.")
    return [*sentences, *_pool(told, promotions, cold_starts)]


MEANING = {
    "refused": "refused with status 503",
    "failed": "failed",
    "cut": "cut off when the replay was interrupted",
}


def _pool(told: Replay, promotions: Sequence[Event], cold_starts: Sequence[Event]) -> list[str]:
    if told.pool.trouble:
        return [f"The pool itself was not seen: {told.pool.trouble}."]
    woken = [event.duration_s for event in promotions if not event.error]
    sentences = ["No standby had to be woken."]
    if promotions:
        took = f"; from need to active it took {seconds(median(woken))} (median)" if woken else ""
        sentences = [f"The pool woke a standby {counted(len(promotions), 'time')}{took}."]
    if cold_starts:
        took = seconds(median(event.duration_s for event in cold_starts))
        sentences.append(f"In the background {counted(len(cold_starts), 'new slot')} started, in {took} (median).")
    return sentences
