"""Graph sizes, the kept size of the KV cache, and what a sleeping engine may hold: without a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import ModelConfig, SlotConfig
from serve_app.engine import caches
from serve_app.engine.arguments import graph_sizes
from serve_app.engine.base import ALONE, Siblings, Unused
from serve_app.engine.gpu_memory import GpuMemory
from serve_app.errors import GpuNotFree, MemoryNotReturned
from serve_app.gpu import nvml
from serve_app.gpu.nvml import GpuUse
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord

H200 = GpuUse("GPU-1", "NVIDIA H200", 150_000_000_000, 0, {})
MODEL = ModelConfig(id="m", engine_kwargs={"max_model_len": 4096})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with one idle GPU and empty caches; returns a model's directory."""
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(nvml, "visible", lambda: [H200.uuid])
    monkeypatch.setattr(nvml, "read", lambda uuids: [H200 for _ in uuids])
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1}))
    return tmp_path


def profiled(*bytes_by_rank: int) -> list[StageRecord]:
    return [StageRecord(Stage.MEMORY_PROFILE, 0, attributes={"bytes": n}, rank=r) for r, n in enumerate(bytes_by_rank)]


def start(
    model: Path, slot: SlotConfig, given_bytes: int | None = None, siblings: Siblings = ALONE
) -> tuple[GpuMemory, Namespace]:
    memory = GpuMemory(MODEL, slot, siblings)
    args = Namespace(kv_cache_memory_bytes=given_bytes, gpu_memory_utilization=0.9)
    memory.fix_kv_cache(args, str(model))
    return memory, args


@given(st.integers(1, 2048))
def test_graph_sizes_cover_every_batch_with_at_most_twice_its_size(max_num_seqs: int) -> None:
    """Few, rising, and never far above what runs."""
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(max_num_seqs, 512) and len(sizes) <= 11
    assert all(min(s for s in sizes if s >= batch) < 2 * batch for batch in range(1, sizes[-1] + 1))


def test_the_second_start_uses_what_the_first_has_measured(machine: Path) -> None:
    """The smallest rank counts, less some slack; a failed start forgets it."""
    first, args = start(machine, SlotConfig(gpus=1))
    assert args.kv_cache_memory_bytes is None
    first.learn(profiled(90_000_000_000, 80_000_000_000))
    second, args = start(machine, SlotConfig(gpus=1))
    assert 79_000_000_000 < args.kv_cache_memory_bytes < 80_000_000_000
    second.learn(profiled(args.kv_cache_memory_bytes))
    assert start(machine, SlotConfig(gpus=1))[1].kv_cache_memory_bytes == args.kv_cache_memory_bytes, "it shrank"
    second.forget_kv_cache()
    assert start(machine, SlotConfig(gpus=1))[1].kv_cache_memory_bytes is None


@pytest.mark.parametrize(
    ("slot", "given_bytes"), [(SlotConfig(gpus=0.5), None), (SlotConfig(gpus=1), 5), (SlotConfig(), None)]
)
def test_the_size_is_left_alone_where_it_is_not_ours_to_say(
    machine: Path, slot: SlotConfig, given_bytes: int | None
) -> None:
    """A part of a GPU, a size that the user has given, no GPU at all."""
    memory, args = start(machine, slot, given_bytes)
    memory.learn(profiled(7_000_000_000))
    assert args.kv_cache_memory_bytes == given_bytes
    assert not caches.directory().exists()


def test_other_settings_other_gpus_and_other_models_have_other_records() -> None:
    """What changes the memory that is left changes the key."""
    other_gpu = GpuUse("GPU-2", "NVIDIA H100", 80_000_000_000, 0, {})
    other_model = ModelConfig(id="m", engine_kwargs={"max_model_len": 8192})
    keys = {
        caches.kv_key(MODEL, {"a": 1}, [H200], 0),
        caches.kv_key(MODEL, {"a": 2}, [H200], 0),
        caches.kv_key(MODEL, {"a": 1}, [H200, H200], 0),
        caches.kv_key(MODEL, {"a": 1}, [other_gpu], 0),
        caches.kv_key(other_model, {"a": 1}, [H200], 0),
        caches.kv_key(MODEL, {"a": 1}, [H200], 6.0),
        caches.kv_key(MODEL, {"a": 1}, [H200], 12.0),  # each of the others may hold more asleep
    }
    assert len(keys) == 7


def test_a_model_in_mistrals_own_format_has_a_record_too(machine: Path) -> None:
    """It has params.json instead of config.json."""
    (machine / "config.json").rename(machine / "params.json")
    first, _ = start(machine, SlotConfig(gpus=1))
    first.learn(profiled(90_000_000_000))
    assert start(machine, SlotConfig(gpus=1))[1].kv_cache_memory_bytes
    (machine / "params.json").write_text(json.dumps({"dim": 2}))
    assert start(machine, SlotConfig(gpus=1))[1].kv_cache_memory_bytes is None


def test_an_engine_leaves_room_for_its_siblings_asleep(machine: Path) -> None:
    """Whatever order they start in: each of two others may hold `asleep_gpu_gb` while this one is awake."""
    slot = SlotConfig(gpus=1, asleep_gpu_gb=H200.total / 1e9 / 20)
    for siblings in (Siblings(started=0, to_come=2), Siblings(started=2, to_come=0)):
        assert start(machine, slot, siblings=siblings)[1].gpu_memory_utilization == pytest.approx(0.8)


def test_a_damaged_record_is_no_record(machine: Path) -> None:
    """Shipped caches may be cut off anywhere."""
    caches.remember_kv_bytes("k", 10_000_000_000)
    assert caches.remembered_kv_bytes("k")
    (caches.directory() / "kv_cache" / "k.json").write_text('{"kv_cache')
    assert caches.remembered_kv_bytes("k") is None


def test_a_sleeper_that_holds_too_much_is_named_with_rank_and_figure() -> None:
    """Per GPU, not in all."""
    memory = GpuMemory(MODEL, SlotConfig(gpus=2, asleep_gpu_gb=3), ALONE)
    memory.note([[2_900_000_000, 7, 5], [2_900_000_000, 9, 0]])
    memory.check_asleep()
    assert memory.held == (2_900_000_000, 2_900_000_000) and memory.unused == (Unused(7, 5), Unused(9, 0))
    memory.note([[2_900_000_000, 7, 5], [3_100_000_000, 9, 0]])
    with pytest.raises(MemoryNotReturned, match=r"rank 1 holds 3\.10 GB of its GPU asleep, allowed 3 GB"):
        memory.check_asleep()


def test_a_gpu_in_use_is_refused_with_its_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes where the driver tells them, and what to do."""
    busy = GpuUse("GPU-1", "NVIDIA H200", 150_000_000_000, 40_000_000_000, {4711: 39_000_000_000})
    monkeypatch.setattr(nvml, "read", lambda _: [busy])
    with pytest.raises(GpuNotFree, match=r"GPU-1 40\.0 GB by pid 4711 \(39\.0 GB\); end these processes"):
        nvml.wait_until_free(["GPU-1"], 0.0)
