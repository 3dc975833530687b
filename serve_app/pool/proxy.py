"""What runs in every Serve proxy around routing: health routes, the client's own deadline, which model a request asks
for, and where it went.

Serve calls `middlewares` in the proxy actor (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH). Health is answered right here:
routed to a slot it would be held like any other request while no slot is active.
"""

from __future__ import annotations

import contextvars
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from serve_app.pool import answering, body_model, carried_body
from serve_app.pool.api_keys import ApiKeys, KeyRing
from serve_app.pool.body_limit import BodyLimit
from serve_app.pool.first_bytes import FirstBytes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serve_app.pool.router import PoolRouter

UNGUARDED = (
    "API keys are demanded here, but Serve was started without serve_app's middleware, which asks for them: start it "
    "anew with the `controller_options` of configs/cpu.yaml"
)
READY, STARTUP = "/health/ready", "/health/startup"
NOT_HELD_S = 0.001
NOTHING = body_model.Asked("")

# Headers in which clients say how long they will wait, in seconds. The OpenAI and Anthropic SDKs send the second one.
TIMEOUT_HEADERS = (b"x-request-timeout-s", b"x-stainless-read-timeout")

# The routers of this proxy process, for /health; and what the client of the request in this context sent along: how
# long it will wait, what it asks for (None where nobody has looked: it matters with several models or flex only), and
# its W3C trace context.
routers: list[PoolRouter] = []
client_timeout_s: contextvars.ContextVar[float] = contextvars.ContextVar("client_timeout_s", default=math.inf)
requested: contextvars.ContextVar[body_model.Asked | None] = contextvars.ContextVar("requested", default=NOTHING)
client_trace: contextvars.ContextVar[str] = contextvars.ContextVar("client_trace", default="")

# Response headers: the slot that answers, and for how many seconds the request was held before it went there.
SLOT_HEADER = "x-serve-app-slot"
HELD_HEADER = "x-serve-app-held-s"


@dataclass
class Routed:
    """What our router did with one request. It runs in a copy of the request's context, so it fills in this object.

    Attributes:
        slot: where the request went, empty if nowhere.
        held_s: seconds for which it was held, from its arrival; None if no router of ours has seen it.
        unknown_model: why it went nowhere, if it names a model that there is not.
        answered: its response has begun.
        application, model, path: for metrics; path is one of `metrics.TTFT`'s.
    """

    slot: str = ""
    held_s: float | None = None
    unknown_model: str = ""
    answered: bool = False
    application: str = ""
    model: str = ""
    path: str = "active"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """As response headers; none for another application's request."""
        found = [(SLOT_HEADER.encode(), self.slot.encode())] if self.slot else []
        if self.held_s is not None:
            found.append((HELD_HEADER.encode(), f"{self.held_s:.4f}".encode()))
        return found


routed: contextvars.ContextVar[Routed | None] = contextvars.ContextVar("routed", default=None)


def middlewares() -> list[Middleware]:
    """Serve's HTTP proxy callback; the last one sees a request first."""
    return [Middleware(PoolMiddleware), Middleware(BodyLimit), Middleware(ApiKeys)]


def is_unguarded() -> bool:
    """Whether keys are demanded here, and nobody asked this request for one: Serve runs without `middlewares`."""
    return routed.get() is None and KeyRing(os.environ).required


class PoolMiddleware:
    """Pure ASGI middleware: a look at a request's path, some headers and, with several models, its body; two headers
    more in its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            answer = health(scope["path"]) or _models(scope)
            if answer is not None:
                await answering.answer(send, *answer)
                return
            if scope["path"] in (READY, STARTUP):  # `pool: off`: a replica that answers at all is ready
                scope = {**scope, "path": "/health", "raw_path": b"/health"}
                client_timeout_s.set(NOT_HELD_S)  # a pool that is about to begin must not hold it
            else:
                client_timeout_s.set(_timeout(scope["headers"]))
                asked = None
                if any(router.reads_bodies for router in routers):
                    asked, scope, receive = await body_model.with_model(scope, receive)
                requested.set(asked)
            scope, receive = await carried_body.carry(scope, receive)
            client_trace.set(_traceparent(scope["headers"]))
            found = Routed()
            routed.set(found)
            await self.app(scope, receive, _with_headers(send, found))
            if found.unknown_model and not found.answered:
                error = {"message": found.unknown_model, "type": "NotFoundError", "param": "model", "code": 404}
                await answering.answer(send, 404, {"error": error})
            return
        await self.app(scope, receive, send)


def _with_headers(send: Send, found: Routed) -> Send:
    """`send`, with what the router has by then found out about a request added to its response."""

    first_bytes = FirstBytes(found)

    async def add(message: Message) -> None:
        first_bytes.see(message)
        if message["type"] == "http.response.start":
            found.answered = True
            message = {**message, "headers": [*message.get("headers", ()), *found.headers()]}
        await send(message)

    return add


def add_router(router: PoolRouter) -> None:
    """Serve makes a router when an application is deployed and tells nobody when it drops it: the newer one counts.

    Its own tasks would keep the older one alive for ever, and have it report, and set gauges, beside the newer one.
    """
    for known in routers:
        if known.deployment == router.deployment:
            known.stop()
    routers[:] = [known for known in routers if known.deployment != router.deployment] + [router]


def health(path: str) -> tuple[int, dict[str, object]] | None:
    """Status and body for a health route; None for any other path, and where there is no pool to ask.

    `live`: this proxy answers. `ready`: at least one slot is active, or a standby waits in a pool that may have none
    (`min_active: 0`): else no request would ever come to wake it. `startup`: it has been ready before.
    """
    if path == "/health/live":
        return 200, {"status": "live"}
    if path not in (READY, STARTUP) or not routers:
        return None
    ready = any(router.ready for router in routers)
    started = any(router.has_been_ready for router in routers)
    if ready if path == READY else started:
        return 200, {"status": path.rsplit("/", 1)[1]}
    slots = {slot: stage for router in routers for slot, stage in router.stages.items()}
    return 503, {"status": "no active slot", "slots": slots or "none known yet"}


def _models(scope: Scope) -> tuple[int, dict[str, object]] | None:
    """The list of models of the only pool here, if it has several: a slot would have to be awake to give it."""
    if scope["method"] != "GET" or not scope["path"].endswith(body_model.LISTING_PATH):
        return None
    # Of an application that has been deleted only the router is left, without replicas.
    alive = [router for router in routers if router.has_replicas]
    models = alive[0].models if len(alive) == 1 else {}
    return (200, body_model.listing(models)) if len(models) > 1 else None


def _timeout(headers: list[tuple[bytes, bytes]]) -> float:
    """The shortest timeout the client names, infinity if it names none that is a positive number."""
    shortest = math.inf
    for name, value in headers:
        if name in TIMEOUT_HEADERS:
            try:
                seconds = float(value)
            except ValueError:
                continue
            if seconds > 0:
                shortest = min(shortest, seconds)
    return shortest


def _traceparent(headers: list[tuple[bytes, bytes]]) -> str:
    return next((value.decode("latin-1") for name, value in headers if name == b"traceparent"), "")
