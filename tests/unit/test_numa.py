"""Which processors a rank is kept on, read from a made-up /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.gpu import numa, nvml

ADDRESS = "0000:3b:00.0"


def system(path: Path, cpulists: list[str], gpu_node: str) -> Path:
    """A /sys with these NUMA nodes and one GPU on `gpu_node`."""
    for node, cpus in enumerate(cpulists):
        (path / f"devices/system/node/node{node}").mkdir(parents=True)
        (path / f"devices/system/node/node{node}/cpulist").write_text(f"{cpus}\n")
    (path / "bus/pci/devices" / ADDRESS).mkdir(parents=True)
    (path / "bus/pci/devices" / ADDRESS / "numa_node").write_text(f"{gpu_node}\n")
    return path


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Processors 0 to 7 may be used; collects what the process was bound to."""
    bound: list[set[int]] = []
    monkeypatch.setattr(nvml, "pci_address", lambda _: ADDRESS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    return bound


def test_a_rank_moves_to_its_gpus_node(tmp_path: Path, allowed: list[set[int]]) -> None:
    """Only to processors that it may use anyway."""
    assert numa.bind_to("GPU-1", system(tmp_path, ["0-3,16-19", "4-7,20-23"], "1")) == 1
    assert allowed == [{4, 5, 6, 7}]


@pytest.mark.parametrize(
    ("cpulists", "gpu_node"),
    [(["0-7"], "0"), (["0-3", "4-7"], "-1"), (["0-7", "8-15"], "1"), (["0-3", "4-7"], "none")],
    ids=["one node", "not known", "none allowed", "unreadable"],
)
def test_otherwise_nothing_changes(tmp_path: Path, allowed: list[set[int]], cpulists: list[str], gpu_node: str) -> None:
    """A rank that cannot be bound is slower, not wrong."""
    assert numa.bind_to("GPU-1", system(tmp_path, cpulists, gpu_node)) is None
    assert allowed == []
