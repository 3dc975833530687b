"""The proxy's front door: who may come in, and with how much; in a real proxy: tests/vllm/test_security.py."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.errors import ConfigError
from serve_app.pool.api_keys import KEYS, KEYS_FILE, OPEN_PATHS, ApiKeys, given_key, tenant
from serve_app.pool.body_limit import DEFAULT_BYTES, MAX_BYTES, BodyLimit, limit_from
from serve_app.pool.proxy import middlewares

ONE, TWO, OLD = "sk-one-0123456789", "sk-two-0123456789", "sk-old-0123456789"


class Inside:
    """The application behind the door: reads the whole body, answers 200, and remembers what it saw."""

    def __init__(self) -> None:
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.tenants: list[str] = []
        self.left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers.append(scope["headers"])
        self.tenants.append(tenant.get())
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                break
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})


def ask(app: Any, path: str = "/v1/models", **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://pool") as client:
            return await client.post(path, **options)

    return asyncio.run(run())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_keys_everybody_is_let_in() -> None:
    """And what a client sends along reaches the slot: vLLM may have keys of its own."""
    inside = Inside()
    assert ask(ApiKeys(inside, {}), headers=bearer("any")).status_code == 200
    assert (b"authorization", b"Bearer any") in inside.headers[0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(ONE), 200),
        (bearer(TWO), 200),
        ({"Authorization": f"bearer  {ONE} "}, 200),
        ({"x-api-key": TWO}, 200),  # Anthropic's SDK
        ({}, 401),
        (bearer(ONE[:-1]), 401),
        (bearer(f"{ONE},{TWO}"), 401),
        (bearer(""), 401),
        ({"authorization": ONE}, 401),
        ({"authorization": f"Basic {ONE}"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_only_who_has_a_key_is_let_in(headers: dict[str, str], status: int) -> None:
    """The others get OpenAI's error shape, and nothing behind the door sees their request."""
    inside = Inside()
    answer = ask(ApiKeys(inside, {KEYS: f"{ONE}, {TWO}"}), headers=headers)
    assert (answer.status_code, len(inside.headers)) == (status, int(status == 200))
    if status == 401:
        assert (answer.json()["error"]["code"], answer.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")


def test_key_goes_no_further() -> None:
    """The slot sees all headers but the key; no message and no name of ours contains it."""
    inside = Inside()
    door = ApiKeys(inside, {KEYS: ONE})
    assert ask(door, headers={**bearer(ONE), "x-request-id": "7"}).status_code == 200
    assert ONE.encode() not in b"".join(value for _, value in inside.headers[0])
    assert (b"x-request-id", b"7") in inside.headers[0]
    assert ONE not in repr(door._ring) and ONE not in ask(door, headers=bearer(f"{ONE}x")).text


def test_requests_of_one_key_belong_together_and_do_not_show_it() -> None:
    """For turns among held requests; whoever needs no key has no name."""
    inside = Inside()
    door = ApiKeys(inside, {KEYS: f"{ONE},{TWO}"})
    for key in (ONE, TWO, ONE):
        ask(door, headers=bearer(key))
    first, second, again = inside.tenants
    assert first == again != second and first and ONE not in first
    ask(ApiKeys(inside, {}), headers=bearer(ONE))
    assert inside.tenants[-1] == ""


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_health_stays_open(path: str) -> None:
    """Probes have no key; what only looks like a health route needs one, as it would be routed, and held."""
    door = ApiKeys(Inside(), {KEYS: ONE})
    assert ask(door, path).status_code == 200
    assert [ask(door, other).status_code for other in (f"{path}/", f"/x{path}", "/health")] == [401] * 3


def test_keys_change_with_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In force with the next request, without a restart; a link that is pointed elsewhere is a change too."""
    file, renewed = tmp_path / "keys", tmp_path / "renewed"
    file.write_text(f"# team a\n{OLD}  # until May\n\n{ONE}\n")
    door = ApiKeys(Inside(), {KEYS_FILE: str(file)})
    with caplog.at_level(logging.DEBUG):
        assert [ask(door, headers=bearer(key)).status_code for key in (OLD, ONE, TWO)] == [200, 200, 401]
        renewed.write_text(f"{ONE}\n{TWO}\n")
        os.replace(renewed, file)
        assert [ask(door, headers=bearer(key)).status_code for key in (OLD, ONE, TWO)] == [401, 200, 200]
        file.unlink()
        assert [ask(door, headers=bearer(key)).status_code for key in (OLD, ONE, TWO)] == [401, 200, 200]
        file.write_text("")
        assert [ask(door, headers=bearer(key)).status_code for key in (OLD, ONE, TWO)] == [401] * 3
    assert "2 API keys in force" in caplog.text and "cannot be read" in caplog.text
    assert not any(key in caplog.text for key in (OLD, ONE, TWO))


def test_file_that_cannot_be_read_lets_nobody_in(tmp_path: Path) -> None:
    """A mistyped path must not open the door."""
    door = ApiKeys(Inside(), {KEYS_FILE: str(tmp_path / "nowhere")})
    assert ask(door, headers=bearer("")).status_code == ask(door).status_code == 401


def test_websocket_without_a_key_is_closed() -> None:
    """`/v1/realtime` is a WebSocket: 1008, before it is accepted."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(ApiKeys(Inside(), {KEYS: ONE})(scope, receive, send))
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


def test_header_names_the_key() -> None:
    """The first header that can carry one counts."""
    assert given_key([(b"host", b"x"), (b"authorization", b"Bearer a"), (b"x-api-key", b"b")]) == b"a"
    assert given_key([(b"x-api-key", b"b"), (b"authorization", b"Bearer a")]) == b"b"


# How large a request may be.


async def chunks(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b"x" * size


@pytest.mark.parametrize(
    ("content", "status"), [(b"x" * 10, 200), (b"x" * 11, 413), (chunks(5, 5), 200), (chunks(5, 5, 5), 413)]
)
def test_request_beyond_the_limit_is_refused(content: Any, status: int) -> None:
    """By its declared length before a byte is read, in chunks as soon as they are too many."""
    inside = Inside()
    answer = ask(BodyLimit(inside, {MAX_BYTES: "10"}), content=content)
    assert answer.status_code == status
    if status == 413:
        assert answer.json()["error"]["code"] == "request_too_large" and MAX_BYTES in answer.text
        assert len(inside.headers) == inside.left  # it either never saw the request, or saw the client leave


@pytest.mark.parametrize("given", ["0", "-1", "64MB", "1.5"])
def test_wrong_limit_is_an_error_that_names_the_variable(given: str) -> None:
    """Not a limit that nobody asked for."""
    with pytest.raises(ConfigError, match=MAX_BYTES):
        limit_from({MAX_BYTES: given})
    assert limit_from({}) == limit_from({MAX_BYTES: ""}) == DEFAULT_BYTES


def test_keys_are_looked_at_first() -> None:
    """Serve puts each middleware around those before it; a stranger's request is not even measured."""
    assert [middleware.cls for middleware in middlewares()][-2:] == [BodyLimit, ApiKeys]
    answer = ask(ApiKeys(BodyLimit(Inside(), {MAX_BYTES: "1"}), {KEYS: ONE}), content=json.dumps("large"))
    assert answer.status_code == 401
