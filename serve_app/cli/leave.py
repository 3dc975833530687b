"""`leave`: this node goes. Ray is told, the pool moves what serves on it, and the command ends once the node is free.

What a spot notice, a pod's preStop hook and whoever takes a node out for repair have in common.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from serve_app.cli import cluster
from serve_app.errors import Refused

LOOK_S = 1.0


def leave(
    notice_s: Annotated[
        float, typer.Option(min=1, help="Seconds until the node is gone; streams have less than that to end.")
    ] = 660,
    reason: Annotated[str, typer.Option(help="For Ray's log.")] = "serve-app leave",
) -> None:
    """Move what serves on this node elsewhere, and wait until Ray has left it.

    Nothing new is placed here any more, which cannot be undone: start Ray anew to use the node again.
    """
    node, gcs = cluster.own_node()
    deadline = time.time() + notice_s
    cluster.drain_node(gcs, node, deadline, reason)
    typer.echo(f"node {node[:8]} goes in {notice_s:g} s: its slots move elsewhere")
    while cluster.node_is_alive(gcs, node):
        if time.time() > deadline:
            raise Refused(
                f"node {node[:8]} is not free after {notice_s:g} s: streams still run on it (`serve-app status`)"
            )
        time.sleep(LOOK_S)
    typer.echo(f"node {node[:8]} is free: Ray has left it")
