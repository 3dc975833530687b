"""Which model a request asks for, and whether it may wait: in OpenAI's API that stands in the body, which Serve's
router does not see.

Measured on Ray 2.60 (shared notes): a second hop through a deployment of its own costs 7 ms a request and a millisecond
of CPU a chunk on two cores; reading the body here, in the proxy, costs its parsing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

# Tells the slot what was asked for, and lets a client say so where the body is not JSON (audio, images).
MODEL_HEADER = b"x-serve-app-model"
# Tells the slot that it may wait. Not for clients, whose own is dropped: it is what the body says.
FLEX_HEADER = b"x-serve-app-flex"
NO_STANDBY = "no standby is free for requests of service_tier flex"
LISTING_PATH = "/v1/models"
_STARTED_S = int(time.time())


class Asked(NamedTuple):
    """What a request says of itself.

    Attributes:
        model: the name; empty if it names none. flex: its `service_tier` is `flex`.
    """

    model: str
    flex: bool = False


async def with_model(scope: Scope, receive: Receive) -> tuple[Asked, Scope, Receive]:
    """Read the body; returns what it asks for, and what stands for the request from here on."""
    if scope["method"] != "POST":
        return Asked(named_in(scope["headers"])), scope, receive
    messages = await read(receive)
    asked = _asked_in(b"".join(message.get("body", b"") for message in messages))
    asked = asked._replace(model=asked.model or named_in(scope["headers"]))
    others = [(key, value) for key, value in scope["headers"] if key not in (MODEL_HEADER, FLEX_HEADER)]
    ours = [(MODEL_HEADER, asked.model.encode()), *([(FLEX_HEADER, b"1")] if asked.flex else [])]
    return asked, {**scope, "headers": [*others, *ours]}, replayed(messages, receive)


async def read(receive: Receive) -> list[Message]:
    """All of a request's body."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def replayed(messages: Iterable[Message], receive: Receive) -> Receive:
    """What stands for `receive` once messages have been taken from it: those first."""
    left = iter(messages)

    async def again() -> Message:
        return next(left, None) or await receive()

    return again


def _asked_in(body: bytes) -> Asked:
    try:
        parsed: Any = json.loads(body)
    except ValueError:  # not JSON, or not UTF-8
        return Asked("")
    if not isinstance(parsed, dict):
        return Asked("")
    found = cast("dict[str, Any]", parsed)
    name = found.get("model")
    return Asked(name if isinstance(name, str) else "", found.get("service_tier") == "flex")


def is_flex(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the proxy has found a request to be one of `service_tier: flex`."""
    return any(key == FLEX_HEADER for key, _ in headers)


def named_in(headers: list[tuple[bytes, bytes]]) -> str:
    """The model that a request's headers name; empty if they do not."""
    return next((value.decode("utf-8", "replace") for key, value in headers if key == MODEL_HEADER), "")


def listing(models: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    """What `GET /v1/models` answers for models with these names; a LoRA adapter has its base model as `parent`."""
    entries = [
        {
            "id": name,
            "object": "model",
            "created": _STARTED_S,
            "owned_by": "serve_app",
            "parent": None if name == model else model,
        }
        for model, names in models.items()
        for name in names
    ]
    return {"object": "list", "data": entries}
