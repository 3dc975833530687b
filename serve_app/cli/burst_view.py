"""A burst as it runs and as it ends, for a terminal and as JSON. Pure: values in, something rich can print out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from serve_app.cli.burst_client import Answer
from serve_app.cli.burst_pool import Seen
from serve_app.cli.status_view import COLORS
from serve_app.cli.text import seconds
from serve_app.pool.lifecycle import State
from serve_app.telemetry import ledger
from serve_app.telemetry.stages import Stage

BAR_WIDTH = 24
# What no stage explains is left out of a promotion's line below this share of it.
WORTH_TELLING = 0.1
# More promotions than this are counted instead of told.
MAX_TOLD = 4
SHORT = {
    Stage.DECIDE: "decide",
    Stage.WAKE_WEIGHTS: "wake",
    Stage.WAKE_KV: "wake",
    Stage.VERIFY: "verify",
    Stage.PUBLISH: "publish",
}


@dataclass(frozen=True)
class PoolStory:
    """What the pool did, or why that cannot be said.

    Attributes:
        promotions: the ledger's entries. refilled_s: seconds from the burst's beginning until there were as many
            standbys as before; None if that has not happened, or never ceased to be so (`short`).
    """

    trouble: str = ""
    promotions: Sequence[dict[str, Any]] = ()
    short: bool = False
    refilled_s: float | None = None
    waited: bool = True


def live(answers: Sequence[Answer], seen: Seen | None, elapsed_s: float) -> RenderableType:
    """Beside each other: how far the requests are, and what the slots do."""
    page = Table.grid(padding=(0, 4))
    page.add_row(_progress(answers, elapsed_s), _slots(seen) if seen else Text("the pool cannot be seen", style="dim"))
    return Group(Text(), page)


def _progress(answers: Sequence[Answer], elapsed_s: float) -> RenderableType:
    counts = {
        "accepted by a slot": sum(1 for answer in answers if answer.status == 200),
        "first token": sum(1 for answer in answers if answer.first_token_s is not None),
        "done": sum(1 for answer in answers if answer.total_s is not None),
    }
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("requests", style="bold"), "", Text(f"{elapsed_s:.1f} s", style="dim"))
    for name, count in counts.items():
        table.add_row(name, ProgressBar(len(answers), count, BAR_WIDTH), f"{count}/{len(answers)}")
    return table


def _slots(seen: Seen) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    held = Text(f"held {seen.held}", style="bold yellow" if seen.held else "dim")
    table.add_row(Text("pool", style="bold"), held)
    order = list(COLORS)
    for name, slot in sorted(seen.slots.items(), key=lambda item: (order.index(item[1]["state"]), item[0])):
        state = State(slot["state"])
        doing = slot["stage"] if "." in slot["stage"] else f"{slot['in_flight']}/{slot['hard']} requests"
        table.add_row(name, Text(str(state), style=COLORS[state]), Text(doing, style="dim"))
    return table


def ending(answers: Sequence[Answer], pool: PoolStory) -> RenderableType:
    """The summary: requests, promotions, times; below it each different error once."""
    lines = [_requests(answers), *_promotions(pool), _times(answers, pool)]
    errors = Counter(answer.error for answer in answers if answer.error)
    lines += [Text(f"  {count} x {error}", style="red") for error, count in errors.most_common(MAX_TOLD)]
    return Group(*lines)


def _requests(answers: Sequence[Answer]) -> Text:
    outcomes = Counter(answer.outcome for answer in answers)
    held = held_seconds(answers)
    line = Text(f"{len(answers)} requests: ", style="bold")
    if held is None:
        line.append("which of them were held is not known, the answers do not say")
    elif held:
        line.append(f"{len(answers) - len(held)} at once, {len(held)} held up to {max(held):.2f} s")
    else:
        line.append("all at once, none held")
    if outcomes["refused"]:
        line.append(f"; {outcomes['refused']} refused (503)", style="yellow")
    return line.append(f"; {outcomes['failed']} failed", style="bold red" if outcomes["failed"] else "green")


def held_seconds(answers: Sequence[Answer]) -> list[float] | None:
    """How long each held request was held, in seconds; None if no answer says anything about it."""
    said = [answer.held_s for answer in answers if answer.held_s is not None]
    return [value for value in said if value > 0] if said else None


def _promotions(pool: PoolStory) -> list[Text]:
    if pool.trouble:
        return [Text(f"promotions: not known, {pool.trouble}", style="yellow")]
    if not pool.promotions:
        return [Text("no slot was promoted: the active ones took it all")]
    lines = [_promotion(entry) for entry in pool.promotions[:MAX_TOLD]]
    more = len(pool.promotions) - len(lines)
    return [*lines, Text(f"and {more} more slots promoted")] if more else lines


def _promotion(entry: dict[str, Any]) -> Text:
    line = Text.assemble("slot ", (entry["slot"], "bold"))
    if entry["error"]:
        return line.append(f" could not be promoted: {entry['error']}", style="red")
    line.append(f" promoted from {tier(entry)} in ").append(f"{entry['duration_s']:.2f} s", style="bold green")
    told = {
        name: value
        for name, value in shares_s(entry).items()
        if name != ledger.OTHER or value > WORTH_TELLING * entry["duration_s"]
    }
    shares = ", ".join(f"{name} {value:.2f}" for name, value in told.items())
    return line.append(f" ({shares})" if shares else "").append(f': "{entry["reason"]}"', style="dim")


def tier(entry: dict[str, Any]) -> str:
    """How warm the standby was: only the stages that woke it say so."""
    said = [record.get("attributes", {}).get("tier", "") for record in entry["stages"]]
    return next((str(value) for value in said if value), "ready")


def shares_s(entry: dict[str, Any]) -> dict[str, float]:
    """Seconds of a promotion by short names; together they are the whole."""
    sums: dict[str, float] = {}
    for part in ledger.parts(entry):
        if part.depth == 0 and not part.ranks:
            name = SHORT.get(Stage(part.name), part.name) if part.name != ledger.OTHER else part.name
            sums[name] = sums.get(name, 0.0) + part.high_s
    return sums


def first_tokens(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Seconds to the first token of the requests that were not held, and of those that were."""
    timed = [(answer.held_s, answer.first_token_s) for answer in answers if answer.first_token_s is not None]
    return [first for held, first in timed if not held], [first for held, first in timed if held]


def _times(answers: Sequence[Answer], pool: PoolStory) -> Text:
    unheld, held = first_tokens(answers)
    said = [f"{median(times):.2f} s {name}" for times, name in ((unheld, "unheld"), (held, "held")) if times]
    if held_seconds(answers) is None and unheld:
        said = [f"{median(unheld):.2f} s"]
    line = Text("time to first token: ").append(", ".join(said) or "there was none", style="bold")
    line.append(" (medians)" if len(said) > 1 else " (median)" if said else "")
    if pool.short:
        line.append(f"; {_refill(pool)}")
    return line


def _refill(pool: PoolStory) -> str:
    if pool.refilled_s is not None:
        return f"pool refilled after {seconds(pool.refilled_s)}"
    return "pool not refilled yet" if pool.waited else "refill not waited for"


def plain(url: str, model: str, answers: Sequence[Answer], pool: PoolStory) -> dict[str, Any]:
    """What `--json` prints; see `burst.burst`."""
    outcomes = Counter(answer.outcome for answer in answers)
    held, (unheld_s, held_s) = held_seconds(answers), first_tokens(answers)
    promotions = [
        {
            "slot": entry["slot"],
            "tier": tier(entry),
            "duration_s": entry["duration_s"],
            "reason": entry["reason"],
            "error": entry["error"],
            "stages_s": shares_s(entry),
        }
        for entry in pool.promotions
    ]
    return {
        "url": url,
        "model": model,
        "requests": len(answers),
        **{outcome: outcomes[outcome] for outcome in ("served", "refused", "failed")},
        "held": None if held is None else len(held),
        "held_max_s": max(held, default=0.0) if held is not None else None,
        "first_token_s": {
            name: median(times) if times else None
            for name, times in (("unheld", unheld_s), ("held", held_s), ("all", unheld_s + held_s))
        },
        "slots": dict(Counter(answer.slot for answer in answers if answer.slot)),
        "pool": {"trouble": pool.trouble, "promotions": promotions, "refilled_s": pool.refilled_s},
        "answers": [asdict(answer) | {"outcome": answer.outcome} for answer in answers],
    }
