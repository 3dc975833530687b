"""Models that share one engine: which settings and files allow it, what it costs, and that it takes turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import ModelConfig, SlotConfig, Tier, parse_app
from serve_app.engine import alike
from serve_app.engine.base import Fingerprint
from serve_app.errors import ConfigError, OutOfMemory
from serve_app.live import LiveSettings, Verify
from serve_app.pool.decide import decide
from serve_app.pool.holdings import Budget, ModelCost, choose
from serve_app.pool.lifecycle import State
from serve_app.pool.messages import Command, Verb, Welcome
from serve_app.pool.view import ModelView, RouterView, SlotView, View
from serve_app.slot.engines import SlotEngines
from serve_app.slot.held import HeldEngine

INSTANT = dict.fromkeys(
    ["start_s", "first_sleep_s", "sleep_s", "wake_host_s", "wake_disk_s", "verify_s", "first_token_s", "token_s"], 0
)


# Settings.


def model(name: str, of: str = "", **changes: Any) -> dict[str, Any]:
    return {"id": name, "engine_of": of, **changes}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([model("a", "b"), model("b")], "models.a.engine_of is 'b', .* listed before it .*allowed: none"),
        ([model("a"), model("b", "a"), model("c", "b")], "models.c.engine_of is 'b', .*allowed: a"),
        ([model("a"), model("b", "b")], "models.b.engine_of is 'b', .*allowed: a"),
        (
            [model("a"), model("b", "a", engine="simulated")],
            "models.b.engine is 'simulated', but models.a.* has 'vllm'",
        ),
        (
            [model("a", engine_kwargs={"max_num_seqs": 4}), model("b", "a", engine_kwargs={"max_model_len": 8})],
            "models.b.engine_kwargs: max_model_len, max_num_seqs must be as in models.a",
        ),
    ],
)
def test_a_variant_that_cannot_share_an_engine_is_refused_by_its_settings(
    models: list[dict[str, Any]], words: str
) -> None:
    """Before anything is started; the message names the key."""
    with pytest.raises(ConfigError, match=words):
        parse_app({"models": models})


def test_a_variant_has_its_own_server() -> None:
    """Chat template and adapters are not the engine's."""
    own = {"chat_template": "x.jinja", "lora_modules": ["c=path"]}
    app = parse_app({"models": [model("a"), model("b", "a", engine_kwargs=own)]})
    assert [model.engine_id for model in app.served] == ["a", "a"]
    assert app.model_names == {"a": ("a",), "b": ("b", "c")}


# Files.

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}


def files(folder: Path, **contents: object) -> ModelConfig:
    """A model directory; keys are file names with _ for the last dot."""
    folder.mkdir()
    for name, content in ({"config_json": CONFIG, "tokenizer_json": {"vocab": {"a": 1}}} | contents).items():
        stem, _, kind = name.rpartition("_")
        (folder / f"{stem}.{kind}").write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelConfig(id=folder.name, source=str(folder))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config_json": CONFIG | {"hidden_size": 32}}, r"config\.json \(architecture and shapes: hidden_size\)"),
        ({"config_json": CONFIG | {"quantization_config": {}}}, r"config\.json .*quantization_config"),
        ({"tokenizer_json": {"vocab": {"b": 1}}}, r"tokenizer\.json \(the tokenizer: vocab\)"),
        ({"tokenizer_model": "pieces"}, r"tokenizer\.model"),
        ({"generation_config_json": {"temperature": 0.6}}, r"generation_config\.json \(temperature; not read with"),
    ],
)
def test_a_variant_that_cannot_share_an_engine_is_refused_by_its_files(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    """The message says which file, which key, and what to do."""
    first = files(tmp_path / "first")
    with pytest.raises(ConfigError, match=f"models.other.engine_of: .*{words}.*engine of its own"):
        alike.check(files(tmp_path / "other", **changes), first)


def test_what_decides_nothing_may_differ(tmp_path: Path) -> None:
    """Who wrote the files, stored precision, chat template, how a trainer padded."""
    first = files(tmp_path / "first", tokenizer_config_json={"chat_template": "x"})
    other = files(
        tmp_path / "other",
        config_json=CONFIG | {"transformers_version": "9", "dtype": "float32"},
        tokenizer_json={"vocab": {"a": 1}, "padding": {"length": 8}},
        tokenizer_config_json={"chat_template": "y", "padding_side": "left"},
    )
    alike.check(other, first)


def test_without_files_on_this_node_nothing_is_said(tmp_path: Path) -> None:
    """The slot that will have them checks again."""
    alike.check(ModelConfig(id="m", source=str(tmp_path / "not-here")), files(tmp_path / "first"))


def test_all_misfits_are_named_at_once(tmp_path: Path) -> None:
    """One line each, for `serve-app check`; a model of another engine is none of its business."""
    sources = [
        files(tmp_path / name, config_json={"hidden_size": size}) for name, size in [("a", 1), ("b", 2), ("c", 3)]
    ]
    models = [model(m.id, "a" if m.id != "a" else "", source=m.source) for m in sources]
    with pytest.raises(ConfigError, match=r"models\.b\.engine_of: .*\nmodels\.c\.engine_of: ") as problem:
        alike.check_all(parse_app({"models": models}))
    assert len(str(problem.value).splitlines()) == 2


# What it costs.


def test_models_that_share_an_engine_cost_what_the_largest_of_them_costs() -> None:
    """Any number of variants where two engines of their own do not fit."""
    own = [ModelCost(name, 16e9, 2e9, 30e9) for name in ("a", "b", "c")]
    shared = [ModelCost(name, 16e9, 2e9, 30e9, "a") for name in ("a", "b", "c")]
    for budget in (Budget(host_bytes=20e9), Budget(gpu_bytes=31e9)):
        assert choose(own, budget, {}).models == ("a",)
        assert choose(shared, budget, {}).models == ("a", "b", "c")
    assert choose([*shared, ModelCost("d", 16e9, 2e9, 30e9)], Budget(host_bytes=40e9), {}).models == (
        "a",
        "b",
        "c",
        "d",
    )


@pytest.mark.parametrize(("wanted", "orders"), [(Tier.HOST, []), (Tier.READY, [Verb.RETIER])])
def test_a_model_whose_engine_is_lent_is_not_warmed_up_again_and_again(wanted: Tier, orders: list[Verb]) -> None:
    """It is at tier `disk`, which only a change of hands mends; that is worth it for the one kept `ready`."""
    standby = SlotView("s", State.STANDBY, "b", holds={"a": Tier.DISK, "b": Tier.HOST}, lent=frozenset({"a"}))
    models = (ModelView("a", 0, wanted), ModelView("b", 0, Tier.HOST))
    view = View(slots=(standby,), models=models, routers=(RouterView({}, (1, 1)),), version=(1, 1))
    assert [order.verb for order in decide(view, LiveSettings(), {})] == orders


# Taking turns, with simulated engines.


def command(name: str, tier: Tier = Tier.HOST) -> Command:
    return Command(epoch=1, op=1, verb=Verb.PROMOTE, model=name, tiers=dict.fromkeys("abc", tier))


async def started(**kwargs: Any) -> SlotEngines:
    """Models a and b share an engine, c has its own; all asleep at tier `host`."""
    models = [
        ModelConfig(id=name, engine="simulated", engine_kwargs=INSTANT | kwargs, engine_of=of)
        for name, of in (("a", ""), ("b", "a"), ("c", ""))
    ]
    made = SlotEngines(models, SlotConfig())

    async def introduce(model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        return Welcome(fingerprint, Verify.ENFORCE, 0.2, Tier.HOST)

    async def on_started(held: HeldEngine) -> None:
        pass

    await made.start(introduce, on_started)
    return made


def tiers(engines: SlotEngines) -> dict[str, str]:
    return {report.model: f"{report.tier}{' lent' if report.lent else ''}" for report in engines.reports()}


@pytest.mark.asyncio
async def test_one_engine_serves_its_models_in_turn() -> None:
    """Awake it changes hands as it is; the model that gives way is at tier `disk`, and counts no memory."""
    made = await started()
    assert tiers(made) == {"a": "disk lent", "b": "host", "c": "host"}
    await made.wake(command("a"))
    assert tiers(made) == {"a": "ready", "b": "disk lent", "c": "host"}
    await made.wake(command("b"))
    assert tiers(made) == {"a": "disk lent", "b": "ready", "c": "host"}
    await made.wake(command("c"))
    assert tiers(made) == {"a": "disk lent", "b": "host", "c": "ready"}
    await made.rest(command("c", Tier.DISK))
    assert tiers(made) == {"a": "disk lent", "b": "disk", "c": "disk"}
    await made.read_memory()
    assert [report.host_bytes for report in made.reports()] == [0, 0, 0]


@pytest.mark.asyncio
async def test_the_model_kept_ready_gets_its_engine_back() -> None:
    """Also where it is the one that has lent it."""
    made = await started()
    await made.wake(command("b"))
    await made.rest(Command(1, 1, Verb.RETIER, tiers={"a": Tier.READY, "b": Tier.HOST, "c": Tier.HOST}))
    assert tiers(made) == {"a": "ready", "b": "disk lent", "c": "host"}


@pytest.mark.asyncio
async def test_an_engine_that_is_lost_is_lost_for_all_its_models(tmp_path: Path) -> None:
    """They share its processes; models with engines of their own stay."""
    script = tmp_path / "script"
    made = await started(script=str(script))
    await made.wake(command("c"))
    script.write_text(json.dumps({"wake@a": "oom"}))
    with pytest.raises(OutOfMemory, match=r"b \(host\) holds .*c \(host\) holds"):
        await made.wake(command("a"))
    assert made.has_others("a")
    await made.give_up("a", "no memory")
    assert [held.model.id for held in made.usable] == ["c"]
    assert not made.has_others("c")
    await made.wake(command("c"))
    assert tiers(made)["c"] == "ready"
