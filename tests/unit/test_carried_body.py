"""A request's body on its way from the proxy to the slot."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from ray.serve._private.common import StreamingHTTPRequest

from serve_app.pool import carried_body
from serve_app.pool.carried_body import CARRIED, MOST_BYTES, carry

GONE = {"type": "http.disconnect"}


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process accepts carried bodies, until the test ends."""
    monkeypatch.setattr(StreamingHTTPRequest, "receive_asgi_messages", StreamingHTTPRequest.receive_asgi_messages)
    carried_body.accept()


async def sent(*messages: dict[str, Any], headers: tuple[tuple[bytes, bytes], ...] = ()) -> tuple[Any, list[Any]]:
    """The scope that goes to the slot, and what the proxy's own `receive` gives then."""
    left = [*messages, GONE]

    async def receive() -> Any:
        return left.pop(0) if left else GONE

    scope, again = await carry({"type": "http", "headers": list(headers)}, receive)
    return scope, [await again() for _ in range(len(messages) + 1)]


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_the_whole_body_goes_along_and_stays_readable_in_the_proxy() -> None:
    """However it came; another application behind the proxy reads it as ever, and sees the disconnect after it."""
    messages = (part(b"one ", more=True), part(b"two"))
    scope, after = await sent(*messages, headers=((b"content-length", b"7"),))
    assert scope[CARRIED] == b"one two"
    assert after == [*messages, GONE]


@pytest.mark.parametrize(
    "headers",
    [
        ((b"content-length", str(MOST_BYTES + 1).encode()),),
        ((b"transfer-encoding", b"chunked"),),
        ((b"content-length", b"nonsense"),),
    ],
)
async def test_what_may_be_large_is_not_read_in_the_proxy(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """The slot fetches it."""
    scope, after = await sent(part(b"large"), headers=headers)
    assert CARRIED not in scope
    assert after == [part(b"large"), GONE]


async def test_a_client_that_leaves_in_the_middle_of_its_body_has_left() -> None:
    """The part that came is no body."""
    scope, after = await sent(part(b"ha", more=True), headers=((b"content-length", b"4"),))
    assert CARRIED not in scope
    assert after == [part(b"ha", more=True), GONE]


@pytest.mark.usefixtures("slot")
async def test_the_slot_reads_it_once_and_then_waits() -> None:
    """As it would wait for the client's disconnect; the entry itself is gone from the scope."""
    scope, _ = await sent(part(b"body"), headers=((b"content-length", b"4"),))
    request = pickle.loads(pickle.dumps(StreamingHTTPRequest(scope, proxy_actor_name="nobody")))
    fetch = request.receive_asgi_messages
    assert CARRIED not in request.asgi_scope
    assert pickle.loads(await fetch(None)) == [part(b"body")]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fetch(None), 0.01)


@pytest.mark.usefixtures("slot")
async def test_a_request_without_one_is_fetched_as_ever() -> None:
    """By what Serve was given for it."""

    async def given(_metadata: Any) -> bytes:
        return b"fetched"

    request = StreamingHTTPRequest({"type": "http"}, receive_asgi_messages=given)
    assert await request.receive_asgi_messages(None) == b"fetched"
