"""Where the coordinators are: one per code version of the slot deployment, so two for a moment in a rollout."""

from __future__ import annotations

import ray
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from ray.serve._private.utils import get_deployment_actor_name
from ray.serve.context import ReplicaContext

from serve_app.config import SLOT_DEPLOYMENT

COORDINATOR = "coordinator"


def coordinator_names(app_name: str | None = None) -> list[str]:
    """Actor names of all live coordinators, of one application or of all."""
    prefix = SERVE_DEPLOYMENT_ACTOR_PREFIX + (f"{app_name}::" if app_name is not None else "")
    suffix = f"::{COORDINATOR}"
    listed = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in listed if actor["namespace"] == SERVE_NAMESPACE]
    return sorted(name for name in names if name.startswith(prefix) and name.endswith(suffix))


def application_of(coordinator_name: str) -> str:
    """The application that a coordinator, known by its actor name, belongs to."""
    return coordinator_name.removeprefix(SERVE_DEPLOYMENT_ACTOR_PREFIX).split("::", 1)[0]


def own_coordinator(replica: ReplicaContext) -> str:
    """Actor name of the coordinator that this replica's code version belongs to; it survives the coordinator."""
    assert replica.code_version is not None, "Serve gives every replica its code version"
    return get_deployment_actor_name(replica.replica_id.deployment_id, COORDINATOR, replica.code_version)


def placement_groups(application: str) -> str:
    """What the names of the placement groups of an application's slots begin with: each has its replica's name."""
    return ReplicaID("", DeploymentID(SLOT_DEPLOYMENT, application)).to_full_id_str()


def coordinator(name: str) -> ray.actor.ActorHandle:
    """Handle of a coordinator by actor name. Raises ValueError while there is none of that name."""
    return ray.get_actor(name, namespace=SERVE_NAMESPACE)
