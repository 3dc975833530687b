"""The gate in front of a slot's engine: an ASGI application that counts, and that can be shut without losing anyone.

Everything here runs on the slot's event loop and between two `await`s nothing else does; that is what makes "nothing in
flight, therefore shut" one step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from serve_app.engine.base import AsgiApp, Message, Receive, Send
from serve_app.pool import body_model
from serve_app.pool.answering import answer, refuse
from serve_app.slot.flex import FlexDoor

# What the public port may reach of vLLM's server. A list of what is allowed, so that a route which a later vLLM adds
# for developers or operators stays unreachable until somebody has looked at it.
PUBLIC_PREFIXES = ("/v1/", "/v2/", "/docs/")
PUBLIC_PATHS = frozenset(
    {
        *("/health", "/ping", "/version", "/openapi.json", "/docs"),
        *("/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank"),
    }
)
PROXY_HINT = (
    ": Serve's proxies answer it once RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_app.pool.proxy.middlewares is in "
    "their environment, see controller_options in configs/cpu.yaml"
)
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


class Gate:
    """Counts requests inside (`in_flight`) and outside (`at_gate`), and lets those for its model in while it is open.

    Args:
        on_change: called, in the same event-loop step, whenever a count changes.
        models: by id, what clients may call each of the application's models.
        flex: requests that a standby serves, see `FlexDoor`; 0: none.

    Attributes:
        flex: the door for those, beside the gate.
    """

    def __init__(self, on_change: Callable[[], None], models: Mapping[str, tuple[str, ...]], flex: int = 0) -> None:
        self.flex = FlexDoor(flex, on_change)
        self.in_flight = 0
        self.max_wait_s = 60.0
        self._models = models
        self._app: AsgiApp | None = None
        self._model = ""
        self._outside: Counter[str] = Counter()
        self._moved = asyncio.Event()  # replaced at every opening: those who wait then look again
        self._broken = ""
        self._on_change = on_change

    @property
    def is_open(self) -> bool:
        return self._app is not None

    @property
    def at_gate(self) -> int:
        return self._outside.total()

    @property
    def gate_model(self) -> str:
        """Which model most of those outside ask for; empty if they name none."""
        return max(self._outside, key=lambda model: self._outside[model], default="")

    def open(self, app: AsgiApp, model: str) -> None:
        """Let everyone who asks for `model`, or for none, through to `app`, first those who wait."""
        self._app, self._model = app, model
        self._move()

    def try_shut(self) -> bool:
        """Shut if nothing is in flight; False, and still open, if something is. Who may wait keeps nobody from it."""
        if self.in_flight:
            return False
        self._app = None
        return True

    def break_down(self, reason: str) -> None:
        """The slot has failed or leaves, for good: whoever waits or comes is told so at once."""
        self._broken = reason
        self._move()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        turn_away = _close if scope["type"] == "websocket" else refuse
        if not is_public(scope["path"]):
            hint = PROXY_HINT if scope["path"].startswith("/health/") else ""
            await turn_away(send, 404, f"no route {scope['path']}{hint}", "not_found_error")
            return
        if len(self._models) > 1 and scope["path"] == body_model.LISTING_PATH and scope["type"] == "http":
            await answer(send, 200, body_model.listing(self._models))
            return
        if self.flex.most and body_model.is_flex(scope["headers"]):
            await self.flex(scope, receive, send)
            return
        app = await self._enter(self._asked(scope))
        if app is None:
            await turn_away(send, 503, self._broken or "this slot is asleep; try again", "overloaded_error")
            return
        self._count(inside=1)
        try:
            await app(scope, receive, send)
        finally:
            self._count(inside=-1)

    def _asked(self, scope: Message) -> str:
        """The id of the model that a request was routed here for; empty if the pool has only one, or none is named."""
        name = body_model.named_in(scope["headers"]) if len(self._models) > 1 else ""
        return next((model for model, names in self._models.items() if name in names), "")

    async def _enter(self, model: str) -> AsgiApp | None:
        """Wait outside until the gate is open for `model`; None if that takes too long or the slot is broken."""
        deadline = asyncio.get_running_loop().time() + self.max_wait_s
        while not self._broken and (self._app is None or model not in ("", self._model)):
            self._outside[model] += 1
            self._count()
            try:
                await asyncio.wait_for(self._moved.wait(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                return None
            finally:
                self._outside[model] -= 1
                self._count()
        return None if self._broken else self._app

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _count(self, inside: int = 0) -> None:
        self.in_flight += inside
        self._on_change()

    def __repr__(self) -> str:
        return f"<Gate {'open' if self.is_open else 'shut'}, {self.in_flight} in flight, {self.at_gate} waiting>"


def is_public(path: str) -> bool:
    """Whether the public port may reach `path` of the engine's server."""
    return path in PUBLIC_PATHS or (path.startswith(PUBLIC_PREFIXES) and path not in ADMIN_PATHS)


async def _close(send: Send, status: int, message: str, kind: str) -> None:
    """Turn a WebSocket away: 1013 is "try again later", 1008 "not allowed" (RFC 6455 and IANA's registry)."""
    await send({"type": "websocket.close", "code": 1013 if status == 503 else 1008, "reason": message[:120]})


async def _lifespan(receive: Receive, send: Send) -> None:
    """Serve starts its ingress application before the engine exists; the engine's own start-up is ours to run."""
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
