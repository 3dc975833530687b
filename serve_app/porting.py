"""From a configuration of Ray Serve LLM (`ray.serve.llm`, 2.60) to one of ours. Pure: values in, values and notes out.

What has no counterpart is never dropped in silence: each such key becomes a note that says what to do instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from serve_app import SERVE_ENVIRONMENT
from serve_app.checking import check_config
from serve_app.config import POOL_DEPLOYMENT, SLOT_DEPLOYMENT
from serve_app.errors import ConfigError

BUILDER = "ray.serve.llm:build_openai_app"
GPUS_ON_A_NODE = 8
# Keys that both configurations have with the same meaning, by where they stand in ours.
_OF_THE_FILE = ("proxy_location", "http_options", "grpc_options", "logging_config")
_OF_THE_SLOT_DEPLOYMENT = ("health_check_timeout_s", "logging_config", "graceful_shutdown_wait_loop_s")
_OF_SLOT = {"graceful_shutdown_timeout_s": "shutdown_grace_s", "health_check_period_s": "health_check_period_s"}
# What an LLMConfig or its deployment_config may say that has no counterpart: what to do instead.
_NO_COUNTERPART = {
    "lora_config": "adapters stand in engine_kwargs (enable_lora, lora_modules) or in one model each",
    "accelerator_config": "a slot takes GPUs, of whatever kind the nodes have",
    "experimental_configs": "streams are merged under load by slot.merge_events; there is no separate ingress",
    "callback_config": "there are no callbacks",
    "server_cls": "slots run vLLM's own server",
    "log_engine_metrics": "`serve-app status` shows every engine's load",
    "user_config": "live settings stand in Pool.user_config",
    "request_router_config": "the pool has its own router: sessions stay on a slot within a load slack",
    "placement_group_bundles": "a slot's placement follows from slot.gpus and slot.nodes",
    "placement_group_strategy": "a slot's placement follows from slot.gpus and slot.nodes",
    "initial_replicas": "min_active slots are active as soon as they have started",
    "upscale_delay_s": "a standby is promoted in milliseconds, without a delay",
    "downscale_delay_s": "slots.demote_after_s (10 s): a demoted slot only sleeps, so it need not be minutes",
    "upscaling_factor": "the pool promotes as many standbys as requests need",
    "downscaling_factor": "the pool demotes one slot at a time",
    "metrics_interval_s": "the coordinator is told at every change",
    "look_back_period_s": "the coordinator is told at every change",
    "smoothing_factor": "the pool promotes as many standbys as requests need",
}
_AUTOSCALING = ("min_replicas", "max_replicas", "target_ongoing_requests")


@dataclass
class Ported:
    """Our config file, and what its reader should know; each note begins with the key that it is about."""

    config: dict[str, Any]
    notes: list[str] = field(default_factory=list[str])


def port(config: Mapping[str, Any]) -> Ported:
    """Our configuration for theirs: a Serve config file with BUILDER in it, or a single LLMConfig.

    Raises:
        ConfigError: it is neither, or what it asks for cannot be put into our terms; naming the key.
    """
    ported = Ported({"controller_options": {"runtime_env": {"env_vars": dict(SERVE_ENVIRONMENT)}}})
    if "model_loading_config" in config:
        applications, rest = [{"args": {"llm_configs": [config]}}], {}
    else:
        applications, rest = _mappings(config.get("applications")), dict(config)
        rest.pop("applications", None)
    _port_file(rest, ported)
    ours = [entry for entry in applications if "llm_configs" in (entry.get("args") or {})]
    if not ours:
        raise ConfigError(f"neither an LLMConfig nor an application with args.llm_configs ({BUILDER})")
    ported.config["applications"] = []
    for application in applications:
        if application in ours:
            _port_application(application, ported)
        else:
            ported.config["applications"].append(application)
    problems = check_config(ported.config).problems
    if problems:
        raise ConfigError("\n".join(problems))
    return ported


def _port_file(rest: dict[str, Any], ported: Ported) -> None:
    for key, value in rest.items():
        if key not in _OF_THE_FILE:
            ported.notes.append(f"{key}: not taken over")
            continue
        ported.config[key] = dict(value) if isinstance(value, dict) else value
    http = ported.config.get("http_options")
    if isinstance(http, dict) and http.pop("request_timeout_s", None) is not None:
        ported.notes.append("http_options.request_timeout_s: left out, it cuts long streams; hold bounds waiting")


def _port_application(application: Mapping[str, Any], ported: Ported) -> None:
    """One application of ours for each model: they shared an ingress, and each had replicas of its own."""
    args = application["args"]
    ported.notes += [f"args.{key}: there is no separate ingress" for key in args if key != "llm_configs"]
    prefix = str(application.get("route_prefix") or "/")
    if len(args["llm_configs"]) > 1:
        ported.notes.append(f"application {application.get('name')}: becomes one for each model")
    models: list[Any] = args["llm_configs"]
    for entry in models:
        if not isinstance(entry, dict):
            raise ConfigError(f"args.llm_configs: {entry!r} is a file of its own; import that file by itself")
        one = _application(cast("dict[str, Any]", entry), ported.notes)
        if len(models) > 1:
            path = f"{prefix.rstrip('/')}/{one['name']}"
            ported.notes.append(f"{one['name']}: clients reach it at {path}/v1, as every model has a pool of its own")
            one["route_prefix"] = path
        else:
            one |= {"name": str(application.get("name") or one["name"]), "route_prefix": prefix}
        if application.get("runtime_env"):
            one["runtime_env"] = application["runtime_env"]
            ported.notes.append(_RUNTIME_ENV)
        ported.config["applications"].append(one)


_RUNTIME_ENV = "runtime_env: kept, but slots then start in fresh workers; better set variables where Ray starts"


def _application(llm: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """One LLMConfig as an application of ours."""
    llm = dict(llm)
    loading, deployment = _mapping(llm.pop("model_loading_config", None)), _mapping(llm.pop("deployment_config", None))
    model = _model(loading, _mapping(llm.pop("engine_kwargs", None)), notes)
    slot = _slot(model, deployment, _mapping(llm.pop("placement_group_config", None)), notes)
    own: dict[str, Any] = {key: deployment.pop(key) for key in _OF_THE_SLOT_DEPLOYMENT if key in deployment}
    if accelerator := llm.pop("accelerator_type", None):
        notes.append(f"accelerator_type: {accelerator} is not asked for: a slot takes whatever GPUs there are")
    live = _live(model["id"], deployment, notes)
    application: dict[str, Any] = {
        "name": str(model["id"]).rsplit("/", 1)[-1],
        "route_prefix": "/",
        "import_path": "serve_app:app",
        "args": {"models": [model], "slot": slot},
        "deployments": [{"name": POOL_DEPLOYMENT, "user_config": live}],
    }
    if own:
        application["deployments"].append({"name": SLOT_DEPLOYMENT, **own})
    if runtime_env := llm.pop("runtime_env", None):
        application["runtime_env"] = runtime_env
        notes.append(_RUNTIME_ENV)
    if (engine := llm.pop("llm_engine", "vLLM")) != "vLLM":
        raise ConfigError(f"llm_engine: '{engine}'; allowed: vLLM")
    deployment.pop("name", None)
    notes += [_note(key) for key in (*llm, *deployment)]
    return application


def _model(loading: dict[str, Any], kwargs: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if not loading.get("model_id"):
        raise ConfigError("model_loading_config.model_id: missing")
    model: dict[str, Any] = {"id": str(loading["model_id"])}
    source = loading.get("model_source")
    if isinstance(source, dict):
        directory = f"/models/{model['id'].rsplit('/', 1)[-1]}"
        bucket = source.get("bucket_uri")
        notes.append(f"model_source.bucket_uri: copy {bucket} to {directory} on every node, or change `source`")
        source = directory
    if source and source != model["id"]:
        model["source"] = source
    if loading.get("tokenizer_source"):
        kwargs.setdefault("tokenizer", loading["tokenizer_source"])
    for key in ("model", "served_model_name", "distributed_executor_backend"):
        if key in kwargs:
            notes.append(f"engine_kwargs.{key}: left out ({kwargs.pop(key)!r}), it follows from the model and the slot")
    return model | {"engine_kwargs": kwargs}


def _slot(model: dict[str, Any], deployment: dict[str, Any], group: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The slot's shape."""
    kwargs: dict[str, Any] = model["engine_kwargs"]
    tensor, pipeline = (int(kwargs.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline"))
    if int(kwargs.get("data_parallel_size") or 1) > 1:
        raise ConfigError("engine_kwargs.data_parallel_size: one engine a slot; use more slots instead")
    world = tensor * pipeline
    if group:
        notes.append(f"placement_group_config: {_NO_COUNTERPART['placement_group_bundles']}")
    bundles = _mappings(group.get("bundles")) or [_mapping(group.get("bundle_per_worker")) or {"GPU": 1}] * world
    part = float(bundles[0].get("GPU", 1))
    slot: dict[str, Any] = {"gpus": part if world == 1 and part < 1 else world}
    if world > GPUS_ON_A_NODE and group.get("strategy") != "STRICT_PACK":
        slot["nodes"] = -(-world // GPUS_ON_A_NODE)
        notes.append(f"slot.nodes: {slot['nodes']}, for nodes of {GPUS_ON_A_NODE} GPUs; change it if yours differ")
    options = _mapping(deployment.pop("ray_actor_options", None))
    cpus = float(options.pop("num_cpus", 0) or 0) + sum(float(bundle.get("CPU", 0)) for bundle in bundles)
    slot["cpus"] = cpus or max(1.0, world / 2)
    if not cpus:
        notes.append(f"slot.cpus: {slot['cpus']:g} is a guess; it was not said what a replica takes")
    if memory := options.pop("memory", None):
        slot["host_ram_gb"] = memory / 1e9
    notes += [f"deployment_config.ray_actor_options.{key}: left out, a slot is its placement group" for key in options]
    slot["max_ongoing_requests"] = _capacity(kwargs, deployment, notes)
    slot |= {ours: deployment.pop(theirs) for theirs, ours in _OF_SLOT.items() if theirs in deployment}
    return slot


def _capacity(kwargs: dict[str, Any], deployment: dict[str, Any], notes: list[str]) -> int:
    given, seqs = deployment.pop("max_ongoing_requests", None), int(kwargs.get("max_num_seqs") or 256)
    short_queue = math.ceil(seqs * 1.1)
    if given and int(given) <= 2 * seqs:
        return int(given)
    why = f"was {given}, a queue inside the engine that no other slot can help with" if given else "was not set"
    notes.append(f"slot.max_ongoing_requests: {short_queue}, max_num_seqs ({seqs}) and a short queue; it {why}")
    return short_queue


def _live(model_id: str, deployment: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The pool's live settings from what the autoscaler was told."""
    scaling = _mapping(deployment.pop("autoscaling_config", None))
    replicas = deployment.pop("num_replicas", None)
    fixed = int(replicas) if isinstance(replicas, int) else None
    least = fixed if fixed is not None else int(scaling.get("min_replicas", 1))
    most = max(fixed if fixed is not None else int(scaling.get("max_replicas", max(1, least))), 1)
    slots = max(most, least + 1)
    if slots > most:
        notes.append(
            f"slots.max: {slots}, one more than max_replicas, as a standby needs GPUs of its own; or set pool: off"
        )
    live: dict[str, Any] = {
        "slots": {"min": min(slots, max(least, 0) + 1), "max": slots, "standby": 1},
        "models": {model_id: {"min_active": least, "tier": "host"}},
    }
    if replicas == "auto":
        notes.append("deployment_config.num_replicas: 'auto' means 1 to 100 there; set slots.max to what you have")
    if target := scaling.get("target_ongoing_requests"):
        live["promote_when"] = {"in_flight": max(1, int(target))}
    queued = deployment.pop("max_queued_requests", -1)
    if queued is not None and queued >= 0:
        live["hold"] = {"max_held_requests": queued}
    notes += [_note(key, "autoscaling_config.") for key in scaling if key not in _AUTOSCALING]
    return live


def _note(key: str, where: str = "") -> str:
    return f"{where}{key}: {_NO_COUNTERPART.get(key, 'not taken over: it has no counterpart')}"


def _mapping(value: object) -> dict[str, Any]:
    return dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else {}


def _mappings(value: object) -> list[dict[str, Any]]:
    return [_mapping(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []
