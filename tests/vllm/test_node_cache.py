"""vLLM loading from the node's weight cache, for real: the same model as by its own loader, read once for all."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.config import ModelConfig, NodeCacheConfig, SlotConfig, Tier
from serve_app.engine.arguments import check_engine_kwargs, prepare_environment, server_arguments
from serve_app.engine.base import ALONE
from serve_app.engine.vllm import VllmEngine
from serve_app.errors import BadCheckpoint, ChecksumMismatch, ConfigError, EngineError
from serve_app.models import ensure_model
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord, recording
from serve_app.weights import checkpoint, manifest
from serve_app.weights.cache import SHARED_MEMORY

from .engines import make, running
from .models import make_fp8, make_qwen3

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOLDER = SHARED_MEMORY / f"serve_app-{os.getuid()}"


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: SmolLM2 (a Llama, whose nine heads cannot be split), the tiny Llama, and a Qwen3 in several files."""
    qwen3 = make_qwen3(tmp_path_factory.mktemp("models") / "qwen3", tiny_llama)
    return {"smollm2": ensure_model("smollm2-135m"), "llama": tiny_llama, "qwen3": qwen3}


async def logprobs(engine: VllmEngine) -> tuple[float, ...]:
    return (await engine.fingerprint()).values


def of_stage(records: list[StageRecord], name: Stage) -> list[StageRecord]:
    return [record for record in records if record.stage == name]


@pytest.mark.parametrize(("name", "ranks"), [("smollm2", 1), ("qwen3", 1), ("llama", 2), ("qwen3", 2)])
async def test_log_probabilities_are_those_of_vllms_own_loader(
    models: dict[str, Path], name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: after the start, and after the weights were dropped and loaded again."""
    if ranks > 1:
        # vLLM wants a NUMA node for each rank, unless it is told not to bind them.
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    async with running(models[name], tensor_parallel_size=ranks) as engine:
        wanted = await logprobs(engine)
    async with running(models[name], cached=True, tensor_parallel_size=ranks) as engine:
        assert await logprobs(engine) == wanted
        loads = of_stage(await engine.worker_stages(), Stage.WEIGHTS_LOAD)
        assert [record.rank for record in loads] == list(range(ranks))
        assert all(record.attributes["gb_per_s"] for record in loads)
        await engine.sleep(Tier.DISK)
        await engine.wake()
        assert await logprobs(engine) == wanted


async def test_vllm_is_given_an_fp8_models_tensors_as_by_its_own_loader(tiny_llama: Path, tmp_path: Path) -> None:
    """Weights and scales, to the last bit. On CPU vLLM computes in fp8 only with AMX, so that no engine is started."""
    # Not before an engine's environment is set, which vLLM reads as it is imported.
    prepare_environment(SlotConfig(), ModelConfig(id="tiny"), ALONE)
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    config: Any = importlib.import_module("vllm.config.load").LoadConfig
    importlib.import_module("serve_app.engine.node_loader")
    source = loaders.DefaultModelLoader.Source(str(make_fp8(tmp_path / "fp8", tiny_llama)), None)
    ours = config(load_format="node_cache", model_loader_extra_config={"max_bytes": None, "keep_s": 0})
    found, wanted = (dict(loaders.get_model_loader(each)._get_weights_iterator(source)) for each in (ours, config()))
    assert set(found) == set(wanted)
    assert {str(tensor.dtype) for tensor in found.values()} >= {"torch.float8_e4m3fn", "torch.float32"}
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


async def test_files_are_read_once_for_all_engines_and_their_reloads(tiny_llama: Path, tmp_path: Path) -> None:
    """One copy in shared memory; the second engine, and waking from tier `disk`, read nothing; asleep none holds it."""
    tiny_llama = shutil.copytree(tiny_llama, tmp_path / "own")  # that of other tests may still be in the cache
    size = checkpoint.load(checkpoint.find(tiny_llama)).size
    before = set(FOLDER.iterdir()) if FOLDER.exists() else set()
    with recording() as records:
        async with running(tiny_llama, cached=True) as first, running(tiny_llama, cached=True) as second:
            filled = of_stage(records, Stage.WEIGHTS_CACHE)
            assert [record.attributes["bytes"] for record in filled] == [size, 0]
            assert [record.attributes["cached"] for record in filled] == [False, True]
            assert float(filled[0].attributes["gb_per_s"]) > 0
            for engine in (first, second):
                awake = engine.memory().host_bytes
                await engine.sleep(Tier.DISK)
                assert awake - engine.memory().host_bytes > 0.8 * size
                await engine.wake()
                # Workers record what they read themselves.
                assert of_stage(await engine.worker_stages(), Stage.WEIGHTS_CACHE) == []
            [copy] = set(FOLDER.iterdir()) - before
            assert copy.stat().st_size == size


async def test_two_ways_to_say_how_weights_are_loaded_are_refused() -> None:
    """The error names both; nothing is started."""
    model = ModelConfig(id="m", engine_kwargs={"load_format": "dummy"})
    with pytest.raises(ConfigError, match=r"models\.m\.engine_kwargs\.load_format and slot\.node_cache\.enabled both"):
        check_engine_kwargs(model, SlotConfig(node_cache=NodeCacheConfig(enabled=True)))
    args = server_arguments(ModelConfig(id="m"), SlotConfig(), "m")
    assert (args.load_format, args.model_loader_extra_config) == ("auto", {})


async def test_damaged_weights_stop_the_start_before_an_engine_process_exists(models: dict[str, Path]) -> None:
    """A missing shard, and a flipped byte that only the manifest shows: typed errors with file and tensor."""
    qwen3 = models["qwen3"]
    manifest.write(qwen3)
    file = checkpoint.find(qwen3)[-1]
    content = file.read_bytes()
    old = file.stat()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    for wrong in (ChecksumMismatch, BadCheckpoint):
        engine = make(qwen3, cached=True)
        with pytest.raises(wrong) as error:
            await engine.start()
        assert (error.value.file, bool(error.value.tensor)) == (str(file), True)
        assert engine.memory().pids == ()
        await engine.shutdown()
        file.unlink(missing_ok=True)
    file.write_bytes(content)


async def test_a_tensor_that_does_not_fit_the_model_is_named(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sound in itself, but of another shape than the configuration says: the worker's log has file and tensor."""
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    [weights] = checkpoint.find(model)
    tensors = load_file(weights)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, weights)
    engine = make(model, cached=True)
    with pytest.raises(EngineError):
        await engine.start()
    await engine.shutdown()
    said = capfd.readouterr()
    assert f"weights file {weights}, tensor {name}: it does not fit the model" in said.out + said.err
