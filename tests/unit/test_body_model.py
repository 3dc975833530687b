"""Which model a request asks for, read from its body in the proxy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.pool.body_model import FLEX_HEADER, MODEL_HEADER, is_flex, listing, with_model

HEADER = (MODEL_HEADER, b"named")


async def read(
    *parts: bytes, method: str = "POST", headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[str, Any, bytes]:
    """The name found, the new headers, and the body as whoever comes next reads it."""
    messages: list[Any] = [
        {"type": "http.request", "body": part, "more_body": index < len(parts) - 1} for index, part in enumerate(parts)
    ]
    gone = {"type": "http.disconnect"}

    async def receive() -> Any:
        return messages.pop(0) if messages else gone

    scope = {"type": "http", "method": method, "headers": list(headers)}
    asked, scope, again = await with_model(scope, receive)
    body = b""
    while (message := await again())["type"] == "http.request":
        body += message.get("body", b"")
    assert asked.flex == is_flex(scope["headers"])
    return asked.model, scope["headers"], body


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
async def test_the_body_arrives_unchanged_however_it_was_cut(body: bytes, cuts: list[int]) -> None:
    """And the disconnect after it."""
    edges = [0, *sorted(cuts), len(body)]
    parts = [body[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]
    assert (await read(*parts))[2] == body


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (json.dumps({"model": "x", "messages": []}).encode(), "x"),
        (json.dumps({"model": "ünï"}).encode(), "ünï"),
        (b'{"messages": []}', "named"),
        (b'{"model": 3}', "named"),
        (b"[]", "named"),
        (b"not json", "named"),
        (b"\xff\xfe", "named"),
        (b"", "named"),
    ],
)
async def test_the_body_names_the_model_else_the_header_does(body: bytes, name: str) -> None:
    """Exactly one header says it to the slot."""
    found, headers, _ = await read(body, headers=(HEADER, (b"accept", b"*/*")))
    assert found == name
    assert headers == [(b"accept", b"*/*"), (MODEL_HEADER, name.encode())]


async def test_a_request_that_names_no_model_carries_an_empty_header() -> None:
    """So that a client's own cannot get past the router."""
    assert (await read(b"{}"))[:2] == ("", [(MODEL_HEADER, b"")])


@pytest.mark.parametrize(
    ("body", "flex"), [(b'{"service_tier": "flex"}', True), (b'{"service_tier": "auto"}', False), (b"[]", False)]
)
async def test_only_the_body_says_that_a_request_may_wait(body: bytes, flex: bool) -> None:
    """A client's own header of that name is dropped."""
    _, headers, _ = await read(body, headers=((FLEX_HEADER, b"1"),))
    assert headers == [(MODEL_HEADER, b""), *([(FLEX_HEADER, b"1")] if flex else [])]


async def test_what_has_no_body_is_not_read() -> None:
    """A GET is passed on as it is."""
    assert (await read(b"{}", method="GET", headers=(HEADER,)))[:2] == ("named", [HEADER])


def test_the_listing_names_models_and_adapters() -> None:
    """An adapter has its base model as parent."""
    data: Any = listing({"x": ("x", "x-lora"), "y": ("y",)})["data"]
    assert [(entry["id"], entry["parent"]) for entry in data] == [("x", None), ("x-lora", "x"), ("y", None)]
