"""`calibrate`: how many prompt tokens a second one slot computes, which predicting times to first token needs."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import httpx
import typer
from rich.table import Table

from serve_app.cli import burst_client
from serve_app.cli.text import console, seconds
from serve_app.errors import NotRunning

# As many times each length is asked for; medians count.
REPEAT = 5
SHORTEST = 256
# Token ids that every vocabulary has, above the special ones.
_IDS = range(100, 1000)


def calibrate(
    url: Annotated[str, typer.Option(help="Where the application is, without a path.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model id; if left out, the one that is served.")] = "",
    longest: Annotated[int, typer.Option(min=2 * SHORTEST, help="Tokens of the longest prompt.")] = 4096,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: tokens_per_s, first_token_s by prompt length.")
    ] = False,
) -> None:
    """Measure the prefill rate of a slot that is otherwise idle, for `promote_when.prefill_tokens_per_s`.

    Sends prompts of several lengths, one at a time, and asks for one token each.
    """
    url = url.rstrip("/")
    model = model or burst_client.served_model(url)
    if not model:
        raise NotRunning("no slot is active, so nobody can say which model is served; name it with --model")
    lengths = [SHORTEST << power for power in range((longest // SHORTEST).bit_length()) if SHORTEST << power <= longest]
    measured = {length: statistics.median(_ask(url, model, length) for _ in range(REPEAT)) for length in lengths}
    rate = prefill_rate(measured)
    if as_json:
        typer.echo(json.dumps({"tokens_per_s": rate, "first_token_s": measured}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in ("prompt tokens", "first token"):
        table.add_column(column, justify="right")
    for length, duration_s in measured.items():
        table.add_row(str(length), seconds(duration_s))
    out = console()
    out.print(table)
    out.print(f"promote_when: {{predicted_ttft_s: 0.5, prefill_tokens_per_s: {rate:.0f}}}", style="bold")


def prefill_rate(measured: Mapping[int, float]) -> float:
    """Tokens a second: one over the slope of the line of least squares through seconds by prompt length. Pure.

    What every request costs beside its prompt is the line's height at 0, and does not count.

    Raises:
        NotRunning: longer prompts did not take longer, so that there is nothing to predict from.
    """
    slope = statistics.linear_regression(list(measured), list(measured.values())).slope
    if slope <= 0:
        raise NotRunning("longer prompts did not take longer: is the slot busy, or --longest too small?")
    return 1 / slope


def _ask(url: str, model: str, length: int) -> float:
    """Seconds until the only token of a prompt that nobody has computed before."""
    body = {"model": model, "prompt": _prompt(length), "max_tokens": 1, "temperature": 0}
    begin = time.perf_counter()
    headers = burst_client.key()
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=burst_client.SILENT_S)
    if answer.status_code != 200:
        raise NotRunning(f"{url} answered {answer.status_code} to a prompt of {length} tokens: {answer.text[:300]}")
    return time.perf_counter() - begin


def _prompt(length: int) -> Sequence[int]:
    """Random, so that no part of it is in a prefix cache."""
    return random.choices(_IDS, k=length)
