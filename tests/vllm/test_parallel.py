"""Two tensor parallel ranks on CPU, for real: the communicator is checked before anything is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.config import Tier
from serve_app.slot.golden import check
from serve_app.telemetry.stages import Stage
from serve_app.telemetry.tracing import recording

from .engines import running

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_every_rank_takes_part_in_the_communicators_check(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a stage of the start, seen by the slot and by both ranks, and works again after a sleep."""
    # vLLM wants a NUMA node for each rank, unless it is told not to bind them.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with recording() as records:
        async with running(tiny_llama, tensor_parallel_size=2) as engine:
            own = [record for record in records if record.stage == Stage.COMM_CHECK]
            of_ranks = [record for record in await engine.worker_stages() if record.stage == Stage.COMM_CHECK]
            assert [(record.rank, record.done) for record in own] == [(-1, True)]
            assert sorted(record.rank for record in of_ranks) == [0, 1]
            before = await engine.fingerprint()
            await engine.sleep(Tier.HOST)
            await engine.wake()
            await engine.check_communicator()
            check(before, await engine.fingerprint(), 1e-3)
