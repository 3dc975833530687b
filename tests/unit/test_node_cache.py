"""The node's weight cache with real files and real processes, some of them killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.errors import BadCheckpoint, NodeCacheFull
from serve_app.weights import checkpoint, views
from serve_app.weights.cache import SHARED_MEMORY, NodeCache, Weights, bytes_on_node

MIB = 1 << 20
WAIT_S = 30.0


class Node:
    """A node of its own: shared memory, locks, models, and processes that use them."""

    def __init__(self, memory: Path, folder: Path) -> None:
        self.memory, self.folder = memory, folder
        self.locks = folder / "locks"
        self.locks.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def cache(self, max_bytes: int | None = None, keep_s: float = 0) -> NodeCache:
        return NodeCache(max_bytes, keep_s, self.memory, self.locks)

    def model(self, name: str, mib: int = 1, files: int = 1) -> Path:
        """A model directory with so much data in each of its files."""
        path = self.folder / name
        path.mkdir()
        for number in range(files):
            torch.manual_seed(number)
            tensors = {f"w{number}": torch.randn(mib * MIB // 8), f"v{number}": torch.randn(mib * MIB // 16, 2)}
            save_file(tensors, path / f"model-{number}.safetensors")
        return path

    def user(self, model: Path, *more: str, keep_s: float = 0, **options: Any) -> subprocess.Popen[str]:
        """Start a process that acquires the model's weights and holds them until its standard input ends."""
        command = [sys.executable, "-m", "tests.unit.weights_user", self.memory, self.locks, model, str(keep_s), *more]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process: subprocess.Popen[str] = subprocess.Popen(list(map(str, command)), **pipes, **options)
        self.processes.append(process)
        return process

    @property
    def files(self) -> list[Path]:
        return [file for folder in self.memory.glob("serve_app-*") for file in folder.iterdir()]

    def keepers(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if str(self.locks / "weights") in (p.info["cmdline"] or [])]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for keeper in self.keepers():
            keeper.terminate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """In the machine's shared memory, in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="serve_app_test-") as memory:
        node = Node(Path(memory), tmp_path)
        yield node
        node.close()


@pytest.fixture
def small_node(tmp_path: Path) -> Iterator[Node]:
    """With 8 MiB of shared memory that nobody else uses."""
    memory = tmp_path / "memory"
    memory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", memory], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        node = Node(memory, tmp_path)
        yield node
        node.close()
    finally:
        subprocess.run(["umount", memory], check=True)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def acquire(cache: NodeCache, model: Path) -> Weights:
    return cache.acquire(checkpoint.load(checkpoint.find(model)))


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a user says once it has its weights."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return dict(json.loads(line))


def test_tensors_are_those_that_safetensors_reads(node: Node) -> None:
    """By name, type, shape and every bit; also of types that numpy does not have, of scalars and of empty ones."""
    model = node.model("m", files=2)
    odd = {
        "fp8": torch.arange(24).view(4, 6).to(torch.float8_e4m3fn),
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False, True]),
        "int": torch.arange(7),
    }
    save_file(odd, model / "odd.safetensors")
    weights = acquire(node.cache(), model)
    wanted = {name: tensor for file in checkpoint.find(model) for name, tensor in load_file(file).items()}
    found = {name: tensor for _, name, tensor in views.tensors(weights, weights.mapped())}
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))
    weights.close()


def test_writing_to_a_tensor_changes_nobody_elses(node: Node) -> None:
    """The mapping is private as far as it is written to."""
    weights = acquire(node.cache(), node.model("m"))
    first, second = (next(iter(views.tensors(weights, weights.mapped())))[2] for _ in range(2))
    before = second.clone()
    first.zero_()
    assert second.equal(before) and not first.equal(before)
    weights.close()


def test_the_files_are_read_once_for_all_processes(node: Node) -> None:
    """Several start at once: one reads every byte, the others none, and one copy is in memory."""
    model = node.model("m", mib=8, files=3)
    size = sum(file.stat().st_size for file in checkpoint.find(model))
    told = [said(process) for process in [node.user(model) for _ in range(4)]]
    assert sorted(one["bytes"] for one in told) == [0, 0, 0, size]
    assert [file.stat().st_blocks * 512 // MIB for file in node.files] == [24]


def test_other_content_with_the_same_shapes_is_another_copy(node: Node) -> None:
    """Beside the first, which is in use."""
    model = node.model("m")
    first = acquire(node.cache(), model)
    [file] = checkpoint.find(model)
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    second = acquire(node.cache(), model)
    assert second.read_bytes == first.read_bytes and len(node.files) == 2
    assert bytes_on_node(node.memory) == sum(file.stat().st_size for file in node.files)
    assert not first.mapped()[:] == second.mapped()[:] == file.read_bytes()
    first.close()
    second.close()


def test_what_was_used_longest_ago_goes_first_and_never_what_is_used(node: Node) -> None:
    """The bound holds three models; the oldest is in use, so that the second oldest goes."""
    cache = node.cache(max_bytes=3 * MIB + MIB // 2, keep_s=60)
    a, b, c, d, e = (node.model(name) for name in "abcde")
    used = acquire(cache, a)
    for model in (b, c):
        acquire(cache, model).close()
    acquire(cache, b).close()  # now c was used longest ago
    acquire(cache, d).close()
    assert [acquire(cache, model).read_bytes > 0 for model in (a, b, d)] == [False, False, False]
    others = [acquire(cache, b), acquire(cache, d)]
    with pytest.raises(NodeCacheFull, match=r"max_bytes allows 0\.00 GB in all, and 0\.00 GB of other models") as full:
        acquire(cache, e)
    assert full.value.used == sum(file.stat().st_size for file in node.files)
    for weights in [used, *others]:
        weights.close()
    acquire(cache, e).close()
    assert len(node.files) == 3


def test_a_model_larger_than_the_bound_removes_nothing(node: Node) -> None:
    """It will not fit anyway."""
    cache = node.cache(max_bytes=3 * MIB)
    small = node.model("small")
    weights = acquire(cache, small)
    weights.close()
    with pytest.raises(NodeCacheFull):
        acquire(cache, node.model("large", mib=4))
    assert acquire(cache, small).read_bytes == 0


def test_a_process_killed_while_it_reads_leaves_nothing_and_the_next_one_reads(node: Node) -> None:
    """What it has read so far never had a name; the one that waited for it takes over."""
    model = node.model("m", mib=8)
    killed = node.user(model, "slowly")
    assert killed.stdout is not None and killed.stdout.readline() == "reading\n"
    assert psutil.Process(killed.pid).memory_info().shared >= 8 * MIB and node.files == []
    waiting = node.user(model)
    killed.kill()
    killed.wait()
    assert said(waiting)["bytes"] > 8 * MIB
    assert len(node.files) == 1


def test_weights_survive_the_death_of_all_their_users(node: Node) -> None:
    """Killed, not ended; the next engine of the node finds what they have read."""
    model = node.model("m")
    users = [node.user(model, keep_s=600) for _ in range(2)]
    for user in users:
        said(user)
    for user in users:
        user.kill()
        user.wait()
    assert said(node.user(model))["bytes"] == 0


def test_nothing_is_left_once_nobody_has_used_it_for_a_while(node: Node) -> None:
    """Not even the folder."""
    user = node.user(node.model("m"))
    said(user)
    assert len(node.files) == 1
    user.kill()
    assert eventually(lambda: list(node.memory.iterdir()) == [])


def test_after_a_killed_keeper_the_next_start_owns_what_is_there(node: Node) -> None:
    """Also where keeper and users are killed at once, as at a container's end: it is used again, then removed."""
    model = node.model("m")
    user = node.user(model)
    said(user)
    [keeper] = node.keepers()
    keeper.send_signal(signal.SIGKILL)
    user.kill()
    user.wait()
    assert eventually(lambda: not node.keepers())
    [left] = node.files
    next_one = acquire(node.cache(), model)
    assert next_one.read_bytes == 0 and node.files == [left] and len(node.keepers()) == 1
    next_one.close()
    assert eventually(lambda: list(node.memory.iterdir()) == [])


def test_a_full_shared_memory_is_an_error_before_and_while_it_is_filled(small_node: Node) -> None:
    """What no engine uses goes first; nothing of what does not fit stays."""
    node = small_node
    cache = node.cache(max_bytes=64 * MIB)
    acquire(cache, node.model("old", mib=4)).close()
    acquire(cache, node.model("new", mib=5)).close()
    assert len(node.files) == 1
    with pytest.raises(NodeCacheFull, match=r"memory has 0\.0\d GB free of 0\.01.*docker: --shm-size"):
        acquire(cache, node.model("large", mib=9))
    others = node.memory / "others"
    grown = node.model("grown", mib=6)
    read = checkpoint.load(checkpoint.find(grown))
    make_room = cache._make_room

    def somebody_else_is_faster(*arguments: Any) -> None:
        make_room(*arguments)
        others.write_bytes(bytes(4 * MIB))

    cache._make_room = somebody_else_is_faster  # type: ignore[method-assign]
    with pytest.raises(NodeCacheFull, match="No space left on device"):
        cache.acquire(read)
    room = os.statvfs(node.memory)
    assert node.files == [] and (room.f_blocks - room.f_bfree) * room.f_frsize < 5 * MIB


def test_a_file_that_vanishes_or_shrinks_while_it_is_read_is_named(node: Node) -> None:
    """After its header was read; nothing stays in memory."""
    model = node.model("m")
    [file] = checkpoint.find(model)
    read = checkpoint.load([file])
    content = file.read_bytes()
    os.truncate(file, len(content) - 10)
    with pytest.raises(BadCheckpoint, match=r"model-0\.safetensors: truncated while it was read"):
        node.cache().acquire(read)
    file.unlink()
    with pytest.raises(BadCheckpoint, match=r"model-0\.safetensors: it cannot be read: No such file"):
        node.cache().acquire(read)
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match="it was changed while it was read"):
        node.cache().acquire(read)
    assert node.files == []


def test_the_folder_is_private(node: Node) -> None:
    """Weights are served from it: nobody else may read or replace them."""
    weights = acquire(node.cache(), node.model("m"))
    [folder] = node.memory.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in node.files] == [0o400]
    weights.close()
