"""Before an engine is built: is this node fit for it? Minutes of start-up must not end in what was known before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.config import AppConfig, ModelConfig, NcclConfig, Tier
from serve_app.engine import caches
from serve_app.errors import UnfitNode
from serve_app.gpu import node, placed, survey
from serve_app.gpu.facts import NodeFacts, RayNode, Wanted
from serve_app.gpu.requirements import check, errors
from serve_app.live import LiveSettings
from serve_app.models import home, problems, weight_files, weights_bytes
from serve_app.pool.api_keys import KEYS_FILE

# For a task on each node; most of it is a worker process that has to be started.
NODE_S = 40.0
T = TypeVar("T")


def ensure_fit(config: AppConfig, live: LiveSettings | None) -> None:
    """Run all checks on this node, and on the others of this slot. Blocks: a tenth of a second, or for their tasks.

    Args:
        live: None where nobody sleeps (`pool: off`) or the settings are not known: then one slot of any tier is assumed
            to be all there is.

    Raises:
        UnfitNode: the first node that is not fit, with every problem, and what to do about each.
    """
    here, nodes = placed.own_node(), ray_nodes()
    ask = {
        key: (nodes[key], config.served, config.slot.nccl)
        for key in {here, *(place.node for place in placed.own_rank_places())}
        if key in nodes
    }
    answers: dict[str, NodeFacts | str] = {here: gather(*ask.pop(here))}
    for node_id, facts in (answers | on_every_node(gather, ask)).items():
        if isinstance(facts, str):
            raise UnfitNode(node_id[:8], (facts,))
        problems = errors(check(facts, wanted(config, live)))
        if problems:
            raise UnfitNode(facts.network.node, problems)


def wanted(config: AppConfig, live: LiveSettings | None) -> Wanted:
    """What a configuration asks of the nodes."""
    models = config.served
    if not config.pool:
        return Wanted(config.slot, models, Tier.READY, slots=1)
    if live is None:
        return Wanted(config.slot, models, Tier.HOST, slots=1)
    tiers = {live.model(model.id).tier for model in models}
    # Several models take turns, so that each of them sleeps at times.
    tier = min(tiers) if len(models) == 1 else Tier.HOST if tiers - {Tier.DISK} else Tier.DISK
    return Wanted(config.slot, models, tier, live.slots.max, live.slots.min)


def gather(ray_node: RayNode, models: Sequence[ModelConfig], nccl: NcclConfig) -> NodeFacts:
    """All facts about this node; `serve-app doctor` runs it on every node."""
    weights = [weights_bytes(model) for model in models if not model.engine_of]
    known = [found for found in weights if found is not None]
    return node.gather(ray_node, nccl, sum(known) if len(known) == len(weights) else None)


def examine(
    ray_node: RayNode,
    models: Sequence[ModelConfig],
    nccl: NcclConfig,
    http_port: int,
    serve_environment: Mapping[str, str],
) -> NodeFacts:
    """As `gather`, and what takes seconds: disk, files, ports, everybody's processes.

    Args:
        serve_environment: what a config file gives Serve's processes beside what Ray has.
    """
    effective = {**(survey.rays_environment() or {}), **serve_environment}
    looked = survey.survey(
        models={model.resolved_source: problems(model) for model in models if model.engine == "vllm"},
        files=[file for model in models for file in weight_files(model)],
        scratch=home(),
        caches=caches.filled_by(),
        http_port=http_port,
        keys_file=effective.get(KEYS_FILE, ""),
    )
    return replace(gather(ray_node, models, nccl), survey=looked)


def ray_nodes() -> dict[str, RayNode]:
    """Every living node of the cluster by its Ray id."""
    return {
        entry["NodeID"]: RayNode(
            address=entry["NodeManagerAddress"],
            gpus=entry["Resources"].get("GPU", 0),
            memory_bytes=int(entry["Resources"].get("memory", 0)),
            object_store_bytes=int(entry["Resources"].get("object_store_memory", 0)),
        )
        for entry in ray.nodes()
        if entry["Alive"]
    }


def on_every_node(work: Callable[..., T], arguments: dict[str, tuple[Any, ...]]) -> dict[str, T | str]:
    """Run `work` as a task on each of these nodes at the same time.

    Args:
        arguments: by Ray's node id.

    Returns:
        By node id what it returned, or why there is nothing.
    """
    # A runtime_env of its own keeps it out of the spare worker with vLLM imported, which is for the node's next slot.
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": {"SERVE_APP_TASK": work.__name__}})(work)
    running: dict[str, Any] = {
        node_id: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(*given)
        for node_id, given in arguments.items()
    }
    if running:
        ray.wait(list(running.values()), num_returns=len(running), timeout=NODE_S)
    return {node_id: _outcome(answer) for node_id, answer in running.items()}


def _outcome(answer: Any) -> Any:
    try:
        return ray.get(answer, timeout=0)
    except GetTimeoutError:
        return f"it has not answered within {NODE_S:g} s"
    except RayTaskError as error:
        return " ".join(str(cast("object", error.cause)).split())
    except RayError as error:
        return " ".join(str(error).split())
