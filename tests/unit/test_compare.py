"""`serve-app compare`: what is read, which rows there are, who is judged, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from serve_app import cli
from serve_app.cli import measurements
from serve_app.errors import Refused, UnusableFile

from . import transitions as made

COUNT = 12
MODELS = {"chat": 1.0, "code": 2.0}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


def rows(*arguments: object) -> dict[tuple[str, float | None], dict[str, Any]]:
    """The rows of `--json` by what they are of, and which percentile."""
    done = run(*arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    return {(" / ".join(row["key"]), row.get("percentile")): row for row in json.loads(done.output)["rows"]}


def ledger(path: Path, slower: float = 1.0, count: int = COUNT, seed: int = 0, **promotions: Any) -> Path:
    """Cold starts whose weights take so many times as long, give or take 3 %, and promotions."""
    factors = np.random.default_rng(seed).normal(1, 0.03, count)
    return made.save(
        path,
        *(made.cold_start(f"s{n}", slower=slower * factor) for n, factor in enumerate(factors)),
        *(made.promotion(f"s{n}", slower=factor) | promotions for n, factor in enumerate(factors)),
    )


def replay(path: Path, slower: float = 1.0, failed: int = 0, seed: int = 0, seconds: float = 200) -> Path:
    """Two requests a second; every tenth is held. The last ones fail."""
    generator = np.random.default_rng(seed)
    lines = []
    for index in range(int(2 * seconds)):
        held_s = 0.3 if index % 10 == 0 else 0.0
        first_s = slower * (0.1 * generator.lognormal(0, 0.2) + held_s)
        lines.append(
            {
                "index": index,
                "arrival_s": index / 2,
                "prompt_tokens": 100,
                "output_tokens": 11,
                "served_output_tokens": 11,
                "outcome": "failed" if index >= 2 * seconds - failed else "served",
                "path": "held" if held_s else "active",
                "held_s": held_s,
                "first_token_s": first_s,
                "total_s": first_s + 0.2,
                "chunk_s": [first_s, first_s + 0.2],
            }
        )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_ledgers_are_compared_stage_by_stage(tmp_path: Path) -> None:
    """Only what really takes longer is slower: the weights, and what they are part of."""
    found = rows(ledger(tmp_path / "a.json"), ledger(tmp_path / "b.json", slower=1.5, seed=1))
    verdicts = {what: row["verdict"] for (what, _), row in found.items()}
    assert [what for what, verdict in verdicts.items() if verdict == "slower"] == [
        "cold_start",
        "cold_start / engine.core",
        "cold_start / engine.core / weights.load (slowest rank)",
    ]
    assert set(verdicts.values()) == {"slower", "no difference shown"}
    whole = found["cold_start", 50]
    assert whole["judged"] and whole["a"] == pytest.approx(17.5, rel=0.02)
    assert whole["low"] < 1.5 < whole["high"]  # half of 2 s, of which core waits one and a half times as long
    assert [row["judged"] for (what, _), row in found.items() if what == "cold_start / engine.core"] == [False]


def test_replays_are_compared_by_percentile(tmp_path: Path) -> None:
    """All requests, then by path; a tenth more is found, also at the 95th percentile."""
    found = rows(replay(tmp_path / "a.jsonl"), replay(tmp_path / "b.jsonl", slower=1.2, seed=1))
    assert found["first token", 50]["verdict"] == found["first token", 95]["verdict"] == "slower"
    assert found["first token / held", 50]["n_a"] == 40
    assert found["first token / held", 99]["verdict"].startswith("too few to tell: ")
    assert found["per token", 50]["verdict"] == "no difference shown"
    assert found["per token", 50]["a"] == pytest.approx(0.02)
    assert found["failed", None]["verdict"] == "no difference shown"


def test_same_file_does_not_differ(tmp_path: Path) -> None:
    """And passes any threshold."""
    for file in (ledger(tmp_path / "a.json"), replay(tmp_path / "a.jsonl")):
        done = run(file, file, "--fail-over", 0)
        assert done.exit_code == 0, done.output
        assert "slower by more than 0 %" in done.output


@pytest.mark.parametrize(("over", "status"), [(5, 1), (30, 0)])
def test_exit_status_says_whether_it_is_too_much(tmp_path: Path, over: float, status: int) -> None:
    """Half as long again for the weights is 9 % of the whole cold start."""
    done = run(ledger(tmp_path / "a.json"), ledger(tmp_path / "b.json", slower=1.5, seed=1), "--fail-over", over)
    assert done.exit_code == status
    assert ("too much: cold_start" in done.output) is bool(status)


def test_stage_alone_does_not_fail(tmp_path: Path) -> None:
    """Weights that take 3 % longer are a row, but a rollout is judged by the whole."""
    done = run(ledger(tmp_path / "a.json"), ledger(tmp_path / "b.json", slower=1.25, seed=1), "--fail-over", 10)
    assert done.exit_code == 0
    [load] = [line for line in done.output.splitlines() if "weights.load" in line]
    assert load.rstrip().endswith("slower")


def test_first_failure_fails_whatever_the_speed(tmp_path: Path) -> None:
    """A new version that answers faster, but not always, has not passed; nor has it if it is one request of 400."""
    done = run(replay(tmp_path / "a.jsonl"), replay(tmp_path / "b.jsonl", slower=0.5, failed=1), "--fail-over", 50)
    assert done.exit_code == 1
    assert "too much: failed" in done.output
    assert "faster" in done.output


def test_too_few_to_judge_do_not_pass_silently(tmp_path: Path) -> None:
    """With a threshold that is an error; without one a table that says how many it takes."""
    few = ledger(tmp_path / "a.json", count=3)
    assert "too few to tell: 6 needed" in run(few, few).output
    done = run(few, few, "--fail-over", 5)
    assert isinstance(done.exception, Refused)


def test_failed_transitions_count_as_failed_not_as_fast(tmp_path: Path) -> None:
    """Ten promotions, all given up after a while, are no sample of times."""
    found = rows(ledger(tmp_path / "a.json"), ledger(tmp_path / "b.json", error="the slot died"))
    assert found["promotion / failed", None]["b"] == 1.0
    assert found["promotion", None]["verdict"] == "only in A"


def test_models_of_one_pool_are_kept_apart(tmp_path: Path) -> None:
    """Two models' promotions are two things; the only one of a pool has no name to differ by."""
    two = [made.promotion(f"s{n}", slower=factor) | {"model": m} for n in range(12) for m, factor in MODELS.items()]
    both = made.save(tmp_path / "two.json", *two)
    found = rows(both, both)
    assert found["promotion chat", 50]["a"] < found["promotion code", 50]["a"]
    one = ledger(tmp_path / "a.json"), ledger(tmp_path / "b.json", model="chat-2")
    assert rows(*one)["promotion", 50]["verdict"] == "no difference shown"


def test_different_traces_are_told(tmp_path: Path) -> None:
    """Their differences may not be the server's."""
    done = run(replay(tmp_path / "a.jsonl"), replay(tmp_path / "b.jsonl", seconds=180))
    assert "sent different requests" in done.output
    assert "sent different requests" not in run(tmp_path / "a.jsonl", tmp_path / "a.jsonl").output


def test_interrupted_requests_do_not_count(tmp_path: Path) -> None:
    """What Ctrl-C cut off neither failed nor was served."""
    file = replay(tmp_path / "a.jsonl", failed=1)
    cut = file.read_text().replace('"failed"', '"cut"')
    (tmp_path / "b.jsonl").write_text(cut)
    found = measurements.read(tmp_path / "b.jsonl", 10)
    failed = next(one for one in found.measured if one.key == ("failed",))
    assert failed.sample is not None and set(failed.sample.values) == {0.0} and len(failed.sample.values) == 399


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("{}", "line 1: neither what `serve-app ledger --json` writes nor rows of `serve-app replay`: no arrival_s"),
        ("[1]\nx", "line 1: neither"),
        ('{"transitions": [{}]}', "a transition without"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    """Which file, which line, what is missing."""
    bad, good = tmp_path / "bad.json", ledger(tmp_path / "a.json")
    bad.write_text(text)
    done = run(good, bad)
    assert isinstance(done.exception, UnusableFile)
    assert str(done.exception).startswith(str(bad)) and said in str(done.exception)


def test_ledger_and_replay_have_nothing_to_compare(tmp_path: Path) -> None:
    """Nor can a file be read that is not there."""
    done = run(ledger(tmp_path / "a.json"), replay(tmp_path / "b.jsonl"))
    assert isinstance(done.exception, UnusableFile) and "A is a ledger and B a replay" in str(done.exception)
    done = run(tmp_path / "nothing", tmp_path / "nothing")
    assert isinstance(done.exception, UnusableFile) and "No such file" in str(done.exception)


def test_table_shows_counts_interval_and_verdict(tmp_path: Path) -> None:
    """Stages are indented below what they are part of."""
    done = run(ledger(tmp_path / "a.json"), ledger(tmp_path / "b.json", slower=1.5, seed=1, reason="x"))
    [core] = [line for line in done.output.splitlines() if line.startswith("  engine.core ")]
    assert core.split()[:6] == ["engine.core", "p50", "9.00", "s", "10.5", "s"]
    assert core.rstrip().endswith("slower") and " 12 " in core and " .. " in core


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """What a narrow terminal leaves out are whole columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    said = run(replay(tmp_path / "a.jsonl"), replay(tmp_path / "b.jsonl", slower=1.2, seed=1)).output.splitlines()
    [first] = [line for line in said if line.startswith("first token")]
    assert "…" not in "".join(said)
    assert first.rstrip().endswith("slower")
    assert (" .. " in first) is (width == 120)
