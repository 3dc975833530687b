"""Write a Llama of a real size with random weights: what the benchmarks of this folder run where no hub can be reached.

    python -m benchmarks.gpu.random_model DIR [--size 8b] [--fp8]

Its files are those of a real checkpoint: configuration, safetensors in several files with an index, a tokenizer. The
tokenizer knows as many tokens as the model has, though it makes none but bytes: with fewer, vLLM's detokenizer takes
half of the server's processor time for tokens that do not exist. 23 s for 8B on an H200's host.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

VOCABULARY = 128_256
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
# Hidden size, intermediate size, layers, heads, key-value heads. Of the 70B there is a slice for single GPUs.
SIZES = {
    "tiny": (256, 512, 4, 4, 2),
    "8b": (4096, 14336, 32, 32, 8),
    "70b-slice": (8192, 28672, 12, 64, 8),
    "70b": (8192, 28672, 80, 64, 8),
}
BYTES_PER_FILE = 5 * 10**9
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def config(size: str, fp8: bool) -> LlamaConfig:
    """The model's shape; fp8 is per tensor, with its scales in the checkpoint."""
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    more: dict[str, Any] = (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}} if fp8 else {}
    )
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
        **more,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; the rest of the vocabulary are words that no text has."""
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    for token in SPECIAL:
        vocabulary[token] = len(vocabulary)
    for index in range(len(vocabulary), VOCABULARY):
        vocabulary[f"\u0120w{index:05x}"] = index
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[1], chat_template=TEMPLATE
    )


def shapes(of: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights, as a checkpoint has them."""
    hidden, head = of.hidden_size, of.hidden_size // of.num_attention_heads
    kv = of.num_key_value_heads * head
    yield "model.embed_tokens.weight", (of.vocab_size, hidden)
    for layer in range(of.num_hidden_layers):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (of.intermediate_size, hidden),
            "mlp.up_proj": (of.intermediate_size, hidden),
            "mlp.down_proj": (hidden, of.intermediate_size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (of.vocab_size, hidden)


def tensors(of: LlamaConfig, fp8: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights, norms of one; made on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, shape in shapes(of):
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
            continue
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
        if not (fp8 and "_proj" in name):
            yield name, weight.cpu()
            continue
        scale = weight.abs().max().float() / FP8_MAX
        yield name, (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).cpu()
        yield f"{name}_scale", scale.cpu()


@dataclass
class Files:
    """The checkpoint as it is written, a file whenever one is full."""

    directory: Path
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    size: int = 0
    written: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.pending[name] = tensor
        self.size += tensor.nbytes
        if sum(each.nbytes for each in self.pending.values()) > BYTES_PER_FILE:
            self.flush()

    def flush(self) -> None:
        file = f"model-{self.written:05d}.safetensors"
        save_file(self.pending, self.directory / file, metadata={"format": "pt"})
        self.weight_map |= dict.fromkeys(self.pending, file)
        self.pending, self.written = {}, self.written + 1

    def finish(self) -> None:
        self.flush()
        index = {"metadata": {"total_size": self.size}, "weight_map": self.weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write(directory: Path, size: str, fp8: bool) -> int:
    """Write the model; returns the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = config(size, fp8)
    shape.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    files = Files(directory)
    for name, tensor in tensors(shape, fp8):
        files.add(name, tensor)
    files.finish()
    return files.size


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=list(SIZES), default="8b")
    parser.add_argument("--fp8", action="store_true", help="the projections, with a scale each")
    args = parser.parse_args()
    print(f"{write(args.directory, args.size, args.fp8) / 1e9:.1f} GB of weights in {args.directory}")


if __name__ == "__main__":
    main()
