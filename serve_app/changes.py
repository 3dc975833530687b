"""What the step from one config file to another does to a running application. Pure.

The table of the slot deployment's options repeats what Ray Serve does (`update_type` in its DeploymentConfig, and
`DeploymentVersion`); a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from serve_app.checking import entries, leaves, name_of
from serve_app.config import POOL_DEPLOYMENT


class Effect(StrEnum):
    """What a change costs, the cheapest first."""

    LIVE = "live"
    """Nothing is restarted, no slot leaves a router."""
    PAUSES = "pauses slots"
    """No process restarts, but every slot leaves the routers while Serve reconfigures it."""
    ROLLS = "rolls slots"
    """Every slot is replaced, one at a time."""
    APPLICATION = "adds or removes"
    """A whole application comes or goes."""
    RECREATE = "recreate application"
    """The application must be deleted first: changed in place it would not work."""
    RESTART = "restarts Serve"
    """Serve must be shut down and started again; until then it ignores the change."""


MEANING = {
    Effect.LIVE: "nothing restarts; slots keep serving",
    Effect.PAUSES: "no restart, but slots leave the routers while Serve reconfigures them",
    Effect.ROLLS: "every slot is replaced, one at a time",
    Effect.APPLICATION: "whole applications come or go",
    Effect.RECREATE: "delete the application first: proxies keep the router that they began with",
    Effect.RESTART: "ignored until Serve is shut down and started again",
}

OUTER = {
    "logging_config": Effect.PAUSES,  # of Serve's own processes, and of every application without one of its own
    "target_capacity": Effect.LIVE,
}  # all others: RESTART
APPLICATION = {
    "route_prefix": Effect.PAUSES,
    "logging_config": Effect.PAUSES,
    "external_scaler_enabled": Effect.LIVE,
}  # all others: ROLLS
SLOT = {
    "max_queued_requests": Effect.LIVE,
    "rolling_update_percentage": Effect.LIVE,
    "max_surge_percent": Effect.LIVE,
    "num_replicas": Effect.LIVE,
    "graceful_shutdown_timeout_s": Effect.LIVE,
    "health_check_period_s": Effect.LIVE,
    "health_check_timeout_s": Effect.LIVE,
    "graceful_shutdown_wait_loop_s": Effect.PAUSES,
    "max_ongoing_requests": Effect.PAUSES,
    "backpressure_config": Effect.PAUSES,
    "user_config": Effect.PAUSES,
    "logging_config": Effect.PAUSES,
}  # all others: ROLLS


@dataclass(frozen=True)
class Change:
    """One setting with its value before and after; MISSING where there is none."""

    where: str
    old: Any
    new: Any
    effect: Effect


MISSING = "(not set)"


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """All changes, the cheapest first, then in the order of the files."""
    found = [
        Change(where, before, after, OUTER.get(where.split(".")[0], Effect.RESTART))
        for where, before, after in _different(_without(old, "applications"), _without(new, "applications"))
    ]
    before, after = _by_name(old.get("applications")), _by_name(new.get("applications"))
    for name in before | after:
        if name in before and name in after:
            found += _application_changes(f"applications.{name}", before[name], after[name])
        else:
            present = ("present", MISSING) if name in before else (MISSING, "present")
            found.append(Change(f"applications.{name}", *present, Effect.APPLICATION))
    order = list(Effect)
    return sorted(found, key=lambda change: order.index(change.effect))


def _application_changes(where: str, old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    found = [
        Change(f"{where}.{path}", before, after, _application_effect(path))
        for path, before, after in _different(_without(old, "deployments"), _without(new, "deployments"))
    ]
    before, after = _by_name(old.get("deployments")), _by_name(new.get("deployments"))
    for name in before | after:
        for path, was, becomes in _different(
            _without(before.get(name, {}), "name"), _without(after.get(name, {}), "name")
        ):
            option = path.split(".")[0]
            # Pool holds no GPU and serves nobody: even when it is restarted no slot notices.
            effect = Effect.LIVE if name == POOL_DEPLOYMENT else SLOT.get(option, Effect.ROLLS)
            found.append(Change(f"{where}.{name}.{path}", was, becomes, effect))
    return found


def _application_effect(path: str) -> Effect:
    # Measured: after pool off -> on the proxy still routes with Serve's own router, to standbys too.
    return Effect.RECREATE if path == "args.pool" else APPLICATION.get(path.split(".")[0], Effect.ROLLS)


def _different(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    before, after = leaves(old), leaves(new)
    return [
        (path, before.get(path, MISSING), after.get(path, MISSING))
        for path in before | after
        if before.get(path, MISSING) != after.get(path, MISSING)
    ]


def _by_name(value: object) -> dict[str, dict[str, Any]]:
    return {name_of(entry, index): entry for index, entry in enumerate(entries(value))}


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
