"""Two engines in one actor, as in a slot, one after the other; writes what Ray then exports of vLLM, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import ray
from ray.cluster_utils import Cluster

from serve_app.config import ModelConfig, SlotConfig
from serve_app.engine.vllm import VllmEngine
from tests.vllm.engines import KWARGS

WANTED = ("ray_vllm_num_requests_running", "ray_vllm_kv_cache_usage_perc", "ray_vllm_generation_tokens_total")
MODELS = ("one", "two")


async def serve(source: str) -> list[str]:
    """Each engine works until its metrics are there: a gauge of an idle one is forgotten."""
    lines: list[str] = []
    for name in MODELS:
        config = ModelConfig(id=name, source=source, engine_kwargs=KWARGS)
        engine = VllmEngine(config, SlotConfig())
        await engine.start()
        for _ in range(60):
            await engine.warm_up()
            found = await asyncio.to_thread(exported, name)
            if {line.split("{")[0] for line in found} == set(WANTED):
                break
            await asyncio.sleep(0.5)
        lines += found
        await engine.shutdown()
    return lines


def exported(model: str) -> list[str]:
    """Lines of the node's metrics about one model."""
    [node] = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30).text
    return [line for line in text.splitlines() if line.startswith(WANTED) and f'model_name="{model}"' in line]


class Slot:
    async def serve(self, source: str) -> list[str]:
        return await serve(source)


if __name__ == "__main__":
    cluster = Cluster()
    cluster.add_node(num_cpus=2, include_dashboard=False)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    slot = ray.remote(Slot).remote()
    Path(sys.argv[2]).write_text(json.dumps(ray.get(slot.serve.remote(sys.argv[1]))))
    ray.shutdown()
    cluster.shutdown()
