"""The command line as far as it needs no cluster: files, and how status and ledger look."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from serve_app import __version__, cli
from serve_app.cli import cluster, ledger_view, status_view, watching
from serve_app.cli.text import age, gigabytes, seconds
from serve_app.telemetry.stages import Stage

GOOD = """
applications:
- name: default
  import_path: serve_app:app
  args: {models: [{id: m, engine: simulated}]}
"""
NOW_S = 1000.0


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def shown(page: RenderableType, width: int) -> str:
    """What a terminal of this width shows, without colours."""
    out = Console(file=io.StringIO(), width=width, highlight=False)
    out.print(page)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def slot(name: str, state: str, **changes: Any) -> dict[str, Any]:
    """One slot of a coordinator's status."""
    usual = {
        "slot": name,
        "state": state,
        "since_s": NOW_S - 65,
        "model": "m",
        "tier": "host",
        "hard": 4,
        "in_flight": 3,
        "flex_in_flight": 0,
        "at_gate": 0,
        "stage": "",
        "error": "",
        "fenced": "",
        "pid": 4711,
        "node": "0123456789abcdef",
        "ranks": ("0123456789abcdef",),
        "host_bytes": 1_500_000_000,
        "device_bytes": (),
        "wake_s": 0.0,
        "engines": [],
        "pending": "",
        "leaving": False,
        "heard_s": 0.1,
    }
    return usual | changes


def model(name: str, **changes: Any) -> dict[str, Any]:
    """One model of a coordinator's status."""
    usual = {"names": [name], "active": 0, "coming": 0, "standby": 1, "held": 0, "standby_gpu_s": 0.0}
    return usual | changes


def engine(name: str, tier: str | None, **changes: Any) -> dict[str, Any]:
    """One engine of a slot's status."""
    return {
        "model": name,
        "tier": tier,
        "host_bytes": 0,
        "device_bytes": (),
        "wake_s": 0.0,
        "error": "",
        "lent": False,
    } | changes


def status(*slots: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """One coordinator's status."""
    usual = {
        "version": 7,
        "blind": False,
        "frozen": False,
        "breaker_open": False,
        "fits_another": True,
        "shortage": None,
        "held": 0,
        "routers": 2,
        "models": {"m": model("m")},
        "slots": list(slots),
        "ledger": [PROMOTION],
    }
    return usual | changes


def record(stage: Stage, start_s: float, duration_s: float) -> dict[str, Any]:
    return {"stage": stage, "start_s": start_s, "duration_s": duration_s, "error": ""}


PROMOTION: dict[str, Any] = {
    "slot": "aaaa",
    "model": "m",
    "kind": "promotion",
    "start_s": 900.0,
    "duration_s": 0.5,
    "reason": "6 requests held",
    "error": "",
    "stages": [
        record(Stage.PROMOTION, 900.0, 0.5),
        record(Stage.WAKE_WEIGHTS, 900.0, 0.3),
        record(Stage.VERIFY, 900.3, 0.1),
    ],
}
COLD: dict[str, Any] = {
    "slot": "bbbb",
    "model": "",
    "kind": "cold_start",
    "start_s": 800.0,
    "duration_s": 10.0,
    "reason": "",
    "error": "",
    "stages": [
        record(Stage.COLD_START, 800.0, 10.0),
        record(Stage.ENGINE_CORE, 800.0, 8.0),
        record(Stage.WEIGHTS_LOAD, 801.0, 2.0),
        record(Stage.WARM_UP, 808.0, 2.0),
    ],
}


def test_help_imports_neither_ray_nor_torch_nor_vllm() -> None:
    """`serve-app --help` answers at once, with every command in it."""
    code = (
        "import sys; from serve_app.cli import app; from typer.testing import CliRunner;"
        "print(CliRunner().invoke(app, ['--help']).output);"
        "print('heavy:', sorted({'ray', 'torch', 'vllm'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "heavy: []" in said
    for command in (
        "check",
        "diff",
        "doctor",
        "status",
        "ledger",
        "trace",
        "compare",
        "burst",
        "promote",
        "drain",
        "freeze",
        "unfreeze",
    ):
        assert command in said


def test_version() -> None:
    """The version is the package's."""
    assert invoke("--version") == (0, f"serve-app {__version__}\n")


def test_check_of_good_file_ends_with_a_summary(tmp_path: Path) -> None:
    """A good file says what it would start."""
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    code, said = invoke("check", str(file))
    assert code == 0
    for part in ("good", "m, engine simulated", "0 GPUs", "2 to 3, 1 standby", "set here: nothing"):
        assert part in said


def test_check_of_bad_file_lists_each_problem_on_one_line(tmp_path: Path) -> None:
    """Unknown outer keys, wrong values, our own keys and the engine's are all found in one run; exit status 1."""
    file = tmp_path / "bad.yaml"
    file.write_text(
        "proxy_locations: X\nhttp_options: {port: x}\n"
        + GOOD.replace("engine: simulated", "engine: simulated, engine_kwargs: {start: 1}")
        + "  route_prefx: /\n  deployments: [{name: Slot, num_replicas: 2}]\n"
    )
    code, said = invoke("check", str(file))
    assert code == 1
    lines = [line.removeprefix(f"{file}: ") for line in said.splitlines()]
    assert [line.split(":")[0] for line in lines] == [
        "proxy_locations",
        "applications.default.route_prefx",
        "http_options.port",
        "applications.default.deployments.Slot.num_replicas",
        "applications.default.args.models.m.engine_kwargs.start",
    ]
    assert "unknown key; allowed: applications, controller_options" in lines[0]


def test_check_names_the_line_of_a_yaml_mistake(tmp_path: Path) -> None:
    """What is not YAML has a line instead of a key."""
    file = tmp_path / "bad.yaml"
    file.write_text("applications: [\n")
    assert invoke("check", str(file))[0] == 1
    assert f"{file}: line 2, column 1: " in invoke("check", str(file))[1]


def test_diff_says_what_is_live_and_what_is_not(tmp_path: Path) -> None:
    """Each group stands under what it costs; exit status 0."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(GOOD)
    new.write_text(GOOD.replace("id: m", "id: n") + "  deployments: [{name: Pool, user_config: {slots: {min: 3}}}]\n")
    code, said = invoke("diff", str(old), str(new))
    assert code == 0
    live, rolls = said.index("live"), said.index("rolls slots")
    assert live < said.index("Pool.user_config.slots.min  (not set) -> 3") < rolls < said.index("args.models")
    assert invoke("diff", str(old), str(old)) == (0, "no difference\n")


def test_error_of_ours_ends_with_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens at RAY_ADDRESS: one line, exit status 1, no traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setattr(sys, "argv", ["serve-app", "status"])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(f"serve-app: no Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}")


@pytest.mark.parametrize("width", [80, 120])
def test_status_fits_the_terminal(width: int) -> None:
    """No line is folded; what a narrow terminal leaves out are whole columns."""
    page = status_view.render(
        "default", status(slot("bbbb", "starting", stage="weights.load"), slot("aaaa", "active")), NOW_S, width
    )
    lines = [line.rstrip() for line in shown(page, width).splitlines()]
    rows = [line.split() for line in lines if line.startswith(("aaaa", "bbbb"))]
    assert rows[0][:4] == ["aaaa", "active", "host", "m"] if width == 120 else ["aaaa", "active", "host", "3/4"]
    assert rows[1][:3] == ["bbbb", "starting", "weights.load"]
    assert ("4711" in rows[0]) is (width == 120)
    assert ("promotion 0.500 s 6 requests held" if width == 120 else "promotion 0.500 s 6 requ…") in " ".join(rows[0])
    assert "default  1 active  0 standby  1 starting  0 failed" in lines[0]


def test_status_slot_over_nodes_says_over_how_many() -> None:
    """Its node column counts nodes; which rank is where is for `--json`."""
    over_two = slot("bbbb", "standby", ranks=("0123456789abcdef",) * 2 + ("fedcba9876543210",) * 2)
    said = shown(status_view.render("default", status(slot("aaaa", "active"), over_two), NOW_S, 120), 120)
    assert [line.rstrip().split("  ")[-1] for line in said.splitlines()[2:4]] == ["01234567", "2 nodes"]


def test_status_says_which_standby_is_busy() -> None:
    """With requests that may wait, beside the places that it has for others."""
    busy = slot("aaaa", "standby", tier="ready", in_flight=0, flex_in_flight=2)
    assert "0/4 +2 flex" in shown(status_view.render("default", status(busy), NOW_S, 120), 120)


def test_status_says_who_holds_the_gpus_of_a_fenced_slot() -> None:
    """In its row that it is fenced, below the table by whom."""
    fenced = slot("aaaa", "starting", fenced="GPU in use by others: GPU-1 40.0 GB by pid 4711")
    said = shown(status_view.render("default", status(fenced), NOW_S, 120), 120)
    assert "starting fenced" in said and "aaaa: GPU in use by others: GPU-1 40.0 GB by pid 4711" in said


def test_status_on_gpus_says_what_each_slot_holds_and_what_waking_up_takes() -> None:
    """The column is there only where there are GPUs; the busiest GPU of a slot counts."""
    asleep = slot("bbbb", "standby", device_bytes=(1_900_000_000, 2_100_000_000), wake_s=0.474)
    awake = slot("aaaa", "active", tier="ready", device_bytes=(120_000_000_000,) * 2, wake_s=0.5)
    lines = shown(status_view.render("default", status(awake, asleep), NOW_S, 140), 140).splitlines()
    assert "gpu" in lines[1] and "120.0 GB" in lines[2] and "0.500 s" not in lines[2].split("promotion")[0]
    assert "host 0.474 s" in lines[3] and "2.1 GB" in lines[3]


def test_status_of_several_models_says_who_has_what() -> None:
    """By model: roles, held requests, GPU time of standbys; by engine: tier, memory, last wake; lost ones with why."""
    red = engine("red", "ready", device_bytes=(120_000_000_000,), host_bytes=17_000_000_000, wake_s=0.41)
    blue = engine("blue", "host", device_bytes=(2_500_000_000,), host_bytes=16_500_000_000)
    lost = engine("blue", None, error="out of memory; red (host) holds 2.5 GB of each GPU")
    pool = status(
        slot("aaaa", "active", model="red", engines=[red, blue]),
        slot("bbbb", "standby", model="red", engines=[engine("red", "disk", lent=True), lost]),
        models={
            "red": model("red", names=["red", "red-lora"], active=1),
            "blue": model("blue", held=3, standby_gpu_s=5400),
        },
    )
    page = shown(status_view.render("default", pool, NOW_S, 140), 140)
    for words in (
        r"red, red-lora +1 +0 +1 +0 +0\.00",
        r"blue +0 +0 +1 +3 +1\.50",
        r"aaaa +red +ready +0\.410 s +120\.0 GB +17\.0 GB",
        r" blue +host +- +2\.5 GB +16\.5 GB",
        r" blue +lost +- +- +-",
        r"bbbb +red +disk \(lent\)",
        r"bbbb: blue: out of memory; red \(host\) holds",
    ):
        assert re.search(words, page), page
    assert "last wake" not in shown(status_view.render("default", pool, NOW_S, 80), 80), "narrow: by model only"


@pytest.mark.parametrize("trouble", ["infeasible", "waiting"])
def test_status_says_why_slots_are_missing(trouble: str) -> None:
    """The line stands before the table, also where no slot has reported at all."""
    shortage = {"trouble": trouble, "message": "a slot needs 8 x GPU on one node; the nodes have 4: 4 GPUs are missing"}
    said = shown(status_view.render("default", status(shortage=shortage), NOW_S, 120), 120).splitlines()
    assert said[1] == f"slots are missing, {trouble}: {shortage['message']}"


def test_status_shows_what_is_wrong_in_full() -> None:
    """Errors stand below the table, flags in the headline."""
    error = "stage engine.wake took longer than its deadline of 60 s"
    page = status_view.render(
        "default", status(slot("aaaa", "failed", error=error), frozen=True, breaker_open=True), NOW_S, 80
    )
    said = shown(page, 80)
    assert f"aaaa: {error}" in said
    assert "frozen" in said
    assert "breaker open" in said
    assert "1 failed" in said


def test_status_tells_what_is_about_to_happen() -> None:
    """Pending orders, slots that Serve removes, and slots that have gone silent are visible."""
    slots = [
        slot("aaaa", "standby", pending="promote"),
        slot("bbbb", "active", leaving=True),
        slot("cccc", "active", heard_s=9.0),
    ]
    said = shown(status_view.render("default", status(*slots), NOW_S, 120), 120)
    for part in ("standby >promote", "active leaving", "active silent 9s"):
        assert part in said


def test_status_before_the_first_report() -> None:
    """A pool without slots is not an empty table."""
    assert "no slot has reported yet" in shown(status_view.render("default", status(), NOW_S, 80), 80)


def test_status_shows_every_coordinator() -> None:
    """Two applications, or two coordinators in a rollout, one of which does not answer."""
    answers = [
        cluster.Coordinator("one", status(slot("aaaa", "active"))),
        cluster.Coordinator("two", trouble="its coordinator died; Serve restarts it within seconds"),
    ]
    said = shown(watching.page(answers, 120), 120)
    assert "one  1 active" in said
    assert "two: its coordinator died" in said


def ledger(*transitions: dict[str, Any], width: int = 100, **options: Any) -> str:
    """What `serve-app ledger` shows of these."""
    recent = ledger_view.recent(list(transitions), 3)
    return shown(ledger_view.render(list(transitions), recent, NOW_S, width, **options), width)


def test_ledger_compares_hot_with_cold() -> None:
    """Both kinds have their median, the promotion says how much faster it is, and their stages stand side by side."""
    said = ledger(COLD, PROMOTION)
    assert "20x faster" in said
    [row] = [line.split() for line in said.splitlines() if line.startswith("engine.core ")]
    assert row[:4] == ["engine.core", "8.00", "s", "80%"]
    assert row[5:9] == ["engine.wake.weights", "0.300", "s", "60%"]
    assert "other               0.100 s 20%" in said
    assert all(len(line.rstrip()) <= 100 for line in said.splitlines())


def test_ledger_on_a_narrow_terminal() -> None:
    """Below each other instead of side by side, and indented stages stay indented."""
    lines = [line.rstrip() for line in ledger(COLD, PROMOTION, width=70).splitlines()]
    assert any(line.startswith("  weights.load") for line in lines)
    assert any(line.startswith("engine.wake.weights") for line in lines)
    assert all(len(line) <= 70 for line in lines)


def test_ledger_of_one_slot_has_the_stages_of_each_transition() -> None:
    """Beside the medians each transition stands with its reason and all of its stages."""
    said = ledger(PROMOTION, PROMOTION | {"start_s": 950.0, "reason": "2 requests held"}, each=True)
    assert said.count("engine.wake.weights") == 3
    assert "promotion (hot)  aaaa 1m 40s ago  0.500 s  6 requests held" in said


def test_ledger_shows_workers_from_fastest_to_slowest() -> None:
    """Two ranks are one row; with a rank chosen it is that one's."""
    workers = [record(Stage.WEIGHTS_LOAD, 801.0, 2.0 + rank) | {"rank": rank} for rank in (0, 1)]
    cold = COLD | {"stages": [record(Stage.ENGINE_CORE, 800.0, 8.0), *workers]}
    assert "  weights.load r0-1 2.00..3.00 s 30%" in ledger(cold)
    assert "  weights.load r0 2.00 s 20%" in ledger(cold, rank=0)


def test_ledger_without_transitions() -> None:
    """Not an empty table."""
    assert ledger().strip() == "no transition has been recorded yet"


def test_ledger_keeps_the_last_of_each_kind() -> None:
    """Older ones are dropped by time, what is left stands in the order of time."""
    entries = [PROMOTION | {"slot": name, "start_s": start} for name, start in (("b", 1.0), ("c", 3.0), ("a", 2.0))]
    assert [entry["slot"] for entry in ledger_view.recent(entries, 2)[Stage.PROMOTION]] == ["a", "c"]


def test_ledger_json_is_what_its_help_says() -> None:
    """Totals and medians by kind, and every transition with stages that make up the whole."""
    entries = [entry | {"application": "default"} for entry in (COLD, PROMOTION)]
    said = ledger_view.plain(entries, ledger_view.recent(entries, 3))
    assert said["kinds"]["cold_start"]["median_s"] == 10.0
    assert said["kinds"]["demotion"] == {
        "count": 0,
        "failed": 0,
        "median_s": None,
        "fastest_s": None,
        "slowest_s": None,
        "stages": [],
    }
    cold, hot = said["transitions"]
    assert (cold["kind"], cold["application"], hot["reason"]) == ("cold_start", "default", "6 requests held")
    top = [stage for stage in hot["stages"] if not stage["within"] and not stage["ranks"]]
    assert sum(stage["share"] for stage in top) == pytest.approx(1)
    assert cold["stages"][1]["within"] == ["engine.core"]
    assert hot["records"] == PROMOTION["stages"]


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5s"), (185, "3m 05s"), (7980, "2h 13m"), (4 * 86400 + 3 * 3600, "4d 03h"), (-1, "0s")]
)
def test_age(value: float, text: str) -> None:
    """Two units, the largest ones."""
    assert age(value) == text


def test_numbers_have_three_digits_that_matter() -> None:
    """Seconds from milliseconds to minutes, and 10^9 bytes."""
    assert [seconds(value) for value in (0.0621, 4.312, 52.43, 412.3)] == ["0.062 s", "4.31 s", "52.4 s", "412 s"]
    assert [gigabytes(value) for value in (0, 1_340_000_000)] == ["-", "1.3 GB"]
