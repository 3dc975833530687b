"""A small Llama with random weights, and a reason to skip everything where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

MODEL_ID = "tiny"


def _why_not() -> str:
    """Why these tests cannot run here; empty if they can."""
    try:
        from serve_app.gpu import nvml

        if not nvml.visible():
            return "CUDA_VISIBLE_DEVICES shows no GPU"
    except Exception as error:
        return f"no NVIDIA GPU: {error}"
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        return f"no vLLM: {error}"
    return "" if current_platform.is_cuda() else "this vLLM was not built for CUDA"


WHY_NOT = _why_not()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches of these tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("home")
        patch.setenv("SERVE_APP_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: 0.9 GB of bf16 weights, no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path
