"""Settings: what is refused, with which words, and what the defaults are."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.config import CPU_ENGINE, DEFAULT_MODEL, AppConfig, Tier, parse_app
from serve_app.errors import ConfigError
from serve_app.live import Verify, parse_live


def app(**args: Any) -> AppConfig:
    return parse_app(args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modell": "x"}, ["args.modell: unknown key", "allowed: model, models, pool, slot"]),
        ({"slot": {"gpu": 1}}, ["args.slot.gpu: unknown key", "cpus", "gpus"]),
        (
            {"models": [{"id": "a", "sauce": "x"}]},
            ["args.models.0.sauce: unknown key", "engine_kwargs, engine_of, id, source"],
        ),
        ({"slot": {"gpus": -1}}, ["args.slot.gpus", "greater than or equal to 0", "found -1"]),
        ({"slot": {"gpus": "many"}}, ["args.slot.gpus", "number", "'many'"]),
        ({"models": [{"source": "x"}]}, ["args.models.0.id", "required"]),
        ({"models": [{"id": ""}]}, ["args.models.0.id", "at least 1 character"]),
        ({"models": [{"id": "a", "engine": "tgi"}]}, ["args.models.0.engine", "'vllm' or 'simulated'", "'tgi'"]),
        ({"model": "x", "models": [{"id": "a"}]}, ["'model' and 'models' both set"]),
        ({"models": [{"id": "a"}, {"id": "a"}]}, ["must differ", "['a', 'a']"]),
        (
            {"models": [{"id": "a", "engine_kwargs": {"lora_modules": [{"name": "b", "path": "p"}]}}, {"id": "b"}]},
            ["must differ", "['a', 'b', 'b']"],
        ),
        ({"models": [{"id": "a", "engine_kwargs": {"lora_modules": "b=p"}}]}, ["models.a", "a list is wanted", "b=p"]),
        ({"models": [{"id": "a"}, {"id": "b"}], "pool": False}, ["pool is off", "2 entries"]),
        (
            {
                "models": [{"id": "a"}, {"id": "b", "engine_kwargs": {"tensor_parallel_size": 2}}],
                "slot": {"gpus": 1},
            },
            ["slot.gpus is 1", "models.b.engine_kwargs", "= 2"],
        ),
        (
            {"models": [{"id": "a", "engine_kwargs": {"tensor_parallel_size": 4}}], "slot": {"gpus": 2}},
            ["slot.gpus is 2", "models.a.engine_kwargs", "= 4"],
        ),
        (
            {"models": [{"id": "a", "engine_kwargs": {"tensor_parallel_size": 2}}], "slot": {"gpus": 4}},
            ["slot.gpus is 4", "models.a.engine_kwargs", "= 2", "reserved and idle", "allowed: 2"],
        ),
        ({"slot": {"gpus": 12, "nodes": 5}}, ["slot.nodes is 5", "slot.gpus is 12", "allowed: 1, 2, 3, 4, 6, 12"]),
        ({"slot": {"nodes": 2}}, ["slot.nodes is 2", "slot.gpus is 0", "allowed: 1"]),
        ({"slot": {"gpus": 0.5, "nodes": 2}}, ["slot.nodes is 2", "slot.gpus is 0.5", "allowed: 1"]),
        ({"slot": {"nodes": 0}}, ["args.slot.nodes", "greater than or equal to 1"]),
        (
            {
                "models": [{"id": "a", "engine_kwargs": {"tensor_parallel_size": 4, "pipeline_parallel_size": 3}}],
                "slot": {"gpus": 12, "nodes": 2},
            },
            ["models.a.engine_kwargs.tensor_parallel_size is 4", "slot.gpus / slot.nodes = 6", "allowed: 1, 2, 3, 6"],
        ),
        ({"pool": "maybe"}, ["args.pool", "boolean", "'maybe'"]),
    ],
)
def test_parse_app_error_names_key_value_and_what_is_allowed(args: dict[str, Any], words: list[str]) -> None:
    """Each kind of mistake in the static half says which key, what was found, and what would do."""
    with pytest.raises(ConfigError) as raised:
        parse_app(args)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ({"slot": {}}, ["Pool.user_config.slot: unknown key", "slots"]),
        ({"slots": {"mim": 1}}, ["Pool.user_config.slots.mim: unknown key", "max", "min"]),
        ({"models": {"chat": {"teer": "host"}}}, ["Pool.user_config.models.chat.teer", "allowed: min_active, tier"]),
        ({"models": {"chat": {"tier": "warm"}}}, ["models.chat.tier", "'ready', 'host' or 'disk'", "'warm'"]),
        ({"slots": {"refill": "never"}}, ["slots.refill", "'existing_nodes', 'buy' or 'off'", "'never'"]),
        ({"verify": "maybe"}, ["verify", "'enforce', 'warn' or 'off'"]),
        ({"slots": {"min": 4, "max": 3}}, ["slots.min is 4", "slots.max = 3"]),
        ({"slots": {"max": 1, "min": 1}}, ["slots.max is 1", "min_active (1)", "slots.standby (1) = 2"]),
        ({"models": {"other": {}}}, ["models", "['other'] not among args.models", "allowed: ['chat']"]),
        ({"promote_when": {"in_flight": 11}}, ["promote_when.in_flight is 11", "max_ongoing_requests = 10"]),
        ({"hold": {"max_hold_s": 0}}, ["hold.max_hold_s", "greater than 0"]),
        ({"deadlines": {"wake_s": -1}}, ["deadlines.wake_s", "greater than 0"]),
        ({"breaker_failures": 0}, ["breaker_failures", "greater than or equal to 1"]),
    ],
)
def test_parse_live_error_names_key_value_and_what_is_allowed(user_config: dict[str, Any], words: list[str]) -> None:
    """The live half too, and what contradicts the static half names both keys."""
    with pytest.raises(ConfigError) as raised:
        parse_live(user_config, app(models=[{"id": "chat"}]))
    for word in words:
        assert word in str(raised.value)


def test_parse_app_several_mistakes_are_told_at_once() -> None:
    """One line per mistake: nobody should have to start a cluster once per typo."""
    with pytest.raises(ConfigError) as raised:
        app(modell="x", slot={"gpus": -1, "cpu": 1})
    assert len(str(raised.value).splitlines()) == 3


@pytest.mark.parametrize("off", [False, "off"])
def test_config_bare_off_in_yaml_means_off(off: object) -> None:
    """YAML 1.1 reads a bare `off` as false; all three settings that know `off` take either."""
    assert app(pool=off).pool is False
    live = parse_live({"verify": off, "slots": {"refill": off}}, app())
    assert (live.verify, live.slots.refill) == (Verify.OFF, "off")


def test_parse_app_without_args_serves_the_default_model_on_cpu() -> None:
    """No configuration at all is a working one."""
    config = app()
    assert (config.pool, config.slot.gpus) == (True, 0)
    assert (config.served[0].id, config.served[0].resolved_source) == (DEFAULT_MODEL, DEFAULT_MODEL)
    assert config.served[0].engine_kwargs == CPU_ENGINE
    assert config.served[0].engine_kwargs is not CPU_ENGINE


@pytest.mark.parametrize(
    ("source", "name"), [("Qwen/Qwen3-8B", "Qwen3-8B"), ("/models/coder-8b/", "coder-8b"), ("tiny", "tiny")]
)
def test_parse_app_model_shorthand_is_named_after_its_source(source: str, name: str) -> None:
    """`model: X` is one model with that source, called by its last part."""
    assert (app(model=source).served[0].id, app(model=source).served[0].source) == (name, source)


def test_model_config_source_defaults_to_its_id() -> None:
    """A model without a source is looked for under its id."""
    assert app(models=[{"id": "Qwen/Qwen3-8B"}]).served[0].resolved_source == "Qwen/Qwen3-8B"


def test_model_config_world_size_is_tensor_times_pipeline() -> None:
    """GPUs of one engine, from vLLM's own arguments."""
    kwargs = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    config = app(models=[{"id": "big", "engine_kwargs": kwargs}], slot={"gpus": 16})
    assert config.served[0].world_size == 16


@pytest.mark.parametrize(
    ("slot", "tensor_parallel", "backend", "allowed"),
    [
        ({"gpus": 2, "nodes": 2}, 1, "mp", "ray"),
        ({"gpus": 2}, 2, "ray", "mp"),
        ({"gpus": 1}, 1, "ray", "uni, mp"),
        ({}, 1, "external_launcher", "uni, mp"),
    ],
)
def test_executor_backend_that_contradicts_the_slots_shape_is_refused(
    slot: dict[str, int], tensor_parallel: int, backend: str, allowed: str
) -> None:
    """One node: vLLM's own processes; several: Ray's. A fitting value may be repeated."""
    sizes = {
        "tensor_parallel_size": tensor_parallel,
        "pipeline_parallel_size": max(1, slot.get("gpus", 1)) // tensor_parallel,
    }
    with pytest.raises(ConfigError) as raised:
        app(models=[{"id": "a", "engine_kwargs": sizes | {"distributed_executor_backend": backend}}], slot=slot)
    assert f"models.a.engine_kwargs.distributed_executor_backend is '{backend}'" in str(raised.value)
    assert f"allowed: {allowed} " in str(raised.value)
    fitting = {"distributed_executor_backend": allowed.split(", ")[0]}
    assert app(models=[{"id": "a", "engine_kwargs": sizes | fitting}], slot=slot)


def test_part_of_a_gpu_is_for_one_rank() -> None:
    """Two slots may share a GPU; half a GPU is still one that an engine uses."""
    half = app(models=[{"id": "a"}], slot={"gpus": 0.5}).slot
    assert (half.gpu_count, half.gpus_on_a_node, half.executor_backends[0]) == (1, 1, "uni")
    with pytest.raises(ConfigError, match=r"slot\.gpus is 0\.5, but .* = 2; allowed: 2"):
        app(models=[{"id": "a", "engine_kwargs": {"tensor_parallel_size": 2}}], slot={"gpus": 0.5})


def test_parse_live_defaults() -> None:
    """Without `user_config`: two slots, one of them standby at host tier, verified, bounded holding."""
    for nothing in (None, {}):
        live = parse_live(nothing, app())
        assert (live.slots.min, live.slots.max, live.slots.standby) == (2, 3, 1)
        assert (live.verify, live.hold.max_held_requests, live.hold.max_hold_s) == (Verify.ENFORCE, 256, 60)
        assert live.slots.shrink_after_s is None
        assert (live.model("anything").min_active, live.model("anything").tier) == (1, Tier.HOST)


def test_parse_live_survives_the_way_through_json() -> None:
    """`Pool` hands the settings over as plain values."""
    live = parse_live({"slots": {"refill": False}, "models": {DEFAULT_MODEL: {"tier": "disk"}}}, app())
    assert parse_live(live.model_dump(mode="json"), app()) == live


def test_config_is_frozen() -> None:
    """Settings cannot be changed behind the back of whoever checked them."""
    with pytest.raises(ValueError, match="frozen"):
        app().pool = False  # type: ignore[misc]


@pytest.mark.parametrize("size", ["two", 0, True, 1.5])
def test_parallel_size_that_is_no_positive_whole_number_names_its_key(size: object) -> None:
    """Not a TypeError from somewhere inside, but the key, what is wanted, and what was found."""
    models = [{"id": "m", "engine_kwargs": {"tensor_parallel_size": size}}]
    with pytest.raises(ConfigError, match=r"models\.m\.engine_kwargs\.tensor_parallel_size: a whole number"):
        parse_app({"models": models})


def test_parallel_size_null_is_one() -> None:
    """YAML's null means that nothing was said."""
    assert (
        parse_app({"models": [{"id": "m", "engine_kwargs": {"tensor_parallel_size": None}}]}).served[0].world_size == 1
    )
