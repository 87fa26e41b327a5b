"""Explain the upstream's 404 for an unknown path, if the path shows what mistake the client has made.

1. The upstream has no files or vector stores, although OpenAI's SDKs have methods for them.
2. The base URL of the client ends with `/v1` twice or not at all, so that its requests do not reach the Responses API.

Only the upstream's own 404 for unknown paths is replaced. If the upstream serves the path, a 404 means that an object does not
exist, and is passed on.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import NotFound
from .http_responses import ErrorResponse

_MAX_BODY = 64 * 1024
"""Maximum size in bytes of a 404 that is compared. A larger one is passed on."""
_NOWHERE = "no-such-path"
_NOT_FORWARDED = (b"content-length", b"transfer-encoding", b"content-type", b"content-encoding", b"expect")

_FILES = "This server has no files API. Send the data of a file in the request, as 'file_data' of an 'input_file'."
_VECTOR_STORES = "This server has no vector stores, because its files are off, and does not serve the tool 'file_search'."
_WRONG_BASE = "Unknown request URL: {method} {path}. Did you mean '{meant}'? The client's base URL must end with '/v1' once."

_PATHS = (
    (re.compile(r"(?P<parent>/v1)/files(?=/|\Z)"), _FILES),
    (re.compile(r"(?P<parent>/v1)/vector_stores(?=/|\Z)"), _VECTOR_STORES),
    (re.compile(r"(?P<parent>(?:/v1)+)(?P<meant>/v1/[^/]+)"), _WRONG_BASE),
    (re.compile(r"(?P<parent>)(?P<meant>/(?:responses|conversations))(?=/|\Z)"), _WRONG_BASE),
)


class Explanation(NamedTuple):
    """The explanation of an unknown path. `collection` is its first part. `nowhere` is a path beside it that does not exist."""

    message: str
    collection: str
    nowhere: str


def explanation(method: str, path: str) -> Explanation | None:
    """Return the explanation if the upstream does not know `path`, or None to pass on its own answer."""
    for pattern, message in _PATHS:
        if found := pattern.match(path):
            meant = found.groupdict().get("meant", "")
            meant = meant if meant.startswith("/v1") else f"/v1{meant}"
            text = message.format(method=method, path=path[:200], meant=meant)
            return Explanation(text, found[0], f"{found['parent']}/{_NOWHERE}")
    return None


async def pass_on(app: ASGIApp, path: str | None, scope: Scope, receive: Receive, send: Send) -> None:
    """Pass a request on to `app`, and explain its 404 if it does not know the path. `path` is the path below the base path."""
    known = explanation(scope["method"], path) if scope["type"] == "http" and path is not None else None
    if known is None or path is None:
        await app(scope, receive, send)
        return
    answer, asked = _HeldAnswer(send), dict(scope)  # a copy, because some applications change their scope
    await app(scope, receive, answer.send)
    if not answer.is_held:
        return
    prefix = asked["path"].removesuffix(path)
    if await _is_unknown(app, asked, prefix, path, known, answer.body):
        await ErrorResponse(NotFound(known.message, code="unknown_url"))(scope, receive, send)
    else:
        await answer.release()


async def _is_unknown(app: ASGIApp, scope: Scope, prefix: str, path: str, known: Explanation, body: bytes) -> bool:
    """Return whether the 404 with this `body` is the one for unknown paths, and `app` does not know the collection either."""
    if await _fetch_not_found(app, scope, prefix + known.nowhere) != body:
        return False
    return path.rstrip("/") == known.collection or await _fetch_not_found(app, scope, prefix + known.collection) == body


async def _fetch_not_found(app: ASGIApp, scope: Scope, path: str) -> bytes | None:
    """Send a GET request for `path` with the caller's headers. Return the body of a 404, or None for any other answer."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_FORWARDED]
    asked = {**scope, "method": "GET", "path": path, "raw_path": quote(path).encode(), "query_string": b"", "headers": headers}
    answer = _HeldAnswer(_discard)
    await app(asked, _EmptyBody().receive, answer.send)
    return answer.body if answer.is_held else None


async def _discard(_message: Message) -> None:
    pass


class _EmptyBody:
    def __init__(self) -> None:
        self._is_read = False

    async def receive(self) -> Message:
        if self._is_read:
            await asyncio.get_running_loop().create_future()  # the client stays connected
        self._is_read = True
        return {"type": "http.request", "body": b"", "more_body": False}


class _HeldAnswer:
    """Holds back a 404 of up to `_MAX_BODY` bytes. Any other answer is sent at once."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._messages: list[Message] = []
        self.body = b""
        self.is_held = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_held = message["status"] == 404
        self._messages.append(message)
        self.body += message.get("body", b"")
        if not self.is_held or len(self.body) > _MAX_BODY:
            await self.release()

    async def release(self) -> None:
        self.is_held = False
        messages, self._messages, self.body = self._messages, [], b""
        for message in messages:
            await self._send(message)
