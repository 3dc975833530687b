"""Check a Serve config file's content against this package: everything that needs neither Ray nor vLLM.

Serve checks these things late (when a slot is built), partly (first mistake only) or not at all (an option that breaks
the pool). Here all mistakes are found before anything is started. `serve_schema.py` checks Serve's own keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from serve_app import PROXY_CALLBACK, SERVE_ENVIRONMENT
from serve_app.config import POOL_DEPLOYMENT, SLOT_DEPLOYMENT, AppConfig, parse_app
from serve_app.errors import ConfigError
from serve_app.live import LiveSettings, parse_live
from serve_app.pool.api_keys import KEYS, KEYS_FILE
from serve_app.pool.body_limit import limit_from

_ENV_VARS = "controller_options.runtime_env.env_vars"
# Serve takes both spellings.
IMPORT_PATHS = ("serve_app:app", "serve_app.app")

# Options of the slot deployment that break the pool: why, and what to set instead.
_COUNTS = "Pool.user_config.slots.min and slots.max"
BREAKS_POOL = {
    "autoscaling_config": ("the pool is the autoscaler", _COUNTS),
    "num_replicas": ("the pool decides how many slots there are", _COUNTS),
    "max_ongoing_requests": (
        "the coordinator would count with another capacity than Serve",
        "args.slot.max_ongoing_requests",
    ),
    "request_router_config": (
        "only the pool's own router knows which slot is active",
        "Pool.user_config.promote_when and hold",
    ),
    "deployment_actors": ("the coordinator is one and would be replaced", "Pool.user_config"),
    "gang_scheduling_config": ("slots come and go one at a time", "args.slot.gpus"),
    "placement_group_bundles": ("the coordinator would count with another shape than Serve", "args.slot"),
    "placement_group_strategy": ("a slot's placement follows from its shape", "args.slot"),
}
# Of its `ray_actor_options`: the actor takes its placement group in full.
BREAKS_PLACEMENT = {"num_cpus": "args.slot.cpus", "num_gpus": "args.slot.gpus", "memory": "args.slot.host_ram_gb"}
# Of `Pool`: two of them would hand over their settings in turn.
BREAKS_CONTROL = ("autoscaling_config", "num_replicas")


@dataclass(frozen=True)
class Checked:
    """One application of ours, as far as it could be read."""

    name: str
    app: AppConfig | None
    live: LiveSettings | None
    set_live: tuple[str, ...] = ()
    """The live settings that the file itself sets, as dotted names."""


@dataclass
class Report:
    """What was found.

    Attributes:
        problems: one line each; empty for a good file.
        notes: what is legal and yet worth knowing.
        foreign: applications that are not this package's.
    """

    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    applications: list[Checked] = field(default_factory=list[Checked])
    foreign: list[str] = field(default_factory=list[str])


def check_config(config: dict[str, Any]) -> Report:
    """Check all applications of a Serve config file."""
    report = Report()
    for position, application in enumerate(entries(config.get("applications"))):
        where = f"applications.{name_of(application, position)}"
        if application.get("import_path") in IMPORT_PATHS:
            _check_application(application, where, report)
        else:
            report.foreign.append(where.removeprefix("applications."))
    if report.applications:
        report.notes += _missing_environment(config)
        report.problems += _wrong_environment(given_environment(config))
    return report


def entries(value: object) -> list[dict[str, Any]]:
    """The mappings in a list; whatever else stands there is for Serve's own schema to complain about."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


def name_of(entry: dict[str, Any], position: int) -> str:
    """How messages name an entry of a list: by its own name if it has one."""
    return str(entry.get("name") or position)


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one flat one with dotted keys; empty mappings count as values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= leaves(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check_application(application: dict[str, Any], where: str, report: Report) -> None:
    deployments = {name_of(entry, index): entry for index, entry in enumerate(entries(application.get("deployments")))}
    app: AppConfig | None = None
    live: LiveSettings | None = None
    try:
        app = parse_app(application.get("args") or {})
    except ConfigError as error:
        report.problems += _lines(error, where)
    pool = app is None or app.pool
    control = deployments.get(POOL_DEPLOYMENT, {})
    if pool:
        try:
            live = parse_live(control.get("user_config"), app)
        except ConfigError as error:
            report.problems += _lines(error, f"{where}.deployments")
    report.problems += [f"{where}.deployments.{problem}" for problem in _check_deployments(deployments, pool)]
    if app is not None and app.slot.gpus and "max_ongoing_requests" not in app.slot.model_fields_set:
        report.notes.append(
            f"{where}.args.slot.max_ongoing_requests: left out, so a slot takes {app.slot.max_ongoing_requests} "
            "requests at a time; a GPU's worth is vLLM's max_num_seqs and a short queue (configs/one-gpu.yaml: 280)"
        )
    if application.get("runtime_env"):
        report.notes.append(f"{where}.runtime_env: slots then start in fresh workers, without Ray's preloaded ones")
    user_config = control.get("user_config")
    given = leaves(cast("dict[str, Any]", user_config)) if isinstance(user_config, dict) else {}
    report.applications.append(Checked(where.removeprefix("applications."), app, live, tuple(given)))


def _check_deployments(deployments: dict[str, dict[str, Any]], pool: bool) -> Iterable[str]:
    allowed = [SLOT_DEPLOYMENT, POOL_DEPLOYMENT] if pool else [SLOT_DEPLOYMENT]
    for name in deployments:
        if name == POOL_DEPLOYMENT and not pool:
            yield f"{name}: there is no such deployment with args.pool: off; remove it"
        elif name not in allowed:
            yield f"{name}: unknown deployment; allowed: {', '.join(allowed)}"
    slot = deployments.get(SLOT_DEPLOYMENT, {})
    if "user_config" in slot:
        yield "Slot.user_config: slots have no settings of their own; set Pool.user_config instead"
    if not pool:
        return
    for option, (why, instead) in BREAKS_POOL.items():
        if option in slot:
            yield f"Slot.{option}: breaks the pool: {why}; set {instead} instead"
    options = slot.get("ray_actor_options")
    for option, instead in BREAKS_PLACEMENT.items():
        if isinstance(options, dict) and option in options:
            yield f"Slot.ray_actor_options.{option}: the slot would not fit its placement group; set {instead} instead"
    control = deployments.get(POOL_DEPLOYMENT, {})
    for option in BREAKS_CONTROL:
        if control.get(option, 1) not in (1, None):
            yield f"Pool.{option}: there is exactly one Pool, and nothing waits for it; remove it"


def given_environment(config: dict[str, Any]) -> dict[str, Any]:
    """What a file gives Serve's own processes: `controller_options.runtime_env.env_vars`."""
    value: Any = config
    for key in ("controller_options", "runtime_env", "env_vars"):
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _wrong_environment(given: dict[str, Any]) -> Iterable[str]:
    """What the proxies would stumble over, or what must not stand in a file."""
    if given.get(KEYS):
        yield f"{_ENV_VARS}.{KEYS}: Ray's dashboard shows it; use {KEYS_FILE}, or set it where Ray starts"
    try:
        limit_from({name: str(value) for name, value in given.items()})
    except ConfigError as error:
        yield f"{_ENV_VARS}.{error}"


def _missing_environment(config: dict[str, Any]) -> Iterable[str]:
    """Serve's proxies read their environment when they start, so the file should bring it along."""
    given = given_environment(config)
    for name, wanted in SERVE_ENVIRONMENT.items():
        if given.get(name) != wanted:
            # The others only make things slower; nothing would say that this one is missing.
            harm = (
                ", else bodies have no limit, and where API keys are demanded everybody is refused"
                if wanted == PROXY_CALLBACK
                else ""
            )
            yield f"{_ENV_VARS}.{name}: not '{wanted}' here; Serve's processes need it from elsewhere{harm}"


def _lines(error: ConfigError, where: str) -> list[str]:
    return [f"{where}.{line}" for line in str(error).splitlines()]
