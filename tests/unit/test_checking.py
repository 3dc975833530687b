"""What is found in a config file without Ray: our own halves, and Serve options that break the pool."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from serve_app import PROXY_CALLBACK, SERVE_ENVIRONMENT
from serve_app.checking import BREAKS_POOL, check_config, leaves
from serve_app.errors import ConfigError
from serve_app.yaml_file import read_yaml

GOOD: dict[str, Any] = {
    "controller_options": {"runtime_env": {"env_vars": dict(SERVE_ENVIRONMENT)}},
    "applications": [
        {
            "name": "chat",
            "import_path": "serve_app:app",
            "args": {"models": [{"id": "m", "engine": "simulated"}]},
            "deployments": [{"name": "Pool", "user_config": {"slots": {"min": 2}}}],
        }
    ],
}


def config(**application: Any) -> dict[str, Any]:
    """The good file with some keys of its application replaced."""
    changed = copy.deepcopy(GOOD)
    changed["applications"][0] |= application
    return changed


def slot(**options: Any) -> dict[str, Any]:
    """The good file with options for the slot deployment."""
    return config(deployments=[{"name": "Slot", **options}])


def test_good_file_has_no_problem_and_says_what_it_holds() -> None:
    """A good file gives both halves and the live settings that it sets itself."""
    report = check_config(GOOD)
    assert (report.problems, report.notes, report.foreign) == ([], [], [])
    [checked] = report.applications
    assert checked.app is not None
    assert checked.live is not None
    assert (checked.name, checked.app.served[0].id, checked.live.slots.min) == ("chat", "m", 2)
    assert checked.set_live == ("slots.min",)


def test_all_problems_of_both_halves_are_listed() -> None:
    """A mistake in `args` does not hide those in the live settings."""
    wrong = config(
        args={"slot": {"gpu": 1, "cpus": -1}},
        deployments=[{"name": "Pool", "user_config": {"slots": {"minn": 2}, "verify": "maybe"}}],
    )
    problems = check_config(wrong).problems
    assert [problem.split(": ")[0] for problem in problems] == [
        "applications.chat.args.slot.cpus",
        "applications.chat.args.slot.gpu",
        "applications.chat.deployments.Pool.user_config.slots.minn",
        "applications.chat.deployments.Pool.user_config.verify",
    ]
    assert ", cpus, flex_requests, forkserver, gpus, " in problems[1]


def test_live_model_must_be_among_the_static_ones() -> None:
    """Live settings for a model that no slot serves are a misspelt model."""
    wrong = config(deployments=[{"name": "Pool", "user_config": {"models": {"n": {"tier": "disk"}}}}])
    assert "['n'] not among args.models; allowed: ['m']" in check_config(wrong).problems[0]


@pytest.mark.parametrize("option", BREAKS_POOL)
def test_slot_option_that_breaks_the_pool_is_refused(option: str) -> None:
    """Each is refused with the reason and what to set instead."""
    [problem] = check_config(slot(**{option: 1})).problems
    assert problem.startswith(f"applications.chat.deployments.Slot.{option}: breaks the pool: ")
    assert problem.endswith("instead")


def test_slot_options_are_free_without_pool() -> None:
    """A plain application may use Serve's own autoscaler."""
    plain = slot(autoscaling_config={"min_replicas": 1}, max_ongoing_requests=5)
    plain["applications"][0]["args"]["pool"] = False
    assert check_config(plain).problems == []


def test_slot_resources_belong_to_its_shape() -> None:
    """An actor with other resources than its placement group would never be scheduled."""
    [problem] = check_config(slot(ray_actor_options={"num_gpus": 1})).problems
    assert problem.startswith("applications.chat.deployments.Slot.ray_actor_options.num_gpus: ")
    assert problem.endswith("set args.slot.gpus instead")


def test_slot_user_config_is_refused_with_and_without_pool() -> None:
    """The slot takes no settings at all: Serve would fail its deployment."""
    wrong = slot(user_config={"slots": {}})
    wrong["applications"][0]["args"]["pool"] = False
    for file in (slot(user_config={"slots": {}}), wrong):
        assert any("Slot.user_config: " in problem for problem in check_config(file).problems)


def test_unknown_deployment_names_the_allowed_ones() -> None:
    """With a pool there are two deployments, without only one."""
    wrong = config(deployments=[{"name": "Slots"}])
    assert check_config(wrong).problems == [
        "applications.chat.deployments.Slots: unknown deployment; allowed: Slot, Pool"
    ]
    plain = config(args={"pool": False}, deployments=[{"name": "Pool"}])
    assert "no such deployment with args.pool: off" in check_config(plain).problems[0]


def test_second_pool_replica_is_refused() -> None:
    """Two `Pool` replicas would hand over their settings in turn."""
    wrong = config(deployments=[{"name": "Pool", "num_replicas": 2}])
    assert check_config(wrong).problems[0].startswith("applications.chat.deployments.Pool.num_replicas: ")


def test_foreign_application_is_left_alone() -> None:
    """Other applications in the same file have other rules."""
    report = check_config(config(import_path="other:app", args={"anything": 1}))
    assert (report.problems, report.applications, report.foreign) == ([], [], ["chat"])


def test_missing_serve_environment_is_noted() -> None:
    """Without it there are no health routes, unless Ray was started with it."""
    report = check_config({"applications": GOOD["applications"]})
    assert report.problems == []
    assert len(report.notes) == len(SERVE_ENVIRONMENT)


def test_missing_middleware_is_noted_with_what_is_lost() -> None:
    """A proxy without it lets everybody in, and nothing else would say so."""
    environment = dict(SERVE_ENVIRONMENT)
    [name] = [name for name, value in environment.items() if value == PROXY_CALLBACK]
    del environment[name]
    file = copy.deepcopy(GOOD) | {"controller_options": {"runtime_env": {"env_vars": environment}}}
    [note] = check_config(file).notes
    assert note.startswith(f"controller_options.runtime_env.env_vars.{name}: ") and "API keys" in note


@pytest.mark.parametrize(
    ("shape", "noted"), [({"gpus": 1}, True), ({"gpus": 1, "max_ongoing_requests": 10}, False), ({"cpus": 1}, False)]
)
def test_capacity_of_a_gpu_that_nobody_has_set_is_noted(shape: dict[str, Any], noted: bool) -> None:
    """The default is right for two CPU cores and leaves a GPU nearly idle."""
    report = check_config(config(args={"models": [{"id": "m", "engine": "simulated"}], "slot": shape}))
    assert report.problems == []
    assert [note.split(":")[0] for note in report.notes] == noted * ["applications.chat.args.slot.max_ongoing_requests"]


def test_shapes_that_serve_would_refuse_do_not_break_the_check() -> None:
    """Serve's own schema complains about them; this half only must survive."""
    for broken in ({}, {"applications": None}, {"applications": [1]}, config(deployments=[1, None])):
        assert check_config(broken).problems == []


def test_leaves_keep_empty_mappings() -> None:
    """A mapping that becomes empty is a change too."""
    assert leaves({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "line 2, column 1: expected ',' or ']'"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' stands here twice"),
        ("- 1\n", "not a mapping"),
        ("", "not a mapping"),
        ("a: \x00", "not YAML"),
    ],
)
def test_yaml_mistake_has_its_line(tmp_path: Path, text: str, message: str) -> None:
    """A key that stands twice is a mistake too, though YAML itself lets the second one win."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(file)
    assert message in str(error.value)


def test_missing_file_is_named() -> None:
    """No traceback for a misspelt path."""
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(Path("nowhere.yaml"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SERVE_APP_API_KEYS", "sk-secret", "dashboard shows it"),
        ("SERVE_APP_MAX_REQUEST_BYTES", "64MB", "a whole number of bytes"),
        ("SERVE_APP_MAX_REQUEST_BYTES", "1000000", ""),
        ("SERVE_APP_API_KEYS_FILE", "/run/secrets/keys", ""),
    ],
)
def test_environment_that_proxies_would_stumble_over(name: str, value: str, words: str) -> None:
    """A wrong limit would keep them from starting, and a key in a file is a key that many can read."""
    application = {"name": "a", "import_path": "serve_app:app"}
    options = {"runtime_env": {"env_vars": {name: value}}}
    problems = check_config({"applications": [application], "controller_options": options}).problems
    assert len(problems) == int(bool(words))
    for problem in problems:
        assert name in problem and words in problem and "sk-secret" not in problem
