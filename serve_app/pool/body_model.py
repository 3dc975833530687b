"""Which model a request asks for: in OpenAI's API that stands in the body, which Serve's router does not see.

Measured on Ray 2.60 (shared notes): a second hop through a deployment of its own costs 7 ms a request and a millisecond
of CPU a chunk on two cores; reading the body here, in the proxy, costs its parsing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

# Tells the slot what was asked for, and lets a client say so where the body is not JSON (audio, images).
MODEL_HEADER = b"x-serve-app-model"
LISTING_PATH = "/v1/models"
_STARTED_S = int(time.time())


async def with_model(scope: Scope, receive: Receive) -> tuple[str, Scope, Receive]:
    """Read the body; returns the model's name, empty if none is named, and what stands for the request from here on."""
    if scope["method"] != "POST":
        return _named(scope), scope, receive
    messages = await _read(receive)
    name = _model_in(b"".join(message.get("body", b"") for message in messages)) or _named(scope)
    left = iter(messages)

    async def again() -> Message:
        return next(left, None) or await receive()

    others = [(key, value) for key, value in scope["headers"] if key != MODEL_HEADER]
    return name, {**scope, "headers": [*others, (MODEL_HEADER, name.encode())]}, again


async def _read(receive: Receive) -> list[Message]:
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _model_in(body: bytes) -> str:
    try:
        parsed: Any = json.loads(body)
    except ValueError:  # not JSON, or not UTF-8
        return ""
    name = cast("dict[str, Any]", parsed).get("model") if isinstance(parsed, dict) else ""
    return name if isinstance(name, str) else ""


def _named(scope: Scope) -> str:
    return named_in(scope["headers"])


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
