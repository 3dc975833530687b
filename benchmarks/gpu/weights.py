"""How fast weights get from storage into a rank's parameters: the node's weight cache against vLLM's loaders.

    python -m benchmarks.gpu.weights --model DIR [--layout tp1] [--formats node_cache auto ...] [--repeat 3]

Two `--parts`, both without Ray:

- fill: the files are read into an empty cache, from the page cache and from the disk (`cold`), with checksums and
  without; what verification costs is the difference.
- load: an engine starts with each load format, then falls asleep at tier `disk` and wakes up to its first token. The
  rate of a format is the bytes of the files over the seconds of the slowest rank's stage `weights.load`, which has also
  the model's construction and what vLLM does to the weights afterwards. With `node_cache` the weights are in the cache
  by then; `files_to_parameters_s` is what it takes with the reading of the files. How fast they go from the cache into
  the parameters, by the GPU's own clock, is `node_cache_gb_per_s` (stage `weights.copy`, per GPU), at the start, and
  `node_cache_reload_gb_per_s`, at a wake.

Wakes come `--rest` seconds after the sleep: before, the driver still clears what was given back.

`logprobs_differ` is by how much the golden check's prompt logprobs of a format, at its start and after its wakes, are
away from those of the first start of vLLM's own loader (`auto`), or, without that, of the first format.

A format whose library is not installed is noted as such. `--layout cpu` is a test of this script, not a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import layouts
from benchmarks.processes import exit_when_terminated
from benchmarks.promotion import short
from benchmarks.report import Report, median, ratio
from serve_app.config import ModelConfig, NodeCacheConfig, SlotConfig, Tier
from serve_app.engine.vllm import VllmEngine
from serve_app.errors import ServeAppError
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import StageRecord, recording
from serve_app.weights import checkpoint, manifest
from serve_app.weights.cache import SHARED_MEMORY, NodeCache

Run = dict[str, Any]
OURS = "node_cache"
# By load format: the module that it needs beside vLLM.
FORMATS = {
    OURS: "xxhash",
    "auto": "vllm",
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "runai_streamer": "runai_model_streamer",
}
PARTS = ("fill", "load")
CPU = "cpu"
CPU_KWARGS = {"max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True, "kv_cache_memory_bytes": 128 << 20}


@dataclass
class Benchmark:
    """What is measured, and where it is written."""

    model: Path
    layout: str
    repeat: int
    engine_kwargs: dict[str, Any]
    rest_s: float
    report: Report = field(default_factory=lambda: Report("gpu_weights", module="gpu.weights"))

    def fill(self) -> None:
        """Read the files into an empty cache, with and without a manifest, warm and cold."""
        manifest.write(self.model)
        files = [path.resolve() for path in checkpoint.find(self.model)]
        with tempfile.TemporaryDirectory() as bare:  # the same files, but no manifest beside them
            for file in checkpoint.find(self.model):
                (Path(bare) / file.name).symlink_to(file.resolve())
            self._filled(self.model)  # what only a process's first one costs
            for _ in range(self.repeat):
                for cold in (False, True):
                    for verified, directory in ((True, self.model), (False, Path(bare))):
                        if cold:
                            forget(files)
                        self._add(self._filled(directory) | {"phase": "fill", "cold": cold, "verified": verified})

    def _filled(self, directory: Path) -> Run:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory, tempfile.TemporaryDirectory() as locks:
            cache = NodeCache(None, 0, Path(memory), Path(locks))
            begin_cpu_s = time.process_time()
            weights = cache.acquire(checkpoint.load(checkpoint.find(directory)))
            cpu_s = time.process_time() - begin_cpu_s
            weights.close()
        rate = weights.read_bytes / 1e9 / weights.seconds
        return {"bytes": weights.read_bytes, "seconds": weights.seconds, "cpu_s": cpu_s, "gb_per_s": rate}

    async def load(self, formats: list[str]) -> None:
        """One engine after the other, each with the files in the page cache."""
        for name in formats:
            if importlib.util.find_spec(FORMATS[name]) is None:
                self._add({"phase": "load", "format": name, "valid": False, "error": f"{FORMATS[name]} not installed"})
                continue
            for _ in range(self.repeat):
                await self._engine(name)

    async def _engine(self, name: str) -> None:
        model, slot = self._config(name)
        self.report.configs[name] = {"model": model.model_dump(), "slot": slot.model_dump()}
        engine = VllmEngine(model, slot)
        run: Run = {"phase": "load", "format": name, "valid": False}
        try:
            with recording() as records:
                await engine.start()
            size = checkpoint.load(checkpoint.find(self.model)).size
            run |= loaded([*records, *await engine.worker_stages()], size)
            run["logprobs"] = [list((await engine.fingerprint()).values)]
            run |= await self._wake(engine, run["logprobs"])
            run["valid"] = True
        except ServeAppError as error:  # a library that fails here must not cost the others' figures
            run["error"] = str(error)
        finally:
            await engine.shutdown()
        self._add(run)

    async def _wake(self, engine: VllmEngine, logprobs: list[list[float]]) -> Run:
        """To sleep at tier `disk`, and back up to one token. The first sleep is another story: it comes before."""
        for _ in range(2):
            await engine.sleep(Tier.DISK)
            asleep = engine.memory().host_bytes
            await asyncio.sleep(self.rest_s)
            begin_s = time.perf_counter()
            await engine.wake()
            woken_s = time.perf_counter()
            logprobs.append(list((await engine.fingerprint()).values))
            first_token_s = time.perf_counter() - begin_s
            reload = copied(await engine.worker_stages())
        run = {"wake_s": woken_s - begin_s, "wake_to_first_token_s": first_token_s, "asleep_host_bytes": asleep}
        return run | ({"reload_gb_per_s": reload} if reload else {})

    def _config(self, name: str) -> tuple[ModelConfig, SlotConfig]:
        cache = NodeCacheConfig(enabled=name == OURS, keep_s=0)
        kwargs: dict[str, Any] = {} if name == OURS else {"load_format": name}
        if self.layout == CPU:
            model = ModelConfig(id="m", source=str(self.model), engine_kwargs=CPU_KWARGS | kwargs)
            return model, SlotConfig(node_cache=cache)
        shape = layouts.shape(self.model, self.layout, hard=64, **kwargs | self.engine_kwargs)
        model = ModelConfig(id="m", source=str(self.model), engine_kwargs=shape.engine_kwargs)
        return model, SlotConfig(gpus=shape.gpus, cpus=shape.cpus, node_cache=cache)

    def _add(self, run: Run) -> None:
        self.report.runs.append(run)
        shown = {key: value for key, value in run.items() if key != "logprobs"}
        print(", ".join(f"{key} {short(value)}" for key, value in shown.items()), flush=True)

    def claim(self) -> None:
        """Medians over the valid runs; targets are the design's, for an 8B model on an H200."""
        claim, is_gpu = self.report.claim, self.layout != CPU
        for cold in (False, True):
            rate = self._median("gb_per_s", phase="fill", cold=cold, verified=True)
            claim(f"fill_{'disk' if cold else 'page_cache'}_gb_per_s", rate, "GB/s")
        # In processor time: elapsed time differs by more than this from run to run where a disk or neighbours decide.
        plain = self._median("cpu_s", phase="fill", cold=False, verified=False)
        verified = self._median("cpu_s", phase="fill", cold=False, verified=True)
        extra = None if plain is None or verified is None else verified - plain
        claim("verification_share_of_fill_cpu", ratio(extra, plain), "", target=0.1, note="checksums while reading")
        loads = [run for run in self.report.runs if run["phase"] == "load"]
        for name, differ in differences(loads).items():
            claim(
                f"{name}_logprobs_differ", differ, "", target=0 if name == OURS else None, note="the largest, absolute"
            )
        for name in dict.fromkeys(run["format"] for run in loads if run["valid"] or run["format"] == OURS):
            runs = {key: self._median(key, phase="load", format=name, valid=True) for key in LOAD_KEYS}
            ours = is_gpu and name == OURS
            claim(f"{name}_{'stage_' if ours else ''}gb_per_s", runs["gb_per_s"], "GB/s", note="the whole stage")
            if ours:
                rates = {
                    key: self._median(key, phase="load", format=name) for key in ("copy_gb_per_s", "reload_gb_per_s")
                }
                note = "cache to parameters, each GPU"
                claim("node_cache_gb_per_s", rates["copy_gb_per_s"], "GB/s", target=40, bound=">=", note=note)
                claim("node_cache_reload_gb_per_s", rates["reload_gb_per_s"], "GB/s", note=f"{note}; at a wake")
            claim(f"{name}_load_s", runs["load_s"])
            claim(f"{name}_files_to_parameters_s", runs["files_to_parameters_s"])
            wake = "disk_tier_promoted_first_token_s" if ours else f"{name}_disk_wake_to_first_token_s"
            claim(wake, runs["wake_to_first_token_s"], target=0.8 if ours else None, note="engine alone")

    def _median(self, key: str, **wanted: Any) -> float | None:
        runs = [run for run in self.report.runs if all(run.get(name) == value for name, value in wanted.items())]
        return median([run[key] for run in runs if key in run])


LOAD_KEYS = ("gb_per_s", "load_s", "files_to_parameters_s", "wake_to_first_token_s")


def loaded(records: list[StageRecord], size: int) -> Run:
    """Seconds and rate of the stages that load a model with so many bytes of weight files."""
    ranks = [record for record in records if record.stage == Stage.WEIGHTS_LOAD]
    fill_s = sum(record.duration_s for record in records if record.stage == Stage.WEIGHTS_CACHE)
    load_s = max(record.duration_s for record in ranks)
    rate, copy_rate = size / 1e9 / load_s, copied(records)
    run = {"bytes": size, "load_s": load_s, "gb_per_s": rate, "files_to_parameters_s": fill_s + load_s}
    return run | ({"copy_gb_per_s": copy_rate} if copy_rate else {})


def differences(loads: list[Run]) -> dict[str, float]:
    """By format, how far its logprobs are from those of vLLM's own loader at most; 0 if they are the same."""
    found = {name: [run["logprobs"] for run in loads if run["format"] == name and run["valid"]] for name in FORMATS}
    reference: list[float] = next((runs[0][0] for name in ("auto", *FORMATS) if (runs := found[name])), [])
    return {
        name: max(abs(a - b) for run in runs for values in run for a, b in zip(values, reference, strict=True))
        for name, runs in found.items()
        if runs
    }


def copied(records: list[StageRecord]) -> float | None:
    """The slowest rank's rate from the node's cache into its parameters, GB/s; None where nothing was copied so."""
    copies = [record for record in records if record.stage == Stage.WEIGHTS_COPY]
    return min((float(record.attributes["gb_per_s"]) for record in copies), default=None)


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache, as far as nobody maps them."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model's files; gets a manifest")
    parser.add_argument("--layout", choices=[*sorted(layouts.LAYOUTS), CPU], default="tp1")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds asleep before a wake")
    parser.add_argument("--engine-kwargs", default="{}", help="more of them, as JSON")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu_weights.json")
    args = parser.parse_args()
    exit_when_terminated()
    benchmark = Benchmark(args.model, args.layout, args.repeat, json.loads(args.engine_kwargs), args.rest)
    try:
        if "fill" in args.parts:
            benchmark.fill()
        if "load" in args.parts:
            asyncio.run(benchmark.load(args.formats))
    finally:  # a time limit must not cost what was measured before
        benchmark.claim()
        benchmark.report.write(args.output)


if __name__ == "__main__":
    main()
