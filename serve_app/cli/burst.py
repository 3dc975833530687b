"""`burst`: many requests at once, and the story of what the pool makes of them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from serve_app.cli import burst_client, burst_pool, burst_view, cluster
from serve_app.cli.burst_client import Answer
from serve_app.cli.burst_pool import Watcher
from serve_app.cli.burst_view import PoolStory
from serve_app.cli.text import console
from serve_app.errors import NotRunning

# How long a cold start of a new standby is waited for.
REFILL_S = 120.0
REDRAWS_PER_S = 8
NOT_ITS_POOL = "the Ray cluster found here does not run the slots that answered; set RAY_ADDRESS"


class Story:
    """Tells what happens line by line, each with the seconds since the burst began."""

    def __init__(self, out: Console, *, silent: bool) -> None:
        self._out, self._silent = out, silent
        self.began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def begin(self) -> None:
        self.began_s = time.monotonic()

    def tell(self, what: str) -> None:
        if not self._silent:
            self._out.print(Text.assemble((f"{self.elapsed_s:7.2f} s  ", "dim"), what))

    def say(self, what: str, style: str = "") -> None:
        """A line without a time."""
        if not self._silent:
            self._out.print(Text(what, style=style))


def burst(
    requests: Annotated[int, typer.Option(min=1, help="How many, all at once.")] = 16,
    url: Annotated[str, typer.Option(help="Where the application answers.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model id; if left out, the one that is served.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request asks for.")] = 64,
    app: Annotated[str | None, typer.Option("--app", help="One application; all if left out.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the pool is refilled, at most two minutes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Plain JSON for scripts.")] = False,
) -> None:
    """Send many requests at once and tell what happens: held requests, a promoted standby, times.

    Exit status 1 if any request failed or was refused.
    \f
    `--json` prints one object; times in seconds:
      url, model, requests; served, refused (503), failed: counts that add up to requests
      held: how many were held, held_max_s: the longest; null where the proxies do not tell
      first_token_s: medians {unheld, held, all}, null where there was none
      slots: {slot: requests it answered}
      pool: {trouble: why the pool was not seen, or empty; refilled_s: since the burst began, or null; promotions: [
        {slot, tier, duration_s, reason, error, stages_s: {decide, wake, verify, publish, other}}]}
      answers: [{outcome, status, slot, held_s, first_token_s, total_s, chunks, error}]
    """
    url, out = url.rstrip("/"), console()
    story = Story(out, silent=as_json)
    served = burst_client.served_model(url)
    watcher, trouble = _watcher(app, story)
    model = model or served or (watcher.first.model if watcher else "")
    if not model:
        raise NotRunning("no slot is active, so nobody can say which model is served; name it with --model")
    story.say(f"{requests} chat completions of {max_tokens} tokens at once, to {model} at {url}", "bold")
    story.say(f"pool before: {burst_pool.summary(watcher.first)}" if watcher else f"the pool cannot be seen: {trouble}")
    answers = [Answer() for _ in range(requests)]
    story.begin()
    with nullcontext() if as_json else _live(out, answers, watcher, story):
        if watcher is not None:
            watcher.start(story.began_s)
        story.tell(f"{requests} requests sent")
        asyncio.run(burst_client.send_all(url, model, max_tokens, answers))
        story.tell(f"all {requests} requests have ended")
        pool = _pool_story(watcher, answers, story, wait=wait) if watcher else PoolStory(trouble)
    if as_json:
        typer.echo(json.dumps(burst_view.plain(url, model, answers, pool), indent=2))
    else:
        out.print(Text(), burst_view.ending(answers, pool), sep="\n")
    if any(answer.outcome != "served" for answer in answers):
        raise typer.Exit(1)


def _watcher(app: str | None, story: Story) -> tuple[Watcher | None, str]:
    """Who watches the pool; or nobody, and why."""
    try:
        cluster.connect()
        return Watcher(app, story.tell), ""
    except NotRunning as nothing:
        return None, str(nothing)


def _live(out: Console, answers: list[Answer], watcher: Watcher | None, story: Story) -> Live:
    """What is redrawn below the told lines while the burst runs, and vanishes at its end."""
    return Live(
        get_renderable=lambda: burst_view.live(answers, watcher.seen if watcher else None, story.elapsed_s),
        console=out,
        refresh_per_second=REDRAWS_PER_S,
        transient=True,
    )


def _pool_story(watcher: Watcher, answers: list[Answer], story: Story, *, wait: bool) -> PoolStory:
    """What the pool has done, once it is back where it was."""
    answered = {answer.slot for answer in answers} - {""}
    if answered and not answered & (watcher.first.slots.keys() | watcher.seen.slots.keys()):
        watcher.stop()
        return PoolStory(NOT_ITS_POOL)
    promotions = watcher.promotions()
    if wait:
        _wait(watcher, story)
    watcher.stop()
    return PoolStory("", promotions, watcher.short, watcher.refilled_s, wait)


def _wait(watcher: Watcher, story: Story) -> None:
    if watcher.short and watcher.refilled_s is None:
        story.tell("waiting until the pool is refilled (Ctrl-C ends that)")
    try:
        watcher.wait_refilled(REFILL_S)
    except KeyboardInterrupt:
        story.tell("not waited for any longer")
