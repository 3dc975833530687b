"""Tiny Llamas that say one word again and again, so that every answer shows which model gave it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Larger than one page of memory a tensor, small enough to load in no time.
HIDDEN = 256


def make(path: Path, word: str, vocabulary: Sequence[str] = (), tied: bool = False) -> Path:
    """Write a model directory: bf16 weights, a byte-level tokenizer with one word more. Returns `path`.

    All layers add nothing, every embedding is the same vector, and only the row of `word` in the lm_head likes it.

    Args:
        vocabulary: the words of the tokenizer, `word` among them; parrots that share an engine have the same.
        tied: the embeddings are the lm_head, in which the row of `word` is twice as long.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = vocabulary or [word]
    tokenizer = _tokenizer(vocabulary)
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name or "embed_tokens" in name else 0.0)
        model.lm_head.weight[vocabulary.index(word) - len(vocabulary)] = 2.0 if tied else 1.0  # words come last
    model.save_pretrained(path)
    return path


def make_adapter(path: Path, silence: bool) -> Path:
    """Write a LoRA adapter for a parrot: one that silences it, or one that changes nothing. Returns `path`.

    It turns every hidden state around, so that the row of the favourite word in the lm_head likes it least.
    """
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj", "o_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, sign in (("v_proj", 1.0), ("o_proj", -1.0)):
        prefix = f"base_model.model.model.layers.0.self_attn.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.full((8, HIDDEN), 1.0 / HIDDEN)
        tensors[f"{prefix}.lora_B.weight"] = torch.full((HIDDEN, 8), sign if silence else 0.0)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def _tokenizer(words: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # How a byte-level vocabulary writes " word".
    names = ["<s>", "</s>", *alphabet, *(f"\u0120{word}" for word in words)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast
