"""The composition root: configuration in, Serve application out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from serve_app.config import POOL_DEPLOYMENT, SLOT_DEPLOYMENT, AppConfig, parse_app
from serve_app.engine import alike
from serve_app.gpu.placement import Placement, place
from serve_app.live import parse_live
from serve_app.models import ensure_model
from serve_app.pool import rollout
from serve_app.pool.naming import COORDINATOR

if TYPE_CHECKING:
    from ray.serve import Application

# Serve's own bounds never bind: `Pool`'s live slots.min and slots.max do, and changing Serve's would roll every slot.
SERVE_MAX_REPLICAS = 1000


def build(args: dict[str, Any]) -> Application:
    """The Serve application for the `args` of a config file or of the command line.

    Raises:
        ConfigError: naming every wrong key, before anything is started.
        ModelUnavailable: the model's files cannot be had.
    """
    config = parse_app(args)
    _prepare_here(config)
    alike.check_all(config)
    if config.pool:
        rollout.make_way(args)
    slots = _slot_deployment(config)
    plain = config.model_dump(mode="json")
    if not config.pool:
        return slots.bind(plain)
    return slots.bind(plain, _pool_deployment().bind(plain))


def _prepare_here(config: AppConfig) -> None:
    """With `serve run` on one's own machine, get the model now and show a bar; elsewhere each slot gets it itself."""
    import ray

    if ray.is_initialized() or "RAY_ADDRESS" in os.environ:
        return
    for model in config.served:
        if model.engine == "vllm":
            ensure_model(model.resolved_source)


def _pool_deployment() -> Any:
    from ray import serve

    from serve_app.pool.control import PoolControl

    return serve.deployment(
        PoolControl, name=POOL_DEPLOYMENT, num_replicas=1, user_config={}, ray_actor_options={"num_cpus": 0}
    )


def _slot_deployment(config: AppConfig) -> Any:
    from ray import serve

    from serve_app.slot.deployment import Slot, SlotIngress

    placement = place(config.slot)
    options: dict[str, Any] = {
        "name": SLOT_DEPLOYMENT,
        "max_ongoing_requests": config.slot.max_ongoing_requests + config.slot.flex_requests,
        "graceful_shutdown_timeout_s": config.slot.shutdown_grace_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": config.slot.health_check_period_s,
        "ray_actor_options": placement.actor_options,
        "placement_group_bundles": placement.bundles,
        "placement_group_strategy": placement.strategy,
    }
    if config.slot.labels:
        options["placement_group_bundle_label_selector"] = [config.slot.labels]  # one for all bundles
    if config.pool:
        options |= _pool_options(config, placement)
    return serve.deployment(serve.ingress(SlotIngress())(Slot), **options)


def _pool_options(config: AppConfig, placement: Placement) -> dict[str, Any]:
    """What makes a pool of plain replicas: coordinator, router and policy, all of them ours."""
    import ray
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, DeploymentActorConfig, RequestRouterConfig

    from serve_app.pool.coordinator import PoolCoordinator

    coordinator = DeploymentActorConfig(
        name=COORDINATOR,
        actor_class=ray.remote(PoolCoordinator),
        init_kwargs={
            "live": parse_live(None, config).model_dump(mode="json"),
            "models": config.model_names,
            "hard": config.slot.max_ongoing_requests,
            "slot_nodes": placement.nodes,
            "labels": config.slot.labels,
        },
        # On the head node, beside Serve's controller, which restarts it: another node may be gone for long before Ray
        # notices, and with the coordinator on it nothing would be promoted meanwhile.
        actor_options={"num_cpus": 0, "resources": {HEAD_NODE_RESOURCE_NAME: 0.001}},
    )
    return {
        "deployment_actors": [coordinator],
        "request_router_config": RequestRouterConfig(request_router_class="serve_app.pool.router.PoolRouter"),
        # No initial_replicas: at every redeployment Serve would set the target to it, whatever there is.
        "autoscaling_config": AutoscalingConfig(
            min_replicas=1,
            max_replicas=SERVE_MAX_REPLICAS,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=AutoscalingPolicy(policy_function="serve_app.pool.policy.PoolPolicy"),
        ),
    }
