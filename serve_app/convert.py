"""Turn a GGUF file into a bf16 Hugging Face model directory, in a process of its own.

`serve_app.models` runs this module, so that torch and transformers never get into the process that asked for the
model. Each step is announced on standard output, which is all that the parent reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STEP = "step: "
STEPS = ("importing transformers", "reading the tokenizer", "unpacking the weights", "writing safetensors")


def convert(gguf: Path, target: Path) -> None:
    """Write the model in `gguf` to the existing, empty directory `target`.

    Raises:
        ValueError: the file carries no chat template, so the result could not serve chats.
    """
    _announce(0)
    import transformers  # noqa: F401  (most of the import time, announced as a step of its own)

    _announce(1)
    tokenizer = _tokenizer(gguf)
    _announce(2)
    model = _model(gguf, tokenizer)
    _announce(3)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _forget_origin(target / "config.json")
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone; other users of the node may share the cache


def _announce(step: int) -> None:
    print(f"{STEP}{STEPS[step]}", flush=True)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} carries no chat template")
    return tokenizer


def _model(gguf: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    # Without `dequantize` transformers 5 keeps the weights packed, which vLLM cannot read from safetensors.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    # The weights are plain now; what still says otherwise would be saved, and refused on loading.
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.is_quantized, model.hf_quantizer = False, None
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _forget_origin(config: Path) -> None:
    """Drop from config.json what points at the quantized file or at a temporary directory."""
    settings = json.loads(config.read_text())
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    config.write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
