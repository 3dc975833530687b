"""The files by which slots order spares, and which of them still stand for somebody."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from serve_app.engine import spare
from serve_app.errors import EngineError
from serve_app.slot.spare import read_at_import

RAYLET = os.getpid()  # any process that lives


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))


def gone() -> int:
    """The pid of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_an_order_is_taken_once_and_whoever_has_it_is_a_spare() -> None:
    """A rename decides; the spare counts until it has become something."""
    order = spare.order(RAYLET, {"HF_HUB_OFFLINE": "1"})
    assert spare.waiting(RAYLET) == []
    order.rename(order.with_name(str(os.getpid())))
    assert spare.waiting(RAYLET) == [os.getpid()] and not spare.is_ready(RAYLET)
    (spare.folder(RAYLET) / str(os.getpid())).write_text(spare.READY)
    assert spare.is_ready(RAYLET)
    spare.taken(RAYLET)
    assert spare.waiting(RAYLET) == []


def test_no_secret_is_in_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a file; a spare that needs a token has it from Ray."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    read = read_at_import()
    assert read["HF_HUB_OFFLINE"] == "1" and "hf_secret" not in read.values()


def test_dead_spares_do_not_count_and_dead_raylets_leave_nothing() -> None:
    """Files outlive processes that were killed."""
    (spare.order(RAYLET, {})).rename(spare.folder(RAYLET) / str(gone()))
    assert spare.waiting(RAYLET) == []
    left = spare.folder(gone())
    left.mkdir()
    spare.order(RAYLET, {})
    assert not left.exists()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """Else anybody on the machine could leave an order, and with it an environment, for the next process."""
    (tmp_path / f"serve_app-{os.getuid()}").mkdir()
    (tmp_path / f"serve_app-{os.getuid()}").chmod(0o755)
    with pytest.raises(EngineError, match="only this user can enter"):
        spare.order(RAYLET, {})
