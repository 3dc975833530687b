"""The manifest: what `serve-app prepare` saw is what is loaded, or nothing is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve_app.errors import BadCheckpoint, ChecksumMismatch
from serve_app.weights import checkpoint, manifest
from serve_app.weights.cache import NodeCache
from serve_app.weights.checkpoint import Checkpoint
from serve_app.weights.reading import PIECE_BYTES


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One file of a bit more than two pieces, with its manifest."""
    folder = tmp_path / "model"
    folder.mkdir()
    big = torch.arange(PIECE_BYTES // 2, dtype=torch.int32)
    save_file({"big": big, "small": torch.ones(8)}, folder / "model.safetensors")
    assert manifest.write(folder) == folder / manifest.NAME
    return folder


def load(model: Path) -> Checkpoint:
    return checkpoint.load(checkpoint.find(model))


def acquire(model: Path, tmp_path: Path) -> None:
    """Read it into a cache of its own."""
    NodeCache(None, 0, tmp_path, tmp_path).acquire(load(model)).close()


def flip(file: Path, at: int) -> None:
    """Change one byte, and nothing that `stat` shows but the time of the last change of the inode."""
    old = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        [byte] = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.parametrize(("tensor", "at"), [("big", -100), ("small", 3)])
def test_a_flipped_byte_is_refused_and_named(model: Path, tmp_path: Path, tensor: str, at: int) -> None:
    """By file and tensor, wherever it is; no memory is left behind. Running `prepare` again does not accept it."""
    file = model / "model.safetensors"
    place = load(model).shards[0].tensors[tensor]
    flip(file, place.end + at if at < 0 else place.begin + at)
    for _ in range(2):
        with pytest.raises(ChecksumMismatch, match="get the file again") as error:
            acquire(model, tmp_path)
        assert error.value.file == str(file) and tensor in error.value.tensor
        assert list(tmp_path.glob("serve_app-*/*")) == []
        manifest.write(model)


def test_another_type_or_shape_than_prepared_is_refused_and_named(model: Path, tmp_path: Path) -> None:
    """Before the data are read: same size, same number of bytes, other meaning."""
    file = model / "model.safetensors"
    content = file.read_bytes()
    for old, new, said in [
        (b'"dtype":"F32","shape":[8]', b'"dtype":"I32","shape":[8]', r"small: I32 of shape \[8\], but serve_app"),
        (b'"dtype":"F32","shape":[8]', b'"dtype":"F64","shape":[4]', r"small: F64 of shape \[4\], but serve_app"),
        (b'"small"', b'"smell"', r"smell: F32 of shape \[8\], but serve_app.weights.json says not there"),
    ]:
        assert old in content
        file.write_bytes(content.replace(old, new))
        with pytest.raises(BadCheckpoint, match=said):
            acquire(model, tmp_path)


def test_a_file_that_the_manifest_does_not_know_is_refused(model: Path, tmp_path: Path) -> None:
    """It says what to do; afterwards it is accepted."""
    save_file({"more": torch.ones(8)}, model / "more.safetensors")
    with pytest.raises(BadCheckpoint, match=r"more\.safetensors: .* does not know it; .* run `serve-app prepare`"):
        acquire(model, tmp_path)
    manifest.write(model)
    acquire(model, tmp_path)


def test_a_manifest_is_kept_while_nothing_has_changed(model: Path) -> None:
    """The weights are not read again; a file that was replaced is, and only that one."""
    path = model / manifest.NAME
    before = path.stat().st_ino
    assert manifest.write(model) == path and path.stat().st_ino == before
    save_file({"more": torch.ones(8)}, model / "more.safetensors")
    old = json.loads(path.read_text())["files"]["model.safetensors"]
    manifest.write(model)
    assert json.loads(path.read_text())["files"]["model.safetensors"] == old
    time.sleep(0.01)
    save_file({"more": torch.zeros(8)}, model / "more.safetensors")
    first = manifest.read(model)
    manifest.write(model)
    second = manifest.read(model)
    assert first and second and first.digest != second.digest


def test_a_damaged_manifest_is_an_error_and_prepare_mends_it(model: Path, tmp_path: Path) -> None:
    """Silence would be taken for verified."""
    (model / manifest.NAME).write_text("{")
    with pytest.raises(BadCheckpoint, match=r"serve_app\.weights\.json: no usable manifest"):
        acquire(model, tmp_path)
    manifest.write(model)
    acquire(model, tmp_path)


def test_without_safetensors_there_is_no_manifest(tmp_path: Path) -> None:
    """Other formats are vLLM's own business."""
    assert manifest.write(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
