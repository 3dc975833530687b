"""Two models of one architecture in one slot: weights changed in place, against a second engine that sleeps.

    python -m benchmarks.variants [--switches 10] [--source smollm2-135m]

One slot's engines without Ray, on CPU, in three arrangements one after the other: both models on one engine
(`engine_of`), and each with its own, asleep at tier `host` or `disk`. A switch is what a promotion of the other model
does, from the command to its first token: with two engines sleep, wake, golden check; with one the weights and the
check. Both models have the same files, so that nothing else differs, and the page cache holds them: on a disk that is
slower than memory, weights that are read cost more. Compare arrangements of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import exit_when_terminated
from benchmarks.report import Report, median
from serve_app.config import CPU_ENGINE, DEFAULT_MODEL, ModelConfig, SlotConfig, Tier
from serve_app.engine.base import Fingerprint
from serve_app.live import Verify
from serve_app.pool.messages import Command, Verb, Welcome
from serve_app.slot.engines import SlotEngines
from serve_app.slot.held import HeldEngine

NAMES = ("base", "variant")
ARRANGEMENTS = {"in_place": Tier.HOST, "second_engine_host": Tier.HOST, "second_engine_disk": Tier.DISK}


async def measure(arrangement: str, source: str, switches: int, report: Report) -> None:
    """Start a slot's engines, switch to and fro, and claim the medians."""
    tier, engine_of = ARRANGEMENTS[arrangement], NAMES[0] if arrangement == "in_place" else ""
    kwargs: dict[str, Any] = dict(CPU_ENGINE)
    models = [
        ModelConfig(id=name, source=source, engine_kwargs=kwargs, engine_of=engine_of if name == NAMES[1] else "")
        for name in NAMES
    ]
    engines = SlotEngines(models, SlotConfig())

    async def introduce(model: str, kind: str, fingerprint: Fingerprint) -> Welcome:
        return Welcome(fingerprint, Verify.ENFORCE, 0.2, tier)

    async def started(held: HeldEngine) -> None:
        pass

    def command(model: str) -> Command:
        return Command(1, 1, Verb.PROMOTE, model=model, tiers=dict.fromkeys(NAMES, tier))

    try:
        await engines.start(introduce, started)
        await engines.read_memory()
        report.claim(f"{arrangement}_asleep_gb", sum(one.host_bytes for one in engines.reports()) / 1e9, "GB")
        runs: list[dict[str, Any]] = []
        for number in range(switches + 2):
            begin = time.monotonic()
            held = await engines.wake(command(NAMES[number % 2]))
            woken_s = time.monotonic() - begin
            await first_token(held)
            run = {"arrangement": arrangement, "to": held.model.id, "woken_s": woken_s}
            runs.append(run | {"first_token_s": time.monotonic() - begin})
        report.runs += runs
        kept = [run["first_token_s"] for run in runs[2:]]  # the first switch of each is a warm-up
        report.claim(f"{arrangement}_switch_first_token_s", median(kept), note=f"of {len(kept)} switches")
    finally:
        await engines.shutdown()


async def first_token(held: HeldEngine) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(held.engine.app), base_url="http://slot") as client:
        body = {"model": held.model.id, "prompt": "Once upon a time", "max_tokens": 1}
        (await client.post("/v1/completions", json=body, timeout=60)).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=10)
    parser.add_argument("--source", default=DEFAULT_MODEL)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    exit_when_terminated()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # equal for one engine and for two
    report = Report("variants")
    for arrangement in ARRANGEMENTS:
        asyncio.run(measure(arrangement, arguments.source, arguments.switches, report))
    report.write(arguments.output)


if __name__ == "__main__":
    main()
