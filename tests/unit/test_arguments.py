"""What a slot chooses for vLLM by the machine that it is on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from serve_app.engine.arguments import bfloat16_is_good, fast_pinning, one_assembler, whole_artifact

PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


@pytest.mark.parametrize(
    ("flags", "good"),
    [
        ({"avx2", "avx512f"}, False),  # emulated
        ({"avx512f", "avx512_bf16"}, True),
        ({"asimd", "bf16"}, True),
        ({"avx512_bf16", "amx_bf16", "amx_tile"}, False),  # vLLM's attention for AMX
    ],
)
def test_bfloat16_where_a_cpu_computes_well_in_it(flags: set[str], good: bool) -> None:
    assert bfloat16_is_good(flags) is good


def test_pinning_on_several_threads_beside_what_a_user_has_set() -> None:
    """PyTorch reads the first of its two variables that is set; whoever says how to pin is left alone."""
    assert fast_pinning({}) == {"PYTORCH_ALLOC_CONF": PINNING}
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert fast_pinning(given) == {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64,{PINNING}"}
    assert fast_pinning({"PYTORCH_ALLOC_CONF": "pinned_num_register_threads:2"}) == {}
    assert fast_pinning(fast_pinning({})) == {}


def test_compiled_code_in_one_piece_unless_a_user_has_a_say() -> None:
    """vLLM refuses some of these settings together."""
    assert whole_artifact({}) == {"VLLM_USE_MEGA_AOT_ARTIFACT": "1"}
    for name in ("VLLM_USE_MEGA_AOT_ARTIFACT", "VLLM_USE_AOT_COMPILE", "VLLM_DISABLE_COMPILE_CACHE"):
        assert whole_artifact({name: "0"}) == {}, name


def test_the_assembler_of_pytorch_where_one_comes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch for CPUs has none."""
    package = tmp_path / "torch"
    assembler = package / "bin" / "ptxas"
    assembler.parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert one_assembler({}) == {}
    assembler.touch(mode=0o755)
    assert one_assembler({}) == {"TRITON_PTXAS_PATH": str(assembler)}
    assert one_assembler({"TRITON_PTXAS_PATH": "/mine"}) == {}
