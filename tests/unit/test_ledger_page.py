"""The ledger as a web page: what is drawn where, and that it needs nothing but itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app import cli
from serve_app.cli import ledger_page
from serve_app.errors import Refused
from serve_app.telemetry.stages import Stage

from . import transitions as made


class Page(HTMLParser):
    """Text and attributes of a page, as a browser reads them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def styles(self, kind: str) -> list[tuple[float, float]]:
        """Left and width of all bars of a class, in per cent."""
        found = [more["style"] or "" for _, more in self.tags if kind in (more.get("class") or "").split()]
        return [tuple(float(n) for n in re.findall(r"([\d.]+)%", style.replace("100%", ""))) for style in found]  # type: ignore[misc]


def page(*transitions: dict[str, Any]) -> Page:
    return Page(ledger_page.render(list(transitions), made.START_S + 100))


def test_page_has_one_bar_for_each_stage_and_rank() -> None:
    """At its time, with its length."""
    found = page(made.cold_start(ranks=4))
    bars = found.styles("bar")  # of both columns, which offer the same
    loads = [bar for bar in bars[: len(bars) // 2] if bar[0] == pytest.approx(100 * 7.6 / 17.5, abs=0.01)]
    assert [width for _, width in loads] == pytest.approx([100 * 2 * (1 + r / 16) / 17.5 for r in range(4)], abs=0.01)
    assert "ranks 0-3" in found.text and "2.00..2.38 s" in found.text


def test_page_says_attributes_and_throughput_of_each_rank() -> None:
    """What is shown on hover is there for every one of them."""
    said = page(made.cold_start(ranks=2)).text
    assert "rank 1" in said and "bytes 8.0 GB" in said and "4.0 GB/s" in said
    assert said.count("GB/s") == 4, "a rate of what was not moved"  # two ranks, in both columns
    assert "forkserver True" in said


def test_page_shows_a_cold_start_beside_a_promotion_and_offers_the_rest() -> None:
    """The newest good ones; failed ones can be chosen."""
    found = page(made.cold_start(), made.later(made.failed(), 50), made.promotion())
    chosen = [tag for tag, more in found.tags if tag == "option" and "selected" in more]
    shown = [more for tag, more in found.tags if "fall" in (more.get("class") or "") and "hidden" not in more]
    assert len(chosen) == 2 and [more["data-fall"] for more in shown] == ["1", "2"]
    assert "35 times faster" in found.text


def test_page_shows_text_of_errors_as_text() -> None:
    """An error's angle brackets are no tags."""
    html = ledger_page.render([made.failed()], made.START_S)
    assert "EngineError: &lt;model&gt; &amp; co: no such file" in html
    assert "EngineError: <model> & co" in Page(html).text


def test_page_keeps_stages_inside_the_whole() -> None:
    """A rank whose clock is wrong, and a transition without any duration, break nothing."""
    wrong = made.transition(Stage.PROMOTION, "a", 1.0, made.record(Stage.WAKE_WEIGHTS, -0.5, 9.0, 0))
    for one in (wrong, made.transition(Stage.DEMOTION, "b", 0.0, made.record(Stage.SLEEP, 0.0, 0.0))):
        for left, width in page(one).styles("bar"):
            assert 0 <= left <= 100 and left + width <= 100


def test_page_needs_nothing_but_itself() -> None:
    """It can be mailed."""
    html = ledger_page.render([made.cold_start(), made.promotion()], made.START_S)
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", html)


@pytest.mark.parametrize(
    ("total_s", "step_s"), [(17.5, 5), (0.5, 0.1), (10, 2), (1, 0.2), (0.023, 0.005), (100, 20), (412, 100)]
)
def test_axis_steps_are_round(total_s: float, step_s: float) -> None:
    """Five marks or a few less."""
    assert ledger_page._step(total_s) == step_s


def test_every_stage_has_a_colour_that_the_page_explains() -> None:
    """Beside those that are waiting and deciding, which share one."""
    assert set(ledger_page.COLOR_OF.values()) < set(ledger_page.COLORS)
    plain = {stage for stage in Stage if stage not in ledger_page.COLOR_OF}
    assert plain == {
        Stage.COLD_START,
        Stage.PROMOTION,
        Stage.DEMOTION,
        Stage.SCHEDULE,
        Stage.FENCE,
        Stage.DECIDE,
        Stage.PUBLISH,
        Stage.DRAIN,
    }


def test_command_writes_the_page_from_a_saved_ledger(tmp_path: Path) -> None:
    """No cluster is needed for that; nothing recorded is a reason to stop."""
    saved, out = made.save(tmp_path / "ledger.json", made.cold_start(), made.promotion()), tmp_path / "out.html"
    done = CliRunner().invoke(cli.app, ["ledger", "--from", str(saved), "--html", str(out)])
    assert done.exit_code == 0, done.output
    assert "2 transitions of ledger.json" in Page(out.read_text()).text
    nothing = made.save(tmp_path / "empty.json")
    done = CliRunner().invoke(cli.app, ["ledger", "--from", str(nothing), "--html", str(out)])
    assert isinstance(done.exception, Refused)
