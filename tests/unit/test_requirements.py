"""What keeps a slot off a node: every check has a node that fails it, and the usual node passes all."""

from __future__ import annotations

import py_compile
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve_app.config import ModelConfig, NcclConfig, SlotConfig, Tier
from serve_app.gpu import node
from serve_app.gpu.facts import Finding, Level, NodeFacts, RayNode, Software, Wanted
from serve_app.gpu.nccl import Network
from serve_app.gpu.requirements import CHECKS, check, check_cluster, errors
from serve_app.models import weights_bytes

GB = 10**9
SOFTWARE = Software(
    driver="580.159",
    driver_cuda=(13, 0),
    gpus=8,
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    vllm="0.26.0",
    vllm_wants_torch="==2.11.0",
)
FACTS = NodeFacts(
    ray=RayNode("10.0.0.7", gpus=8, memory_bytes=400 * GB),
    network=Network("gpu-7", "10.0.0.7", {"lo": ("127.0.0.1",), "eth0": ("10.0.0.7",)}),
    environment={},
    container_bytes=500 * GB,
    total_bytes=512 * GB,
    threshold=0.95,
    software=SOFTWARE,
    topo_file_found=None,
    weights_bytes=16 * GB,
)
SLOT = SlotConfig(gpus=2)
WANTED = Wanted(SLOT, (ModelConfig(id="m"),), Tier.HOST, slots=4, least_slots=2)


def software(**changes: Any) -> NodeFacts:
    return replace(FACTS, software=replace(SOFTWARE, **changes))


def slot(**changes: Any) -> Wanted:
    return replace(WANTED, slot=SLOT.model_copy(update=changes))


def found(check_name: str, facts: NodeFacts, wanted: Wanted = WANTED) -> Finding:
    [finding] = [finding for finding in check(facts, wanted) if finding.check == check_name]
    return finding


def test_a_good_node_passes_every_check() -> None:
    """Eight GPUs, fitting versions, enough memory."""
    assert [finding.level for finding in check(FACTS, WANTED)] == [Level.OK] * len(CHECKS)


@pytest.mark.parametrize(
    ("name", "facts", "wanted", "words"),
    [
        ("driver", software(driver="", driver_cuda=None), WANTED, ["no NVIDIA driver"]),
        ("driver", software(driver="550.1", driver_cuda=(12, 4)), WANTED, ["550.1", "up to 12.4", "torch", "13.0"]),
        ("torch", software(torch=""), WANTED, ["not installed"]),
        ("torch", software(torch="2.11.0+cpu", torch_cuda=""), WANTED, ["2.11.0+cpu is a build without CUDA"]),
        ("torch", software(torch="2.13.0+cu130"), WANTED, ["torch 2.13.0+cu130", "0.26.0", "==2.11.0"]),
        ("vllm", software(vllm=""), WANTED, ["not installed"]),
        ("vllm", software(vllm="0.25.1"), WANTED, ["0.25.1", "0.26", "0.33"]),
        ("vllm", software(vllm="0.33.0"), WANTED, ["0.33.0"]),
        (
            "allocator",
            replace(FACTS, environment={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}),
            WANTED,
            ["PYTORCH_CUDA_ALLOC_CONF=", "enable_sleep_mode: false"],
        ),
        (
            "allocator",
            replace(FACTS, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
            replace(WANTED, tier=Tier.READY),  # live: it may become host at any time
            ["PYTORCH_ALLOC_CONF="],
        ),
        ("host_ram", replace(FACTS, container_bytes=60 * GB), WANTED, ["4 slots", "64.0 GB", "57.0 GB", "container"]),
        (
            "host_ram",
            replace(FACTS, ray=RayNode("10.0.0.7", 8, 60 * GB)),
            slot(host_ram_gb=20),
            ["64.0 GB", "95% of Ray's memory is 57.0 GB", "slots.max"],
        ),
        (
            "host_ram",
            replace(FACTS, ray=RayNode("10.0.0.7", 8, 60 * GB), total_bytes=31 * GB),
            WANTED,
            ["Ray's memory is 57.0 GB"],
        ),
        ("host_ram", FACTS, slot(host_ram_gb=10), ["reserves 10 GB", "16.0 GB", "slot.host_ram_gb"]),
        ("interface", FACTS, slot(nccl=NcclConfig(interface="ib")), ["'ib'", "lo, eth0", "slot.nccl.interface"]),
        (
            "topology",
            replace(FACTS, topo_file_found=False),
            slot(nccl=NcclConfig(topo_file="/topo.xml")),
            ["/topo.xml is not on this node"],
        ),
    ],
)
def test_what_cannot_work_is_an_error(name: str, facts: NodeFacts, wanted: Wanted, words: list[str]) -> None:
    """It says what is wrong and what to do; nothing else is wrong with that node."""
    [problem] = errors(check(facts, wanted))
    finding = found(name, facts, wanted)
    assert finding.level is Level.ERROR
    assert finding.todo
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    ("name", "facts", "wanted", "words"),
    [
        # MemTotal shows 31 of 256 GB, and Ray has taken its own figure from it.
        (
            "host_ram",
            replace(FACTS, container_bytes=None, total_bytes=31 * GB, ray=RayNode("10.0.0.7", 8, 20 * GB)),
            WANTED,
            ["95% of Ray's memory is 19.0 GB", "MemTotal shows 31.0 GB, which may be too little"],
        ),
        ("host_ram", replace(FACTS, weights_bytes=None), WANTED, ["not known"]),
        ("bytecode", software(bytecode=False), WANTED, ["slow cold starts"]),
        (
            "interface",
            replace(FACTS, environment={"NCCL_SOCKET_IFNAME": "lo"}),
            slot(nccl=NcclConfig(interface="eth")),
            ["NCCL_SOCKET_IFNAME=lo"],
        ),
        ("interface", FACTS, slot(gpus=1, nccl=NcclConfig(interface="ib")), ["'ib'"]),
    ],
)
def test_what_is_doubtful_is_a_warning(name: str, facts: NodeFacts, wanted: Wanted, words: list[str]) -> None:
    """A slot still starts."""
    finding = found(name, facts, wanted)
    assert finding.level is Level.WARNING
    assert errors(check(facts, wanted)) == ()
    for word in words:
        assert word in finding.what


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (software(driver_cuda=(13, 2)), WANTED),  # newer
        (software(driver_cuda=(13, 0), torch_cuda="13.1"), WANTED),  # minor-version compatibility
        (software(driver_cuda=(13, 0), torch_cuda="12.8"), WANTED),  # an older major is known to any newer driver
        (software(torch="2.13.0", vllm="0.32.0", vllm_wants_torch="==2.13.0+cpu"), WANTED),  # a build has no say
        (software(vllm="0.32.1.post1"), WANTED),
        (software(driver_cuda=None), replace(WANTED, models=(ModelConfig(id="m", engine="simulated"),))),
        (replace(software(driver_cuda=None), ray=RayNode("10.0.0.7")), WANTED),  # a head node without GPUs
        (replace(FACTS, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}), WANTED),
        (
            replace(FACTS, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
            replace(WANTED, models=(ModelConfig(id="m", engine_kwargs={"enable_sleep_mode": False}),)),
        ),
        (replace(FACTS, container_bytes=60 * GB), replace(WANTED, tier=Tier.DISK)),
        (replace(FACTS, container_bytes=60 * GB), replace(WANTED, slots=3)),
        # Four GPUs of a slot of sixteen: a quarter of its weights.
        (
            replace(FACTS, container_bytes=5 * GB, ray=RayNode("10.0.0.7", 4, 400 * GB)),
            slot(gpus=16),
        ),
    ],
)
def test_what_works_is_not_refused(facts: NodeFacts, wanted: Wanted) -> None:
    """Neither error nor warning."""
    assert {finding.level for finding in check(facts, wanted)} == {Level.OK}


def test_all_nodes_together_must_hold_a_slot() -> None:
    """Fewer GPUs than one slot takes is an error, fewer than all slots that always exist a warning."""
    small = replace(FACTS, ray=RayNode("10.0.0.7", gpus=2))
    levels = [check_cluster(nodes, slot(gpus=3))[0].level for nodes in ([small], [small] * 2, [small] * 3)]
    assert levels == [Level.ERROR, Level.WARNING, Level.OK]
    assert "lower slots.min from 2" in check_cluster([small] * 2, slot(gpus=3))[0].todo


def test_bytecode_is_looked_for_beside_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python writes it as it imports a module for the first time, unless it is told not to."""
    (tmp_path / "vllm").mkdir()
    source = tmp_path / "vllm" / "__init__.py"
    source.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert not node.software().bytecode
    py_compile.compile(str(source))
    assert node.software().bytecode


@pytest.mark.parametrize(
    ("text", "limit"), [("max", None), ("1073741824", 1 << 30), ("9223372036854771712", None), (None, None)]
)
def test_container_limit(tmp_path: Path, text: str | None, limit: int | None) -> None:
    """Of cgroup v2, where none is `max`, and v1, where it is a number near 2^63."""
    files = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    if text is not None:
        files[1].write_text(f"{text}\n")
    assert node.container_limit(files) == limit


def test_weights_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    """vLLM loads 32-bit weights in 16 bits; what it quantises on the way cannot be told from the files."""
    save_file({"a": torch.zeros(100, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(100, dtype=torch.float32)}, tmp_path / "model-2.safetensors")
    model = ModelConfig(id="m", source=str(tmp_path))
    assert weights_bytes(model) == 400
    assert weights_bytes(model.model_copy(update={"engine_kwargs": {"quantization": "fp8"}})) is None
    assert weights_bytes(ModelConfig(id="m", source=str(tmp_path / "missing"))) is None


def test_facts_of_this_machine_are_its_own() -> None:
    """Gathered without Ray: the interfaces that are up, the installed versions, its memory."""
    facts = node.gather(RayNode("127.0.0.1"), NcclConfig(topo_file="/nowhere.xml"), None)
    assert "127.0.0.1" in facts.network.interfaces["lo"]
    assert facts.software.torch == torch.__version__
    assert facts.software.torch_cuda == (torch.version.cuda or "")
    assert facts.total_bytes > 0
    assert facts.topo_file_found is False
