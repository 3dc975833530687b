"""`serve-app prepare`, and how errors of ours end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve_app import cli
from serve_app.weights import manifest


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Run `serve-app` with these arguments; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["serve-app", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_prepare_prints_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is the directory alone, so that scripts can use it."""
    assert run(monkeypatch, "prepare", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_prepare_writes_checksums_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside them; weights that contradict themselves are one message."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8)}, file)
    assert run(monkeypatch, "prepare", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    found = manifest.read(tmp_path)
    assert found is not None and list(found.files) == ["model.safetensors"]
    file.write_bytes(file.read_bytes()[:-1])
    assert run(monkeypatch, "prepare", str(tmp_path)) == 1
    assert capsys.readouterr().err.startswith(f"serve-app: weights file {file}, tensor a: truncated")


def test_prepare_unknown_model_ends_with_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of ours is told without a traceback, with exit status 1."""
    assert run(monkeypatch, "prepare", "typo") == 1
    said = capsys.readouterr().err
    assert said.startswith("serve-app: model 'typo'")
    assert "Traceback" not in said
