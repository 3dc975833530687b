"""Whether one vLLM engine can serve two models in turn: what their directories say of shapes and tokenizers. Blocks.

vLLM switches an engine's weights (`reload_weights` from another path), not its shapes, and not its tokenizer: the one
that constrains structured outputs lives in EngineCore, out of reach. A fine-tune usually has its base's. Sampling
defaults and end-of-sequence tokens (`generation_config.json`) are read once for an engine too.
"""

from __future__ import annotations

import filecmp
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from serve_app.errors import ConfigError
from serve_app.models import local_model

if TYPE_CHECKING:
    from serve_app.config import AppConfig, ModelConfig

# Which file, what it decides, and which of its keys decide nothing here.
_WRITTEN_BY = frozenset(("transformers_version", "_name_or_path", "name_or_path", "_from_model_config"))
_JSON: dict[str, tuple[str, frozenset[str]]] = {
    # Weights that are stored in another precision are converted to the engine's as they are loaded.
    "config.json": ("architecture and shapes", frozenset(("dtype", "torch_dtype", "use_cache"))),
    "tokenizer.json": ("the tokenizer", frozenset(("padding", "truncation"))),
    "tokenizer_config.json": ("the tokenizer", frozenset(("chat_template", "model_max_length", "padding_side"))),
    "added_tokens.json": ("the tokenizer", frozenset()),
    "special_tokens_map.json": ("the tokenizer", frozenset()),
    "vocab.json": ("the tokenizer", frozenset()),
    "preprocessor_config.json": ("how images are prepared", frozenset()),
    "processor_config.json": ("how images are prepared", frozenset(("chat_template",))),
}
_BYTES = ("tokenizer.model", "merges.txt", "tekken.json")
_GENERATION = "generation_config.json"


def check(model: ModelConfig, first: ModelConfig) -> None:
    """Compare the files of `model` with those of `first`, whose engine it shares, as far as both are on this node.

    Raises:
        ConfigError: what differs, in which file, and what to do.
    """
    mine, its = local_model(model.resolved_source), local_model(first.resolved_source)
    if mine is None or its is None:
        return
    different = [
        f"{name} ({what}: {', '.join(keys)})"
        for name, (what, ignored) in _JSON.items()
        if (keys := _unlike(mine / name, its / name, ignored))
    ]
    different += [f"{name} (the tokenizer)" for name in _BYTES if not _same_bytes(mine / name, its / name)]
    # With a `generation_config` among the arguments, which must be equal, vLLM does not read the models' own.
    if "generation_config" not in model.engine_kwargs and (keys := _unlike(mine / _GENERATION, its / _GENERATION)):
        different.append(f"{_GENERATION} ({', '.join(keys)}; not read with engine_kwargs.generation_config: vllm)")
    if different:
        raise ConfigError(
            f"models.{model.id}.engine_of: it cannot share the engine of {first.id}, from which it differs in "
            f"{'; '.join(different)}: make them equal, or leave engine_of out, which gives it an engine of its own"
        )


def check_all(config: AppConfig) -> None:
    """`check` for every model that shares an engine. Raises ConfigError with a line for each that does not fit."""
    first = {model.id: model for model in config.served}
    problems: list[str] = []
    for model in config.served:
        if model.engine_of and model.engine == "vllm":
            try:
                check(model, first[model.engine_of])
            except ConfigError as problem:
                problems.append(str(problem))
    if problems:
        raise ConfigError("\n".join(problems))


def chat_template(model: ModelConfig, first: ModelConfig) -> str | None:
    """The chat template that comes with a model's tokenizer; None if neither of the two has one.

    Raises:
        ConfigError: only the other one has one, which vLLM would use instead.
    """
    mine = _tokenizer_template(model)
    if mine is None and _tokenizer_template(first) is not None:
        raise ConfigError(
            f"models.{model.id} has no chat template, but {first.id}, whose engine it shares, has one: set "
            f"models.{model.id}.engine_kwargs.chat_template, or leave engine_of out"
        )
    return mine


def _tokenizer_template(model: ModelConfig) -> str | None:
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        local_model(model.resolved_source), trust_remote_code=bool(model.engine_kwargs.get("trust_remote_code"))
    )
    return str(tokenizer.get_chat_template()) if tokenizer.chat_template else None


def _unlike(mine: Path, its: Path, ignored: frozenset[str] = frozenset()) -> list[str]:
    """The keys in which two JSON files differ; one that is not there has none."""
    a, b = _read(mine), _read(its)
    return sorted(key for key in (a.keys() | b.keys()) - ignored - _WRITTEN_BY if a.get(key) != b.get(key))


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    found: object = json.loads(file.read_text())
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"": found}


def _same_bytes(mine: Path, its: Path) -> bool:
    if mine.exists() and its.exists():
        return filecmp.cmp(mine, its, shallow=False)
    return mine.exists() == its.exists()
