"""Imported once, in the forkserver: the heavy modules of EngineCore and workers, none of which may touch a GPU.

A process that has initialised CUDA cannot be forked, so this only imports, and only what does not touch CUDA as it is
imported (`tests/gpu/test_preload.py`). What is not here in some version of vLLM is imported later by the child itself:
slower, not wrong.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os

MODULES = (
    "transformers",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "xgrammar",
    # vLLM asks each of its attentions whether it would do, so all are imported.
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.flex_attention",
    # What loading compiled code takes.
    "vllm.compilation.backends",
    "vllm.compilation.passes.pass_manager",
    "vllm.compilation.piecewise_backend",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.pad_mm",
    "torch.fx.experimental.validator",
    "sympy.tensor.tensor",
    "triton.experimental.gluon",
    # Whatever the model is: it is imported to see that it is not this one.
    "vllm.model_executor.warmup.minimax_m3_msa_warmup",
)


def _import_all() -> None:
    for name in MODULES:
        _import(name)
    platforms = importlib.import_module("vllm.platforms")
    if platforms.current_platform.is_cpu():
        _import("serve_app.engine.worker")


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass  # not in this version, or not on this machine
    except Exception as error:  # a dead forkserver is worse than a slow child
        logging.getLogger(__name__).warning("forkserver: %s was not preloaded: %s", name, error)


_import_all()
# Children collect garbage often while they start (vLLM asks for it a dozen times), and each time would look at, and so
# copy, millions of objects that never go: on an H200's host 0.3-0.8 s each time (cProfile).
gc.freeze()
# When its last user is gone the server has nothing left to do; tearing down all these modules would take seconds.
atexit.register(os._exit, 0)
