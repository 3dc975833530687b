"""The running cluster, as the command line reaches it: Ray, the coordinators, and the `Pool` deployment.

The only file of the command line that talks to Ray. Status comes from the coordinators themselves: they answer while
`Pool` is being redeployed, and no Serve handle has to be built first.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from serve_app.config import POOL_DEPLOYMENT
from serve_app.errors import NotRunning, Refused, ServeAppError

ANSWER_S = 5.0


@dataclass(frozen=True)
class Coordinator:
    """What one coordinator says; `trouble` instead of a status if it does not answer."""

    application: str
    status: dict[str, Any] | None = None
    trouble: str = ""


def connect() -> None:
    """Connect to the Ray cluster of this node, or to the one at RAY_ADDRESS. Raises NotRunning."""
    _refuse_dead_address(os.environ.get("RAY_ADDRESS", ""))
    import ray
    from ray.exceptions import AuthenticationError

    _keep_news_off_standard_output()
    try:
        with _silent_stderr():
            ray.init(address="auto", namespace="serve", logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        # Ray passes this one on as text only.
        if "AuthenticationError" in f"{error!r} {error.__cause__!r}":
            raise NotRunning(_WANTS_TOKEN) from None
        reason = " ".join(str(error).split(". ")[0].split())
        raise NotRunning(f"no Ray cluster to connect to ({reason}); start one, or set RAY_ADDRESS") from None


# Ray never sends its token to an address that was given explicitly, unless it is told to.
_WANTS_TOKEN = "the Ray cluster demands a token: set RAY_AUTH_MODE=token"


def _keep_news_off_standard_output() -> None:
    """Ray prints what befalls nodes to the standard output of all who are connected, whatever `log_to_driver`
    says: in the middle of our JSON.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    worker.listen_error_messages = lambda *_: None


@contextmanager
def _silent_stderr() -> Generator[None]:
    """Ray's C++ core writes a line a second while it tries in vain; our own message says it once."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _refuse_dead_address(address: str) -> None:
    """Ray itself tries for half a minute before it says that nobody listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError as error:
        raise NotRunning(f"no Ray cluster at RAY_ADDRESS={address}: {error.strerror or error}") from None


def own_node() -> tuple[str, str]:
    """Ray's id of this machine's node, and the address of its control plane."""
    connect()
    import ray

    context = ray.get_runtime_context()
    node, gcs = str(context.get_node_id()), str(context.gcs_address)
    ray.shutdown()  # a driver would keep the node busy, and die with it
    return node, gcs


def drain_node(gcs: str, node: str, deadline_s: float, reason: str) -> None:
    """Tell Ray that a node goes: nothing new is placed there, Serve and the pool move what runs on it.

    Args:
        deadline_s: when it is gone, in seconds since the Unix epoch.

    Raises:
        Refused: Ray does not accept it.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub has it not
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    # The kind of reason for which Ray always accepts; an idle node could be refused, as it is not.
    kind = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=gcs).drain_node(node, kind, reason, int(deadline_s * 1000))
    if not accepted:
        raise Refused(f"Ray does not drain node {node[:8]}: {why}")


def node_is_alive(gcs: str, node: str) -> bool:
    """Whether a node still belongs to the cluster; a drained one leaves by itself once nothing runs on it."""
    from ray import NodeID
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub has it not

    return bool(GcsClient(address=gcs).check_alive([NodeID.from_hex(node)], timeout=ANSWER_S)[0])


def coordinators(application: str | None, *, ledger: bool = True) -> list[Coordinator]:
    """All coordinators of one application, or of all, with or without ledger. Raises NotRunning if there is none."""
    from serve_app.pool import naming

    names = naming.coordinator_names(application)
    if not names:
        raise NotRunning(_why_none(application))
    pending: dict[str, Any] = {}
    for name in names:
        try:
            pending[name] = naming.coordinator(name).status.remote(ledger)
        except ValueError:
            continue  # gone since it was listed
    return [_answer(naming.application_of(name), answer) for name, answer in pending.items()]


def _answer(application: str, answer: Any) -> Coordinator:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return Coordinator(application, ray.get(answer, timeout=ANSWER_S))
    except GetTimeoutError:
        return Coordinator(application, trouble=f"its coordinator has not answered within {ANSWER_S:g} s")
    except RayError:
        return Coordinator(application, trouble="its coordinator died; Serve restarts it within seconds")


def _why_none(application: str | None) -> str:
    from ray import serve

    running = {name: str(app.status.value) for name, app in serve.status().applications.items()}
    if not running:
        return "no Serve application runs on this Ray cluster"
    if application is not None and application not in running:
        return f"no application '{application}'; there are: {', '.join(sorted(running))}"
    listed = ", ".join(f"{name} ({status})" for name, status in sorted(running.items()))
    return f"no pool runs here: {listed}; it has `pool: off`, is not serve_app's, or is still being built"


def ask_pool(application: str | None, method: str, *arguments: Any) -> str:
    """Call a method of the `Pool` deployment. Raises Refused with its reason, or NotRunning."""
    from ray import serve
    from ray.exceptions import RayTaskError

    from serve_app.pool import naming

    running = sorted({naming.application_of(name) for name in naming.coordinator_names(application)})
    if not running:
        raise NotRunning(_why_none(application))
    if len(running) > 1:
        raise Refused(f"several applications run: {', '.join(running)}; choose one with --app")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # a new handle introduces itself
    handle = serve.get_deployment_handle(POOL_DEPLOYMENT, running[0])
    try:
        return str(handle.options(method_name=method).remote(*arguments).result(timeout_s=2 * ANSWER_S))
    except TimeoutError:
        raise NotRunning(f"`Pool` of application '{running[0]}' has not answered: see `serve status`") from None
    except RayTaskError as error:
        cause = cast("object", error.cause)
        raise (cause if isinstance(cause, ServeAppError) else NotRunning(str(cause))) from None
