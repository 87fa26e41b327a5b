"""Limit and count requests with API keys that pass through to the upstream.

Requests and responses are forwarded unchanged as they arrive. The first and last kilobytes of each answer are kept until its
end, to find the model and the tokens that the upstream reports. For this, answers with gzip or deflate are decompressed.

Only the upstream's answer shows whether it is a stream. A stream above the limit is therefore refused when the answer begins,
and the connection to the upstream is closed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth import API_KEY, owner_in, owner_of_key
from ..errors import APIError, RateLimited
from ..settings.groups import AuthSettings
from ..telemetry.context import annotate, current_request
from ..telemetry.metrics import USAGE
from ..upstream import Caller, Standing
from .access import RateLimits
from .http_responses import ErrorResponse

_HEAD, _TAIL = 4 * 1024, 16 * 1024
"""Number of bytes at the beginning and at the end of an answer that are kept."""
_MAX_EXPANSION = 64
"""Maximum ratio of decompressed to compressed size. An answer that exceeds it is counted without its tokens."""
_FREE = 256 * 1024
"""Number of decompressed bytes allowed in addition to the ratio."""
_PIECE = 64 * 1024
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_MODEL = re.compile(r'"model"\s*:\s*("(?:[^"\\]|\\.){1,512}")')
_DECODER = json.JSONDecoder()


class Metering:
    """ASGI middleware that limits and counts POST requests with API keys. `app` forwards them to the upstream."""

    def __init__(self, app: ASGIApp, auth: AuthSettings, limits: Callable[[], RateLimits | None]) -> None:
        """`limits` returns the limits of the open application, or None if it is not open."""
        self._app = app
        self._auth = auth
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        caller = Caller(self._owner(scope), {}, scope, Standing(is_known=True, is_accepted=True))
        annotate(owner=caller.owner)
        limits = self._limits()
        if limits is None:
            await self._count(scope, receive, send, caller.owner)
            return
        try:
            await limits.admit(caller)
            await self._count(scope, receive, _limited(send, lambda: limits.stream(scope, caller)), caller.owner)
        except RateLimited as error:
            await ErrorResponse(error)(scope, receive, send)
        finally:
            await limits.end_stream(scope)

    async def _count(self, scope: Scope, receive: Receive, send: Send, owner: str) -> None:
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.count(owner)

    def _owner(self, scope: Scope) -> str:
        """Return the owner of a request. If its tenant is missing or invalid, return the owner of the API key."""
        try:
            return owner_in(scope, self._auth)
        except APIError:
            return owner_of_key(scope[API_KEY])


def _limited(send: Send, enter: Callable[[], Awaitable[None]]) -> Send:
    """Return a `send` that calls `enter` before an event stream begins."""

    async def begin(message: Message) -> None:
        if Headers(raw=message.get("headers", [])).get("content-type", "").startswith("text/event-stream"):
            await enter()
        await send(message)

    return lambda message: begin(message) if message["type"] == "http.response.start" else send(message)


class _Answer:
    """Passes on an answer, and keeps its beginning and its end."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_success = False
        self._expanded: _Expanded | None = None
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._size = 0

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._is_success = message["status"] < 300
            if Headers(raw=message.get("headers", [])).get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate"):
                self._expanded = _Expanded()
        elif body := message.get("body", b""):
            if self._expanded is None:
                self._keep(body)
            else:
                for piece in self._expanded.pieces(body):
                    self._keep(piece)
        return self._send(message)

    def _keep(self, piece: bytes) -> None:
        if len(self._head) < _HEAD:
            self._head += piece[: _HEAD - len(self._head)]
        self._tail.append(piece[-_TAIL:])
        self._size += len(self._tail[-1])
        while self._size - len(self._tail[0]) >= _TAIL:
            self._size -= len(self._tail.popleft())

    def count(self, owner: str) -> None:
        """Record the model and the tokens of the answer, unless it is an error."""
        if not self._is_success:
            return
        tail = b"".join(self._tail).decode(errors="replace")
        usage = _usage_in(tail) if self._expanded is None or self._expanded.is_readable else {}
        found = _MODEL.search(self._head.decode(errors="replace")) or _MODEL.search(tail)
        model = str(_decoded(found[1])) if found is not None else ""
        USAGE.count(owner, model, usage or None)
        request = current_request()
        if request is not None:
            request.usage, request.model = usage, model


class _Expanded:
    """Decompresses an answer until its data is invalid or expands too much."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib
        self._left = _FREE
        self.is_readable = True

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed `data` in pieces. Clear `is_readable` if it is invalid or expands too much."""
        self._left += _MAX_EXPANSION * len(data)
        is_more = True
        while self.is_readable and is_more:
            try:
                piece = self._decoder.decompress(data, _PIECE)
            except zlib.error:
                self.is_readable = False
                return
            data = self._decoder.unconsumed_tail
            is_more = bool(data) or len(piece) == _PIECE
            self._left -= len(piece)
            self.is_readable = self._left >= 0
            yield piece


def _decoded(text: str, at: int = 0) -> Any:
    try:
        return _DECODER.raw_decode(text, at)[0]
    except (ValueError, RecursionError):
        return None


def _usage_in(text: str) -> dict[str, Any]:
    """Return the last `usage` in `text`, converted to the Responses API, or an empty dict if there is none."""
    places = [match.end() for match in _USAGE.finditer(text)]
    given = _decoded(text, places[-1]) if places else None
    if not isinstance(given, dict):
        return {}
    cached = given.get("prompt_tokens_details") or given.get("input_tokens_details")
    return {
        "input_tokens": _count(given.get("prompt_tokens", given.get("input_tokens"))),
        "output_tokens": _count(given.get("completion_tokens", given.get("output_tokens"))),
        "input_tokens_details": {"cached_tokens": _count(cached.get("cached_tokens") if isinstance(cached, dict) else 0)},
    }


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40 else 0
