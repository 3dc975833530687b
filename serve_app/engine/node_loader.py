"""vLLM's load format `node_cache`: checkpoint tensors are views into the node's weight cache.

vLLM's own loader does all the rest: it takes of each tensor what its rank needs (`narrow` of a view is a view, so only
the rank's slice is copied), at the start and for `reload_weights`. Importing this module registers the format.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from serve_app.weights.registered import DirectCopies, Registered

# What vLLM raises for a tensor that does not fit the model; what else goes wrong is not the checkpoint's fault.
_MISFITS = (AssertionError, IndexError, KeyError, ValueError, RuntimeError)


@dataclass
class _Held:
    """Weights that this process uses: they stay in the cache for as long as it lives, or until others replace them."""

    weights: Weights
    registered: Registered | None = None  # where the worker has a GPU


# By the files they were read from.
_held: dict[tuple[str, ...], _Held] = {}
# Of this process's GPU worker, if it is one.
_copies: DirectCopies | None = None


def use_gpu(copies: DirectCopies, load_config: Any, directory: str) -> None:
    """From now on weights go to the GPU by `copies`; those in `directory` get ready while vLLM builds the model."""
    global _copies
    _copies = copies
    files = tuple(str(path) for path in checkpoint.find(Path(directory)))
    if files:
        NodeCacheLoader(load_config).acquire(files)


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
        held = self.acquire(tuple(sorted(files)))
        image = held.weights.mapped()
        if held.registered is not None:
            held.registered.hand_out(image)
        for file, name, tensor in tensors(held.weights, image):
            self._at = str(file), name
            yield source.prefix + name, tensor
        self._at = "", ""

    def acquire(self, files: tuple[str, ...]) -> _Held:
        """The weights in these files, as they are now."""
        start_s = time.time()
        weights = self._cache.acquire(checkpoint.load(map(Path, files)))
        if weights.read_bytes:  # the slot has not read them, or they have changed since
            staged.record_outside(Stage.WEIGHTS_CACHE, start_s, **weights.attributes)
        old = _held.get(files)
        if old is not None and old.weights.key == weights.key:
            weights.close()
            return old
        if old is not None:
            if _copies is not None and old.registered is not None:
                _copies.remove(old.registered)
            old.weights.close()
        _held[files] = _Held(weights, _copies.add(weights) if _copies is not None else None)
        return _held[files]
