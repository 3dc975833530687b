"""How engine processes start: forked from a server that has imported vLLM, and never outliving their parent.

vLLM spawns EngineCore and workers, and each imports vLLM for 6-20 s. A server imports it once per node (see `keeper`):
while the node's first slot does the same, and long before every later one needs it. Both ways of starting put an
engine's processes into one process group (see `processes`) and end them when the process that started them is gone,
even by SIGKILL, which vLLM does not.
"""

from __future__ import annotations

import contextvars
import fcntl
import hashlib
import importlib
import importlib.util
import logging
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.reduction
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any

from serve_app import keeping
from serve_app.engine import keeper
from serve_app.errors import EngineError
from serve_app.gpu import nvml
from serve_app.node_folder import node_folder

logger = logging.getLogger(__name__)

# Where vLLM asks for its multiprocessing context.
_HOOKS = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
_PRELOAD = "serve_app.engine.preload"
# A server that nobody uses stays this long: a slot that is replaced finds it warm.
GRACE_S = 15.0
# Variables (by prefix) that modules read as they are imported; everything else a child gets from who asks for it. None
# that vLLM itself sets as it is imported (PYTORCH_NVML_BASED_CUDA_CHECK does so): a slot whose process has imported it
# before would get another server than one that has not.
READ_AT_IMPORT = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHDYNAMO_", "TORCH_"),
    *("HF_", "TRANSFORMERS_", "VLLM_LOGGING_", "VLLM_CONFIGURE_", "VLLM_PLUGINS"),
)

_context: multiprocessing.context.BaseContext | None = None
_in_engine = False
_users = 0
_address = ""
_hold: IO[str] | None = None
_lock = threading.Lock()
# Process groups (= EngineCore pids) started in this context; a thread of `asyncio.to_thread` shares its caller's list.
_started: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("started_groups", default=None)


def acquire() -> None:
    """Use this node's server; start it where there is none. Blocks for a tenth of a second; its imports take longer.

    Raises:
        EngineError: it cannot be started; the message names its log.
    """
    global _users, _hold, _address
    with _lock:
        if _hold is None:
            # Once: vLLM adds to the environment as it is imported, and this process has its server by then.
            _address = address_of_server()
            _hold = Path(f"{_address}.users").open("a+")  # noqa: SIM115  (held for as long as this process uses it)
            fcntl.flock(_hold, fcntl.LOCK_SH)  # a keeper that is about to end is waited for here
        address = _address
        with Path(f"{address}.start").open("w") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            if not is_alive(address):
                _start_keeper(address)
        _connect_to(address)
        _users += 1


def release() -> None:
    """Undo one `acquire`; the node's last one ends the server, `GRACE_S` later."""
    global _users, _hold
    with _lock:
        _users -= 1
        if _users == 0 and _hold is not None:
            _hold.close()
            _hold = None


def address_of_server() -> str:
    """Path of the socket: per user, and per what decides how the modules come out that the server imports."""
    return str(node_folder() / _server_key())


def _server_key() -> str:
    """Equal for processes that can share one server: the same code, imported under the same environment."""
    read = sorted((k, v) for k, v in os.environ.items() if k.startswith(READ_AT_IMPORT))
    vllm = importlib.util.find_spec("vllm")
    code = (sys.executable, __file__, vllm.origin if vllm else "")
    return hashlib.sha256(repr((code, read)).encode()).hexdigest()[:16]


def is_alive(address: str) -> bool:
    """Whether a server listens there."""
    return keeping.is_held(Path(f"{address}.alive"))


def _start_keeper(address: str) -> None:
    command = [sys.executable, keeper.__file__, address, str(GRACE_S), _PRELOAD]
    if subprocess.run(command, env=server_environment(), stdin=subprocess.DEVNULL).returncode:
        raise EngineError(f"the forkserver cannot be started; see {address}.log, or set slot.forkserver to false")


def server_environment() -> dict[str, str]:
    """What the server is started with."""
    # All GPUs: which of them a child sees is said by the slot that asks for it.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with suppress(Exception):  # no NVIDIA driver
        # Else FlashInfer asks CUDA as it is imported, and a process that has initialised CUDA cannot be forked.
        environment.setdefault("FLASHINFER_CUDA_ARCH_LIST", " ".join(nvml.compute_capabilities()))
    return environment


def _connect_to(address: str) -> None:
    """Make multiprocessing fork from that server instead of starting one of its own."""
    server: Any = multiprocessing.forkserver._forkserver
    server._forkserver_address = address
    if server._forkserver_alive_fd is None:
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # handed to children, which only hand it on
    server.ensure_running = resource_tracker.ensure_running


def install(fork: bool) -> None:
    """Make vLLM, already imported, start its processes through this module; without `fork` it spawns them as usual.

    Where this version of vLLM keeps its hooks elsewhere, a warning is logged and vLLM's own way stays.
    """
    global _context
    modules: list[Any] = [importlib.import_module(name) for name in _HOOKS]
    if not all(hasattr(module, "get_mp_context") for module in modules):
        logger.warning("this vLLM has no get_mp_context in %s: its processes start its own, slower way", _HOOKS)
        return
    _context = _ForkContext() if fork else _SpawnContext()
    for module in modules:
        module.get_mp_context = _get_context


@contextmanager
def collecting(groups: list[int]) -> Iterator[None]:
    """Append to `groups` the process group of each engine process that is started inside."""
    token = _started.set(groups)
    try:
        yield
    finally:
        _started.reset(token)


def _get_context() -> Any:
    return _context


class _Descriptor:
    """A file descriptor that a child gets with the object that holds this."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _Descriptor._received, (multiprocessing.reduction.DupFd(self.fd),)

    @staticmethod
    def _received(passed: Any) -> _Descriptor:
        return _Descriptor(passed.detach())


class _EngineProcess:
    """What both start methods share; stands before multiprocessing's own process class."""

    pid: int
    _forked = False
    _output: tuple[_Descriptor, ...] = ()

    def start(self) -> None:
        # vLLM changes the environment around single starts, and a forked child would see the server's own.
        self._environ = dict(os.environ)
        self._group = os.getpgrp() if _in_engine else 0
        if self._forked:
            self._output = (_Descriptor(1), _Descriptor(2))  # what it logs belongs to its slot, not to the server
        super().start()  # type: ignore[misc]
        groups = _started.get()
        if groups is not None:
            groups.append(self.pid)

    def run(self) -> None:
        global _in_engine
        _in_engine = True
        os.environ.clear()
        os.environ.update(self._environ)
        _end_with_parent()
        with suppress(PermissionError):  # another session: then only accounting by group is lost
            os.setpgid(0, self._group)
        for target, passed in zip((1, 2), self._output, strict=False):
            os.dup2(passed.fd, target)
        if self._forked:
            _apply_openmp()
            _share_server()
        install(self._forked)
        super().run()  # type: ignore[misc]


class _ForkProcess(_EngineProcess, multiprocessing.context.ForkServerProcess):
    _forked = True


class _SpawnProcess(_EngineProcess, multiprocessing.context.SpawnProcess):
    pass


class _ForkContext(multiprocessing.context.ForkServerContext):
    Process = _ForkProcess


class _SpawnContext(multiprocessing.context.SpawnContext):
    Process = _SpawnProcess


def _end_with_parent() -> None:
    """Kill this process once the one that started it is gone (a forked one's parent is the server, not that)."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()


def _apply_openmp() -> None:
    """Apply what OpenMP has read from its environment too early, in the server."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        import torch

        torch.set_num_threads(int(threads))
    places = re.fullmatch(r"\{(\d+(?:,\d+)*)\}", os.environ.get("OMP_PLACES", ""))
    if places:
        os.sched_setaffinity(0, {int(cpu) for cpu in places[1].split(",")})


def _share_server() -> None:
    """Fork this process's own children from the same server; Python would start a second one."""
    server: Any = getattr(multiprocessing.forkserver, "_forkserver", None)
    if getattr(server, "_forkserver_address", None):
        server.ensure_running = lambda: None
