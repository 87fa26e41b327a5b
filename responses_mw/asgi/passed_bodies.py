"""Read the bodies of requests that pass through, once for all that depends on them.

1. A request with the operator's credential must not steer the upstream, as responses may not either.
2. The body of an API key that is restricted to models is checked and rewritten (see `restricted`).
3. If there are several upstreams or aliases, the model decides which upstream gets the request. An alias is replaced by the
   upstream's name for the model.

A body that begins like a JSON object is read, whatever its content type is, because some servers ignore the type. So is a
compressed body. All other bodies are forwarded as they arrive, and so are those that are only read for their model, but have no
JSON or more than `MAX_ROUTED` bytes. They go to the first upstream. The bytes of a body stay as they are, except for 2 and 3.
"""

from __future__ import annotations

import re
from collections import deque
from itertools import islice
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth import ALLOWED_MODELS, owner_in
from ..engine.session import session_of_key
from ..errors import APIError, BadRequest, TooLarge, UnsupportedMediaType
from ..protocol.json_limits import decode
from ..protocol.request.create import refuse_steering
from ..settings.groups import AuthSettings, LimitSettings
from ..tasks import by_size
from ..upstream.routing import Destination
from .http_responses import ErrorResponse
from .proxy import DESTINATION, OpenUpstreams
from .requests import UNCOUNTED, BodyReader, next_message
from .restricted import check_request, checked_body

MAX_ROUTED = 1024 * 1024
"""Maximum number of bytes of a body that is read only because its model decides where it goes."""
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
# Whitespace of JSON in UTF-8, UTF-16 and UTF-32, and byte order marks. Python's `json` decodes all of these.
_BLANK = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"
_MODEL = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("(?>(?:[^"\\]|\\.)*)")')
_MAX_PLACES = 3
"""Maximum number of places in a body that are tried for its model."""


class PassedBodies:
    """ASGI middleware that checks bodies, and decides which upstream gets their requests. `app` forwards them."""

    def __init__(
        self,
        app: ASGIApp,
        upstreams: OpenUpstreams,
        limits: LimitSettings,
        auth: AuthSettings,
        base_path: str,
        *,
        refused: frozenset[str],
        is_routed: bool,
    ) -> None:
        """`refused` are the members that steer the upstream. `is_routed` is whether the model decides where a request goes."""
        self._app = app
        self._upstreams = upstreams
        self._reader = BodyReader(limits)
        self._routing_reader = self._reader if refused else BodyReader(limits, MAX_ROUTED)
        self._auth = auth
        self._base_path = base_path
        self._refused = refused
        self._is_routed = is_routed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            if scope.get(ALLOWED_MODELS) is not None:
                await self._read_restricted(scope, body)
            elif self._refused or self._is_routed:
                await self._read(scope, body)
        except ClientDisconnect:
            return
        except APIError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        await self._app(scope, body.forward, send)

    async def _read_restricted(self, scope: Scope, body: _Body) -> None:
        check_request(scope, self._base_path)
        members, size = await self._reader.read(
            Request(scope, body.read), lambda value, size: (checked_body(scope, value), size)
        )
        refuse_steering(members, self._refused)
        destination = await self._direct(scope, members)
        data = await by_size(size, orjson.dumps, {**members, "model": destination.model})
        body.replace(data)
        scope["headers"] = _with_framing(scope, len(data), is_typed=True)

    async def _read(self, scope: Scope, body: _Body) -> None:
        is_coded = any(name == b"content-encoding" for name, _ in scope["headers"])
        members = None
        if is_coded or await body.begins_like_an_object():
            members = await self._decoded(scope, body, is_coded=is_coded)
        if members is None:
            body.rewind()
            return
        refuse_steering(members, self._refused)
        data = body.join()
        destination = await self._direct(scope, members) if isinstance(members, dict) else None
        if destination is None or destination.model == members.get("model") or destination.model is None:
            return
        if is_coded:
            data = await by_size(len(data), orjson.dumps, {**members, "model": destination.model})
        else:
            data = await by_size(len(data), with_model, data, members, destination.model)
        body.replace(data)
        scope["headers"] = _with_framing(scope, len(data))

    async def _decoded(self, scope: Scope, body: _Body, *, is_coded: bool) -> Any:
        """Read and decode the body. If it is not JSON or too large, and need not be checked, return None.

        Raises the same errors as `BodyReader.read`.
        """
        try:
            small = None if is_coded else body.small
            if small is not None:  # reading it below takes 27 us longer, 8 % of the CPU time of a chat
                return decode(small)
            body.rewind()
            return await self._routing_reader.read(Request(scope, body.read), lambda value, _: value)
        except (BadRequest, TooLarge, UnsupportedMediaType):
            if self._refused:
                raise
            return None

    async def _direct(self, scope: Scope, members: dict[str, Any]) -> Destination:
        """Choose the destination of a request. Raises `NotFound` if no upstream serves its model."""
        upstreams = await self._upstreams(scope)
        upstream, name, model = upstreams.default, None, members.get("model")
        if isinstance(model, str):
            upstream, name = await upstreams.find(model, scope.get(ALLOWED_MODELS))
        scope[DESTINATION] = destination = Destination(upstream, name, self._session(scope, members.get("prompt_cache_key")))
        return destination

    def _session(self, scope: Scope, key: Any) -> str:
        """Return the key of the session that the member `prompt_cache_key` names, or "" if it names none."""
        if not isinstance(key, str) or not key:
            return ""
        try:
            return session_of_key(owner_in(scope, self._auth), key)
        except APIError:  # the tenant header is invalid, which matters only for stored objects
            return ""


def with_model(data: bytes, members: dict[str, Any], model: str) -> bytes:
    """Return the JSON object `data`, decoded as `members`, with another `model`. Its other bytes stay as they are if possible.

    They are re-encoded if the model's position is hard to find, for example after several nested members of this name.
    """
    wanted = {**members, "model": model}
    for match in islice(_MODEL.finditer(data), _MAX_PLACES):
        begin, end = match.span(1)
        changed = data[:begin] + orjson.dumps(model) + data[end:]
        if orjson.loads(match[1]) == members["model"] and orjson.loads(changed) == wanted:
            return changed
    return orjson.dumps(wanted)


def _with_framing(scope: Scope, size: int, *, is_typed: bool = False) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request with a new body of `size` bytes, which is labelled as JSON if `is_typed`."""
    typed = [(b"content-type", b"application/json")] if is_typed else []
    replaced = {b"content-length", b"content-encoding", b"transfer-encoding", *dict(typed)}
    kept = [(name, value) for name, value in scope["headers"] if name.lower() not in replaced]
    return [*kept, *typed, (b"content-length", str(size).encode())]


class _Body:
    """The messages of a request body, which can be read several times before they are forwarded."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: deque[Message] = deque()
        self._waiting: deque[Message] = deque()

    async def read(self) -> Message:
        """Return the next message, and keep it."""
        message = self._waiting.popleft() if self._waiting else await self._receive()
        self._read.append(message)
        return message

    @property
    def small(self) -> bytes | None:
        """The whole body, if its only message has been read and does not count (see `Inbound`)."""
        [message, *others] = self._read
        data: bytes = message.get("body", b"")
        return None if others or message.get("more_body", False) or len(data) > UNCOUNTED else data

    def rewind(self) -> None:
        """Begin again with the first message."""
        self._waiting.extendleft(reversed(self._read))
        self._read.clear()

    def join(self) -> bytes:
        """Return the body, all of which has been read, and forward it in one message, so that it can be sent again."""
        data = b"".join(message.get("body", b"") for message in self._read)
        self.replace(data)
        return data

    def replace(self, data: bytes) -> None:
        """Forward `data` instead of the body, all of which has been read."""
        self._read.clear()
        self._waiting = deque([{"type": "http.request", "body": data, "more_body": False}])

    async def forward(self) -> Message:
        """Return the next message."""
        return self._waiting.popleft() if self._waiting else await self._receive()

    async def begins_like_an_object(self) -> bool:
        """Return whether the body may be a JSON object. Raises `RequestTimeout` if the client stops sending."""
        size, more = 0, True
        while more and size <= UNCOUNTED:
            message = await next_message(self.read)
            piece: bytes = message.get("body", b"")
            if begin := piece.lstrip(_BLANK):
                return begin.startswith(b"{")
            size += len(piece)
            more = message.get("more_body", False)
        return more
