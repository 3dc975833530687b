"""Keep one Ray worker process warm on this node, with vLLM imported, for the next slot that starts here.

Importing vLLM takes 6-20 s and is the longest stage of a cold start. Ray reuses no worker that has run something, so
the raylet is asked for a new one (the RPC behind Ray's own prestarting), which imports vLLM as `serve_app.engine.spare`
says. Measured on two cores: an actor with vLLM imported 0.06 s after it was wanted, instead of 6-7 s. It costs some
0.6 GB of memory. Where Ray was started without RAY_preload_python_modules=serve_app.engine.spare, nothing is gained.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import ray

from serve_app import PRELOAD_MODULE
from serve_app.engine import caches, forkserver, spare

log = logging.getLogger("ray.serve")

# Torch chooses a place for its own cache as it is imported, if nobody has before.
_READ_AT_IMPORT = (*forkserver.READ_AT_IMPORT, *caches.environment())
# Workers that idle for longer than this are up to Ray again.
_KEEP_S = 30 * 24 * 3600
_RPC_S = 10.0
_TAKE_ORDER_S = 30.0


def taken() -> None:
    """This process, a spare until now or not, has become a slot."""
    spare.taken(os.getppid())


def ensure() -> None:
    """See to it that this node has a spare. Blocks; failing costs nothing but time at the next cold start."""
    raylet = os.getppid()
    if spare.waiting(raylet):
        return
    order = spare.order(raylet, read_at_import())
    try:
        _prestart_worker()
    except Exception as error:  # not an interface that Ray promises to keep
        log.warning("no spare worker for the next slot of this node: %s", error)
        order.unlink(missing_ok=True)
        return
    if not _is_gone(order, _TAKE_ORDER_S):
        order.unlink(missing_ok=True)
        log.warning(
            "the next slot of this node will import vLLM by itself: start Ray with RAY_preload_python_modules=%s",
            PRELOAD_MODULE,
        )


def read_at_import() -> dict[str, str]:
    """Variables that must be set before vLLM is imported. No secrets (HF_TOKEN): they go through a file."""
    read = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
    return {name: value for name, value in read.items() if not name.endswith(("TOKEN", "KEY", "SECRET", "PASSWORD"))}


def _prestart_worker() -> None:
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc, runtime_environment_pb2

    context = ray.get_runtime_context()
    [node] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    channel: Any = init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    request = node_manager_pb2.PrestartWorkersRequest(
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=runtime_environment_pb2.RuntimeEnvInfo(
            serialized_runtime_env=context.get_runtime_env_string() or "{}"  # a slot inherits the controller's
        ),
        keep_alive_duration_secs=_KEEP_S,
        num_workers=1,
    )
    try:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_RPC_S)
    finally:
        channel.close()


def _is_gone(path: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not path.exists()
