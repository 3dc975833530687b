"""The model that GPU benchmarks run is one that vLLM would take for a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks.gpu import random_model
from serve_app.weights import checkpoint


@pytest.mark.parametrize("fp8", [False, True])
def test_a_checkpoint_whose_files_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """Several files, an index that knows all of them, and a tokenizer of the model's own size."""
    monkeypatch.setattr(random_model, "BYTES_PER_FILE", 60_000_000)
    size = random_model.write(tmp_path, "tiny", fp8)
    found = checkpoint.load(checkpoint.find(tmp_path))  # compares headers, index and sizes
    assert len(checkpoint.find(tmp_path)) > 1
    assert size < found.size < size + 100_000  # and headers
    shape, tokenizer = AutoConfig.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == shape.vocab_size == random_model.VOCABULARY
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"
    assert hasattr(shape, "quantization_config") is fp8
