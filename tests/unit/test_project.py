"""What the files around the package promise each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import serve_app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lock() -> dict[str, str]:
    """Versions by package, as requirements/cpu.txt and torch.txt pin them."""
    files = [(ROOT / "requirements" / name).read_text() for name in ("cpu.txt", "torch.txt")]
    return dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(files), re.M))


def test_lock_has_hashes(lock: dict[str, str]) -> None:
    """Of every package but torch, whose file depends on the machine's index (tools/lock.py says why)."""
    entries = re.split(r"^(?=\w)", (ROOT / "requirements" / "cpu.txt").read_text(), flags=re.M)[1:]
    assert len(entries) == len(lock) - 1
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec"])
def test_lock_without_cuda_builds(lock: dict[str, str], package: str) -> None:
    """The packages whose PyPI builds break a CPU torch are not in the lock."""
    assert package not in lock


def test_lock_covers_what_the_project_asks_for(project: dict[str, Any], lock: dict[str, str]) -> None:
    """Every dependency of the project and of its extras cpu and dev is pinned."""
    extras = project["project"]["optional-dependencies"]
    asked = [*project["project"]["dependencies"], *extras["cpu"], *extras["dev"]]
    names = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in asked}
    assert names <= set(lock)


def test_lock_names_no_index(lock: dict[str, str]) -> None:
    """Which package index to use is the machine's setting, not the repository's."""
    assert lock
    assert "://" not in (ROOT / "requirements" / "cpu.txt").read_text()


def test_lock_torch_pin_fits_cpu_and_cuda_builds(lock: dict[str, str]) -> None:
    """The torch pin carries no local version, so that any index's CPU build of it satisfies it."""
    assert "+" not in lock["torch"]


def test_extras_exist(project: dict[str, Any]) -> None:
    """The extras that the documentation names are there."""
    assert set(project["project"]["optional-dependencies"]) == {"cpu", "gpu", "dev"}


def test_version_is_stated_once_and_the_same(project: dict[str, Any]) -> None:
    """The package, its metadata and the changelog agree on the version."""
    version = project["project"]["version"]
    assert serve_app.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("target", ["install", "serve", "test", "check", "notebooks", "lock", "audit", "clean"])
def test_makefile_has_target(target: str) -> None:
    """The commands that the documentation names exist."""
    assert make_plan(target)


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ([], "serve run serve_app:app"),
        (["MODEL=org/name"], "serve run serve_app:app model=org/name"),
        (["CONFIG=configs/x.yaml"], "serve run configs/x.yaml"),
        (["CONFIG=configs/x.yaml", "GPU=1"], "serve run configs/x.yaml"),
    ],
)
def test_make_serve_runs(variables: list[str], command: str) -> None:
    """MODEL becomes an argument of the application, CONFIG replaces it by a Serve config file."""
    assert make_plan("serve", *variables)[-1].rstrip().endswith(command)


def test_make_serve_with_a_file_preloads_the_spare_worker() -> None:
    """`serve run FILE` starts Ray before it imports anything of ours, and only a raylet's environment counts."""
    [name] = serve_app.RAY_ENVIRONMENT
    assert f"{name}={serve_app.RAY_ENVIRONMENT[name]} serve run" in make_plan("serve", "CONFIG=configs/x.yaml")[-1]


@pytest.mark.parametrize(
    ("variables", "installed"), [([], ["torch.txt", "cpu.txt"]), (["GPU=1"], ["gpu.txt"])], ids=["cpu", "gpu"]
)
def test_make_installs_the_packages_of_one_kind(tmp_path: Path, variables: list[str], installed: list[str]) -> None:
    """Without a resolver, and all but torch's CPU build by its hash."""
    plan = make_plan("install", *variables, folder=outside(tmp_path))
    lines = [line for line in plan if " -r " in line]
    assert [line.rpartition(" -r requirements/")[2] for line in lines] == installed
    assert all("--no-deps" in line for line in lines)
    assert all("--require-hashes" in line for line in lines if not line.endswith("torch.txt"))


@pytest.mark.parametrize(("there", "variables"), [("cpu", ["GPU=1"]), ("gpu", [])])
def test_make_puts_no_kind_on_top_of_the_other(tmp_path: Path, there: str, variables: list[str]) -> None:
    """Both own files in vllm/ and torch/: nothing is installed, and the message says what to do."""
    folder = outside(tmp_path)
    (folder / ".venv").mkdir()
    (folder / ".venv" / f".installed-{there}.stamp").touch()
    done = run_make(folder, "install", *variables)
    assert done.returncode != 0
    assert "make clean" in done.stderr and "Installing" not in done.stdout


def test_make_refuses_another_python_for_gpus(tmp_path: Path) -> None:
    """The lock has the files of one Python on one machine only."""
    folder = outside(tmp_path)
    makefile = folder / "Makefile"
    makefile.write_text(makefile.read_text().replace('("x86_64", 3, 11)', '("x86_64", 2, 7)'))
    done = run_make(folder, "install", "GPU=1")
    assert done.returncode != 0
    assert "x86_64 with Python 3.11" in done.stderr and not (folder / ".venv").exists()


def test_make_serve_on_gpus_needs_a_file(tmp_path: Path) -> None:
    """The default model's settings are for a CPU."""
    folder = outside(tmp_path)
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".installed-gpu.stamp").touch()
    done = run_make(folder, "serve", "GPU=1")
    assert done.returncode != 0
    assert "CONFIG=configs/one-gpu.yaml" in done.stderr


def outside(folder: Path) -> Path:
    """A copy of what `make install` reads, without an environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return folder


def make_plan(*arguments: str, folder: Path = ROOT) -> list[str]:
    """Return the commands that make would run."""
    plan = run_make(folder, "--dry-run", *arguments)
    assert plan.returncode == 0, plan.stderr
    return plan.stdout.splitlines()


def run_make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Not as part of the make that runs these tests: it would hand down its own flags.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    # Without pip: where a refusal is broken, a test fails and installs nothing.
    command = ["make", f"PYTHON={sys.executable}", "PIP=false", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
