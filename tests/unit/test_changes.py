"""What a change of a config file costs; the table is compared with Ray Serve's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from serve_app.changes import MISSING, SLOT, Change, Effect, changes

OLD: dict[str, Any] = {
    "http_options": {"port": 8000},
    "applications": [
        {
            "name": "a",
            "import_path": "serve_app:app",
            "args": {"slot": {"cpus": 1}},
            "deployments": [{"name": "Pool", "user_config": {"slots": {"min": 2, "max": 3}}}],
        }
    ],
}


def changed() -> dict[str, Any]:
    return copy.deepcopy(OLD)


def test_equal_files_have_no_change() -> None:
    """Nothing is invented."""
    assert changes(OLD, changed()) == []


def test_live_setting_rolls_nothing() -> None:
    """The `user_config` of Pool is live, each leaf with its value before and after."""
    new = changed()
    new["applications"][0]["deployments"][0]["user_config"]["slots"] = {"min": 2, "standby": 2}
    assert changes(OLD, new) == [
        Change("applications.a.Pool.user_config.slots.max", 3, MISSING, Effect.LIVE),
        Change("applications.a.Pool.user_config.slots.standby", MISSING, 2, Effect.LIVE),
    ]


def test_args_roll_slots_and_http_options_restart_serve() -> None:
    """Changes are listed from cheap to costly."""
    new = changed()
    new["http_options"]["port"] = 9000
    new["applications"][0]["args"]["slot"]["cpus"] = 2
    assert changes(OLD, new) == [
        Change("applications.a.args.slot.cpus", 1, 2, Effect.ROLLS),
        Change("http_options.port", 8000, 9000, Effect.RESTART),
    ]


def test_slot_option_costs_what_the_table_says() -> None:
    """Some options of the slot deployment are live, some pause slots, some roll them."""
    new = changed()
    new["applications"][0]["deployments"].append(
        {"name": "Slot", "ray_actor_options": {"num_cpus": 1}, "health_check_period_s": 1, "logging_config": {}}
    )
    assert [(change.where.split(".")[3], change.effect) for change in changes(OLD, new)] == [
        ("health_check_period_s", Effect.LIVE),
        ("logging_config", Effect.PAUSES),
        ("ray_actor_options", Effect.ROLLS),
    ]


def test_applications_come_and_go() -> None:
    """A renamed application is one that goes and one that comes."""
    new = changed()
    new["applications"][0]["name"] = "b"
    assert changes(OLD, new) == [
        Change("applications.a", "present", MISSING, Effect.APPLICATION),
        Change("applications.b", MISSING, "present", Effect.APPLICATION),
    ]


def test_pool_is_not_switched_in_place() -> None:
    """Proxies keep the kind of router that they made when the application first came."""
    new = changed()
    new["applications"][0]["args"]["pool"] = False
    assert [change.effect for change in changes(OLD, new)] == [Effect.RECREATE]


def test_slot_table_agrees_with_ray_serve() -> None:
    """Serve marks each option with what its change requires; ours must say the same for all that a file can set."""
    config = pytest.importorskip("ray.serve._private.config")
    schema = pytest.importorskip("ray.serve.schema")
    costs = {
        "LightWeight": Effect.LIVE,
        "NeedsReconfigure": Effect.LIVE,
        "NeedsActorReconfigure": Effect.PAUSES,
        "HeavyWeight": Effect.ROLLS,
    }
    fields = config.DeploymentConfig.model_fields
    # These three are hashed into the application's code version too, which rolls everything.
    coded = {"autoscaling_config", "request_router_config", "deployment_actors"}
    for option in schema.DeploymentSchema.model_fields:
        if option in fields and option not in coded:
            expected = costs[fields[option].json_schema_extra["update_type"].value]
            assert SLOT.get(option, Effect.ROLLS) is expected, option
