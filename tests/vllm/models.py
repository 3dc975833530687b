"""Tiny models for the loader's tests, each in several files: a Qwen3 with random weights, and a Llama in fp8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Parts of a layer that an fp8 checkpoint stores quantised.
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FP8_MAX = 448.0


def make_qwen3(path: Path, tokenizer: Path) -> Path:
    """Untied embeddings, normed queries and keys, grouped heads; `tokenizer` is a directory with one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="6MB")
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special", "chat")):
            shutil.copy(file, path)
    return path


def make_fp8(path: Path, llama: Path) -> Path:
    """The Llama at `llama`, its linear layers in fp8 with a scale for each of them."""
    shutil.copytree(llama, path)
    [file] = path.glob("*.safetensors")
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(file).items():
        if name.endswith(".weight") and name.split(".")[-2] in _LINEAR:
            scale = tensor.abs().max().float() / _FP8_MAX
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale")] = scale
        else:
            tensors[name] = tensor
    file.unlink()
    names = sorted(tensors)
    shards = {f"model-{n}-of-2.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, path / shard)
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (path / "config.json").write_text(json.dumps(config))
    return path
