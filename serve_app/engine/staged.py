"""What vLLM's workers record of themselves: the stages that only they see, per rank.

The slot fetches the records (`collective_rpc("take_stages")`) and exports their spans itself, so that they come also
from workers in which vLLM starts no tracer, Ray's among them, and also where there is no trace backend at all.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve_app.errors import EngineError
from serve_app.gpu import nccl, node
from serve_app.telemetry.stages import Stage
from serve_app.weights.reading import gb_per_s

Record = dict[str, Any]

# The wake of weights and of the KV cache are told apart by vLLM's tags.
_WAKES = {"weights": Stage.WAKE_WEIGHTS, "kv_cache": Stage.WAKE_KV}
# Recorded before, or outside of, the worker object; one worker a process.
_outside: list[Record] = []


class StagedWorker:
    """Mixin, placed before one of vLLM's worker classes; every method only adds a record around vLLM's own."""

    rank: int
    parallel_config: Any

    def init_device(self) -> None:
        self._stages: list[Record] = []
        if self.parallel_config.world_size > 1:
            # Another node than the driver's may have other interfaces: without one of them the ranks would only wait.
            os.environ.update(nccl.of_rank(node.network(""), os.environ))
        with self._stage(Stage.DEVICE_CONTEXT):
            super().init_device()  # type: ignore[misc]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with self._stage(Stage.WEIGHTS_LOAD) as record:
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            record["bytes"] = self._weight_bytes()
            record["gb_per_s"] = gb_per_s(record["bytes"], time.time() - record["start_s"])

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        with self._stage(Stage.KV_ALLOCATE):
            super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        with self._stage(Stage.GRAPH_CAPTURE):
            return super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]

    def sleep(self, level: int = 1) -> None:
        with self._stage(Stage.SLEEP):
            super().sleep(level)  # type: ignore[misc]

    def wake_up(self, tags: list[str] | None = None) -> None:
        names = [_WAKES[tag] for tag in tags or ["weights"] if tag in _WAKES]
        with self._stage(names[0] if names else Stage.WAKE_WEIGHTS):
            super().wake_up(tags)  # type: ignore[misc]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        with self._stage(Stage.WAKE_WEIGHTS) as record:
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]
            record["bytes"] = self._weight_bytes()  # at what rate, `weights.copy` says: copies may still be under way

    def check_communicator(self) -> None:
        """Reduce ones over all groups that the model uses. Every rank must call it at the same time.

        Raises:
            EngineError: a group's sum is wrong; a group that is cut off does not return (the caller has a deadline).
        """
        with self._stage(Stage.COMM_CHECK):
            parallel = importlib.import_module("vllm.distributed.parallel_state")
            torch = importlib.import_module("torch")
            # Through the network (gloo): vLLM has no NCCL communicator of the whole world, and making one costs memory.
            world, ones = parallel.get_world_group(), torch.ones(1)
            torch.distributed.all_reduce(ones, group=world.cpu_group)
            self._check_sum("world", ones, world)
            for name, group in (("tensor", parallel.get_tp_group()), ("pipeline", parallel.get_pp_group())):
                # One number: too small for vLLM's own kernels over NVLink, which leaves it to NCCL.
                self._check_sum(name, group.all_reduce(torch.ones(1, device=group.device)), group)

    def _check_sum(self, name: str, found: Any, group: Any) -> None:
        if found.item() != group.world_size:
            raise EngineError(
                f"rank {self.rank} on {os.uname().nodename}: all-reduce over the {name} parallel ranks {group.ranks} "
                f"gives {found.item():g} instead of {group.world_size}"
            )

    def take_stages(self) -> list[Record]:
        """The records since the last call, oldest first: stage, start_s (wall clock), duration_s, rank, host, bytes."""
        taken = sorted([*_outside, *self._stages], key=lambda record: record["start_s"])
        _outside.clear()
        self._stages = []
        place = self._place()
        return [record | place for record in taken]

    def _place(self) -> dict[str, Any]:
        return {"rank": self.rank, "host.name": os.uname().nodename}

    def ray_node(self) -> str:
        """Id of the Ray node that this worker runs on; only Ray's workers know it (see `Engine.rank_nodes`)."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    @contextmanager
    def _stage(self, name: Stage) -> Iterator[Record]:
        record: Record = {"stage": str(name), "start_s": time.time()}
        self._stages.append(record)
        try:
            yield record
        finally:
            record["duration_s"] = time.time() - record["start_s"]

    def _weight_bytes(self) -> int:
        """Of this rank's parameters."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def record_outside(stage: Stage, start_s: float, **attributes: Any) -> None:
    """Add a stage of this process to what its worker is asked for; `start_s` is wall clock.

    It ends now, unless `duration_s` is among the attributes.
    """
    _outside.append({"stage": str(stage), "start_s": start_s, "duration_s": time.time() - start_s} | attributes)


def record_communicator(module: Any) -> None:
    """Make `module` (one of vLLM's worker modules) record how long its communicators take to set up."""
    original = module.init_worker_distributed_environment

    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.time()
        try:
            return original(*args, **kwargs)
        finally:
            record_outside(Stage.COMM_INIT, start_s)

    module.init_worker_distributed_environment = timed
