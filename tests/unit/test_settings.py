"""docs/settings.md: every setting is there, under the name that a file gives it, and says what it means.

That the page is up to date is a test of all made files (test_metrics.py).
"""

from __future__ import annotations

import pytest

from serve_app.config import AppConfig, parse_app
from serve_app.live import LiveSettings, parse_live
from tools import settings

STATIC, LIVE = ({row[0]: row[1:] for row in settings.settings(model)} for model in (AppConfig, LiveSettings))


@pytest.mark.parametrize(
    ("rows", "name", "expected"),
    [
        (STATIC, "slot.max_ongoing_requests", ("whole number, from 1", "`10`")),
        (STATIC, "slot.gpus", ("number, from 0", "`0`")),
        (STATIC, "slot.nccl.nvls", ("on / off or null", "null")),
        (STATIC, "slot.merge_events.tokens", ("whole number, from 1, to 64", "`8`")),
        (STATIC, "models[].id", ("text", "must be set")),
        (STATIC, "models[].engine", ("`vllm` / `simulated`", "`vllm`")),
        (STATIC, "pool", ("on / off", "on")),
        (LIVE, "slots.standby", ("whole number, from 0 or `auto`", "`1`")),
        (LIVE, "slots.shrink_after_s", ("number or null, above 0", "null")),
        (LIVE, "models.ID.tier", ("`ready` / `host` / `disk`", "`host`")),
        (LIVE, "verify", ("`enforce` / `warn` / `off`", "`enforce`")),
    ],
)
def test_type_and_default_are_those_of_the_model(
    rows: dict[str, tuple[str, str, str]], name: str, expected: tuple[str, str]
) -> None:
    """One of each kind of type, with its bounds."""
    assert rows[name][:2] == expected


def test_every_setting_says_what_it_means() -> None:
    """Those that hold others too."""
    assert [name for name, row in (STATIC | LIVE).items() if not row[2]] == []


def test_names_are_those_of_a_file() -> None:
    """What the parsed halves hold, as dotted names."""
    given = leaves(parse_app({"models": [{"id": "m"}]}).model_dump())
    assert given <= set(STATIC) and len(given) > 25
    live = leaves(parse_live({"models": {"m": {}}}, parse_app({"models": [{"id": "m"}]})).model_dump())
    assert live <= set(LIVE) and len(live) > 20


def leaves(values: dict[str, object], prefix: str = "") -> set[str]:
    """Dotted names, as the page writes them: entries of a list are `[]`, of a mapping by id `ID`."""
    found = set[str]()
    for key, value in values.items():
        name = prefix + ("ID" if prefix == "models." else key)
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{name}.")
        elif isinstance(value, tuple) and value:
            found |= leaves(value[0], f"{name}[].")
        else:
            found.add(name)
    return found
