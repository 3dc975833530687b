"""A busy standby's requests in a real engine: others go first, and whoever must go is aborted there too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.config import ModelConfig, SlotConfig
from serve_app.engine.arguments import check_engine_kwargs
from serve_app.engine.base import AsgiApp
from serve_app.engine.vllm import VllmEngine
from serve_app.errors import ConfigError
from serve_app.slot.flex import FlexDoor

from .asgi import Response, request
from .engines import KWARGS
from .test_engine import CHAT, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOT = SlotConfig(flex_requests=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_llama: Path) -> AsyncIterator[VllmEngine]:
    """One request at a time, so that the order is seen."""
    kwargs = KWARGS | {"max_num_seqs": 1}
    engine = VllmEngine(ModelConfig(id="tiny", source=str(tiny_llama), engine_kwargs=kwargs), SLOT)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.shutdown()


def door_to(engine: VllmEngine) -> FlexDoor:
    door = FlexDoor(SLOT.flex_requests, lambda: None)
    door.open(engine.app, "tiny")
    return door


async def ask(app: AsgiApp, tokens: int, response: Response | None = None) -> Response:
    body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, "stream": True, "service_tier": "flex"}
    return await request(app, "POST", CHAT, body | {"messages": [{"role": "user", "content": "Hi"}]}, response)


async def test_others_are_served_before_flex_requests_that_came_earlier(engine: VllmEngine) -> None:
    door, order = door_to(engine), list[str]()

    async def noted(name: str, app: AsgiApp, tokens: int) -> None:
        assert (await ask(app, tokens)).text()
        order.append(name)

    first = asyncio.ensure_future(noted("running", door, 200))
    assert await eventually(lambda: engine.load().running == 1, 20)
    waiting = asyncio.ensure_future(noted("flex", door, 4))
    assert await eventually(lambda: engine.load().waiting == 1, 20)
    await asyncio.gather(first, waiting, noted("other", engine.app, 4))
    assert order == ["running", "other", "flex"]


async def test_a_request_that_is_ended_leaves_the_engine(engine: VllmEngine) -> None:
    """And its client reads why."""
    door, response = door_to(engine), Response()
    call = asyncio.ensure_future(ask(door, 900, response))
    assert await eventually(lambda: len(response.chunks) > 3, 20)
    await door.end()
    await call
    last = response.body.decode().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == 429
    assert await eventually(lambda: engine.load().running == 0, 20)


async def test_another_scheduling_policy_is_refused() -> None:
    model = ModelConfig(id="tiny", engine_kwargs={"scheduling_policy": "fcfs"})
    with pytest.raises(ConfigError, match=r"models\.tiny\.engine_kwargs\.scheduling_policy is 'fcfs'"):
        check_engine_kwargs(model, SLOT)
