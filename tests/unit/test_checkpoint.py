"""Weight files that are not what they say: each error names the file, and the tensor where it is one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve_app.errors import BadCheckpoint
from serve_app.weights import checkpoint

Header = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files with an index; `b` is the second tensor of the first one."""
    save_file({"a": torch.ones(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, tmp_path / "m-1.safetensors")
    save_file({"c": torch.ones(7)}, tmp_path / "m-2.safetensors")
    names = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return tmp_path


def load(model: Path) -> checkpoint.Checkpoint:
    return checkpoint.load(checkpoint.find(model))


def rewrite(file: Path, change: Callable[[Header], object]) -> None:
    """Change a file's header, and keep its data."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


def test_a_sound_checkpoint_has_all_tensors_where_safetensors_finds_them(model: Path) -> None:
    """Types, shapes and places are those of the library that wrote them; files begin at pages of the image."""
    first, second = load(model).shards
    assert {name: (t.dtype, t.shape) for name, t in first.tensors.items()} == {
        "a": ("F32", (4, 3)),
        "b": ("BF16", (5,)),
    }
    c = second.tensors["c"]
    assert second.path.read_bytes()[c.begin : c.end] == b"\0\0\x80\x3f" * 7
    assert load(model).offsets == (0, 4096) and load(model).image_size == 4096 + second.size


@pytest.mark.parametrize(
    ("change", "tensor", "said"),
    [
        (lambda header: header["a"].update(shape=[4, 4]), "a", r"F32 of shape \[4, 4\] takes 64 bytes, but it has 48"),
        (lambda header: header["b"].update(dtype="F32"), "b", r"F32 of shape \[5\] takes 20 bytes, but it has 10"),
        (lambda header: header["a"].update(dtype="F3"), "a", "its type 'F3' is unknown; known: BOOL, "),
        (lambda header: header["a"].pop("shape"), "a", "its entry in the header is damaged"),
        (lambda header: header["b"].update(data_offsets=[40, 50]), "b", "its data begin at byte"),
        (lambda header: header.pop("b"), "", "10 bytes after its last tensor belong to none"),
    ],
)
def test_a_header_that_contradicts_the_data_is_refused(
    model: Path, change: Callable[[Header], object], tensor: str, said: str
) -> None:
    """Also where the file has the right size."""
    rewrite(model / "m-1.safetensors", change)
    with pytest.raises(BadCheckpoint, match=said) as error:
        load(model)
    assert (error.value.file, error.value.tensor) == (str(model / "m-1.safetensors"), tensor)


def test_a_truncated_file_names_the_first_tensor_that_is_cut(model: Path) -> None:
    """And a file that ends within its header, or is empty, is refused too."""
    file = model / "m-1.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(BadCheckpoint, match=r"m-1\.safetensors, tensor b: truncated: it ends at byte"):
        load(model)
    for size in (20, 0):
        os.truncate(file, size)
        with pytest.raises(BadCheckpoint, match=rf"it has {size} bytes, too few for its header"):
            load(model)


def test_a_file_that_is_no_safetensors_is_refused(model: Path) -> None:
    """A Git LFS pointer, for example."""
    (model / "m-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(BadCheckpoint, match="or no safetensors file"):
        load(model)
    (model / "m-2.safetensors").write_bytes((5).to_bytes(8, "little") + b"hello")
    with pytest.raises(BadCheckpoint, match="its header is no JSON"):
        load(model)


def test_a_missing_shard_names_a_tensor_that_should_be_in_it(model: Path) -> None:
    """It is found before anything else is read."""
    (model / "m-2.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"m-2\.safetensors, tensor c: missing, though model\.safetensors\.index"):
        load(model)


def test_an_index_that_names_an_absent_tensor_is_refused(model: Path) -> None:
    """The file is there, and sound, but without the tensor."""
    save_file({"d": torch.ones(7)}, model / "m-2.safetensors")
    with pytest.raises(BadCheckpoint, match=r"m-2\.safetensors, tensor c: not in this file, though model\."):
        load(model)
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="it is no index of safetensors files"):
        load(model)


def test_files_are_found_as_vllm_finds_them(model: Path, tmp_path: Path) -> None:
    """Without an index all of them; with one those that it names; Mistral's own format before the rest."""
    save_file({"a": torch.ones(1)}, model / "unindexed.safetensors")
    assert [file.name for file in checkpoint.find(model)] == ["m-1.safetensors", "m-2.safetensors"]
    (model / "model.safetensors.index.json").unlink()
    assert [file.name for file in checkpoint.find(model)][-1] == "unindexed.safetensors"
    save_file({"a": torch.ones(1)}, model / "consolidated.safetensors")
    assert [file.name for file in checkpoint.find(model)] == ["consolidated.safetensors"]


def test_same_shapes_with_other_content_are_another_key(model: Path) -> None:
    """Also where size and time of change are what they were; and another manifest is another key too."""
    file, before = model / "m-2.safetensors", load(model)
    old = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x01")
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert file.stat().st_mtime_ns == old.st_mtime_ns and file.stat().st_size == old.st_size
    assert load(model).key("") != before.key("") != before.key("manifest")
    with pytest.raises(BadCheckpoint, match="it was changed while it was read"):
        before.shards[1].check_unchanged()
