"""vLLM's load format `node_cache`: checkpoint tensors are views into the node's weight cache.

vLLM's own loader does all the rest: it takes of each tensor what its rank needs (`narrow` of a view is a view, so only
the rank's slice is copied), at the start and for `reload_weights`. Importing this module registers the format.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from serve_app.engine import staged
from serve_app.engine.arguments import NODE_CACHE
from serve_app.errors import BadCheckpoint, EngineError
from serve_app.telemetry.stages import Stage
from serve_app.weights import checkpoint
from serve_app.weights.cache import NodeCache, Weights
from serve_app.weights.views import tensors

# What vLLM raises for a tensor that does not fit the model; what else goes wrong is not the checkpoint's fault.
_MISFITS = (AssertionError, IndexError, KeyError, ValueError, RuntimeError)
# By the files they were read from: what this process uses stays in the cache for as long as it lives.
_held: dict[tuple[str, ...], Weights] = {}


@register_model_loader(NODE_CACHE)
class NodeCacheLoader(DefaultModelLoader):
    """Takes `max_bytes` and `keep_s` of `slot.node_cache` as vLLM's `model_loader_extra_config`."""

    counter_before_loading_weights: float  # for a line in vLLM's log

    def __init__(self, load_config: Any) -> None:
        settings = dict(load_config.model_loader_extra_config)
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))
        self._cache = NodeCache(**settings)
        self._at = ("", "")  # file and name of the tensor that vLLM has in hand

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As vLLM's, with errors that name the tensor. Raises BadCheckpoint."""
        try:
            super().load_weights(model, model_config)
        except torch.OutOfMemoryError:
            raise
        except _MISFITS as error:
            file, tensor = self._at
            raise BadCheckpoint(
                file or model_config.model, f"it does not fit the model: {type(error).__name__}: {error}", tensor
            ) from error

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """vLLM calls it for each source of weights, when it starts and when it reloads."""
        # Its parameters differ between versions; they are named as the source's fields.
        names = [name for name in signature(self._prepare_weights).parameters if name != "model_name_or_path"]
        _, files, are_safetensors, *_ = self._prepare_weights(
            source.model_or_path, **{name: getattr(source, name) for name in names}
        )
        if not are_safetensors or self.load_config.safetensors_load_strategy == "torchao":
            raise EngineError(
                f"the node's weight cache reads plain safetensors only, not {Path(files[0]).name}: set "
                "slot.node_cache.enabled to false"
            )
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        for file, name, tensor in tensors(self._acquired(tuple(sorted(files)))):
            self._at = str(file), name
            yield source.prefix + name, tensor
        self._at = "", ""

    def _acquired(self, files: tuple[str, ...]) -> Weights:
        start_s = time.time()
        weights = self._cache.acquire(checkpoint.load(map(Path, files)))
        if weights.read_bytes:  # the slot has not read them, or they have changed since
            staged.record_outside(Stage.WEIGHTS_CACHE, start_s, **weights.attributes)
        old = _held.get(files)
        _held[files] = weights
        if old is not None:
            old.close()
        return weights
