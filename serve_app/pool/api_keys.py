"""API keys for the public port: who has none is turned away in the proxy, before anything is held or promoted.

Serve's proxies read no configuration but their environment, so the keys come from there:

    SERVE_APP_API_KEYS_FILE   a file with one key a line (`#` begins a comment), read again whenever it changes
    SERVE_APP_API_KEYS        keys separated by commas; to change them, Serve has to be started anew

With neither, everybody is let in. With a file that cannot be read, nobody is, unless it could be read before: then the
keys known so far stay in force. Clients send `Authorization: Bearer KEY`, as OpenAI's SDKs do, or `x-api-key: KEY`, as
Anthropic's do. Health routes that the proxy answers itself stay open. A key is compared in constant time, never logged,
and goes no further than this file: the slots' servers do not see it.
"""

from __future__ import annotations

import contextvars
import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.pool.answering import answer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("ray.serve")

KEYS, KEYS_FILE = "SERVE_APP_API_KEYS", "SERVE_APP_API_KEYS_FILE"
# Answered in the proxy, the last one by Serve itself: probes have no key, and nothing is held for them.
OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/health/startup", "/-/healthz"})
_HEADERS = (b"authorization", b"x-api-key")

# Whose request this is, for fairness among those that are held: the beginning of the key's digest, empty without keys.
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")


class KeyRing:
    """The keys in force, as digests only.

    Args:
        environment: see the module.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._fixed = frozenset(_digests(environment.get(KEYS, "").split(",")))
        self._file = Path(environment[KEYS_FILE]) if environment.get(KEYS_FILE) else None
        self._from_file: frozenset[bytes] = frozenset()
        self._seen: object = None

    @property
    def required(self) -> bool:
        """Whether a key is wanted at all."""
        return bool(self._fixed) or self._file is not None

    def accepts(self, key: bytes) -> bool:
        """Whether it is one of the keys in force now; takes equally long for every wrong one."""
        self._read_if_changed()
        given = hashlib.sha256(key).digest()
        # Every key is compared: stopping at the first match would tell how early it stands in the file.
        return sum(hmac.compare_digest(given, known) for known in self._fixed | self._from_file) > 0

    def _read_if_changed(self) -> None:
        if self._file is None:
            return
        try:
            stat = self._file.stat()  # follows links: a Kubernetes secret is renewed by pointing one elsewhere
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = type(error).__name__
            if why != self._seen:
                log.error("%s=%s cannot be read (%s): the keys known so far stay in force", KEYS_FILE, self._file, why)
            self._seen = why
            return
        self._seen, self._from_file = seen, frozenset(_digests(line.partition("#")[0] for line in lines))
        log.info("%s=%s: %d API keys in force", KEYS_FILE, self._file, len(self._fixed | self._from_file))

    def __repr__(self) -> str:
        return f"<KeyRing {len(self._fixed)} fixed, {len(self._from_file)} from {self._file}>"


class ApiKeys:
    """Pure ASGI middleware: 401 in OpenAI's error shape without a key in force; removes the key from the request."""

    def __init__(self, app: ASGIApp, environment: Mapping[str, str] = os.environ) -> None:
        self.app, self._ring = app, KeyRing(environment)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._ring.required or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        key = given_key(scope["headers"])
        if key and self._ring.accepts(key):
            tenant.set(hashlib.sha256(key).hexdigest()[:16])
            kept = [(name, value) for name, value in scope["headers"] if name not in _HEADERS]
            await self.app({**scope, "headers": kept}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no valid API key"})
        else:
            message = "incorrect API key" if key else "no API key: send it as `Authorization: Bearer KEY`"
            await _unauthorized(send, message)


def given_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in a request's headers, empty if there is none. Pure."""
    for name, value in headers:
        if name == b"x-api-key":
            return value.strip()
        scheme, _, key = value.strip().partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            return key.strip()
    return b""


def _digests(keys: Iterable[str]) -> Iterable[bytes]:
    return (hashlib.sha256(key.strip().encode()).digest() for key in keys if key.strip())


async def _unauthorized(send: Send, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    await answer(send, 401, {"error": error}, [(b"www-authenticate", b"Bearer")])
