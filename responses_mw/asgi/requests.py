"""Parse requests (caller, body and query parameters), and convert items to the format of the API."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import Message, Receive, Scope

from ..auth import API_KEY, owner_in
from ..cache import Cache
from ..engine.runner import Runner
from ..errors import RequestTimeout, TooLarge, Unavailable
from ..files import FileLibrary
from ..files.vector_stores import VectorStores
from ..jobs import JobService
from ..protocol import checks
from ..protocol.json_limits import decode
from ..protocol.request.create import INCLUDABLE, CreateResponse, parse, refuse_steering, refuse_unknown, steering_fields
from ..protocol.response import document
from ..protocol.types import Item, Part
from ..redaction import credentials_in, protect
from ..settings import Settings
from ..settings.groups import AuthSettings, LimitSettings, ServerSettings
from ..settings.upstreams import UpstreamSettings
from ..state import Page, State
from ..tasks import by_size, loads
from ..telemetry.context import annotate
from ..telemetry.metrics import LIMITS_REFUSED
from ..upstream import Caller, Standing
from ..upstream.routing import Upstreams
from .access import RateLimits
from .capture_header import asks_for_capture
from .content_coding import ContentCoding, content_coding, decoded
from .model_access import check_body
from .prompt_templates import Prompts
from .web_pages import Origins

if TYPE_CHECKING:
    from ..files.retrieval import Retrieval

T = TypeVar("T")

BODY_TIMEOUT = 60.0
"""Maximum number of seconds between two chunks of a request body."""
MESSAGE_TIMEOUT = 300.0
"""Maximum number of seconds for receiving a request body or a large WebSocket message. Proxied bodies are exempt.

Otherwise, a few clients that send slowly could use up the maximum of an `Inbound`.
"""
UNCOUNTED = 64 * 1024
"""Number of bytes of each message that are not counted. Small messages are accepted even if the total is exhausted."""
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
"""Default and maximum number of items on a page."""
_MAX_DECOMPRESSING = 2
"""Maximum number of bodies that are decompressed at a time, because each one can take 10 MiB in addition to its size."""
PARAMETERS_SCOPE = "responses_mw.parameters"
"""The key in a request's scope for the parameters in the path. An application in this process does not see them."""
_INTEGER = re.compile(r"-?[0-9]{1,30}")


@dataclass
class Inbound:
    """A limit on the total size of the bodies or WebSocket messages that are being received now.

    `size` is the number of bytes received so far, without the first `UNCOUNTED` bytes of each message. It is limited to
    `maximum`.
    """

    maximum: int
    size: int = 0

    def resize(self, before: int, now: int) -> int:
        """Change the size of one message from `before` to `now` bytes, and return `now`. When the message is over, `now` is 0.

        If the message has more than `UNCOUNTED` bytes and the total would exceed the maximum, change nothing and raise
        `Unavailable`.
        """
        size = self.size + max(0, now - UNCOUNTED) - max(0, before - UNCOUNTED)
        if now > UNCOUNTED and size > self.maximum:
            LIMITS_REFUSED.add(1, {"limit": "memory"})
            raise Unavailable("The server is receiving too many large requests.")
        self.size = size
        return now

    def message(self) -> InboundMessage:
        return InboundMessage(self)


@dataclass
class InboundMessage:
    """A context manager for a message that is being received. `size` is the number of bytes that count until it exits."""

    inbound: Inbound
    size: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.inbound.resize(self.size, 0)

    def grow(self, size: int) -> None:
        """Count `size` bytes, unless more bytes count already. Raises the same error as `Inbound.resize`."""
        self.size = self.inbound.resize(self.size, max(self.size, size))


class BodyReader:
    """Reads JSON bodies, and limits the size of each and of all together."""

    def __init__(self, limits: LimitSettings, max_bytes: int | None = None) -> None:
        """`max_bytes` is the maximum size of a body, by default that of the `limits`."""
        self._max_bytes = limits.max_request_bytes if max_bytes is None else max_bytes
        self._inbound = Inbound(max(limits.memory_bytes, limits.max_request_bytes))
        self._decompressing = asyncio.Semaphore(_MAX_DECOMPRESSING)

    async def read(self, request: Request, parse: Callable[[Any, int], T]) -> T:
        """Read and decode the body, and return the result of `parse(body, size)`. `size` is in bytes.

        Raises the same errors as `parse`, and:

        - `UnsupportedMediaType` if the body is compressed with an unsupported method
        - `BadRequest` if the body is not JSON or cannot be decompressed, or `TooLarge` if it exceeds a limit
        - `RequestTimeout` if the client stops sending or sends too slowly, or `ClientDisconnect` if it disconnects
        - `Unavailable` if too many large bodies are being received
        """
        coding = content_coding(request.headers.getlist("content-encoding"))
        with self._inbound.message() as message:
            data = await self._receive(request.receive, message)
            if coding is not None:
                data = await self._decompress(data, coding, message)
            return await by_size(len(data), lambda: parse(decode(data, loads=loads), len(data)))

    async def _receive(self, receive: Receive, message: InboundMessage) -> bytes:
        deadline = asyncio.get_running_loop().time() + MESSAGE_TIMEOUT
        chunks, more = list[bytes](), True
        while more:
            received = await next_message(receive, deadline)
            if received["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(received.get("body", b""))
            if message.size + len(chunks[-1]) > self._max_bytes:
                raise TooLarge(f"The request body is larger than {self._max_bytes} bytes.")
            message.grow(message.size + len(chunks[-1]))
            more = received.get("more_body", False)
        return b"".join(chunks)

    async def _decompress(self, data: bytes, coding: ContentCoding, message: InboundMessage) -> bytes:
        """Decompress a body piece by piece. Of the compressed and the decompressed size, the larger one counts."""
        chunks, size, step = list[bytes](), 0, len(data)
        async with self._decompressing:
            pieces = decoded(data, coding, self._max_bytes)
            while (piece := await by_size(step, next, pieces, None)) is not None:
                size += len(piece)
                message.grow(size)
                chunks.append(piece)
                step = max(len(data), len(piece))
        return b"".join(chunks)


class Reader(BodyReader):
    """Reads the caller and the body of each request."""

    def __init__(
        self, limits: LimitSettings, auth: AuthSettings, server: ServerSettings, upstreams: Sequence[UpstreamSettings]
    ) -> None:
        """A header is forwarded if all `upstreams` allow it, because a client cannot know which of them gets its request."""
        super().__init__(limits)
        self._auth = auth
        forwarded = frozenset.intersection(*(frozenset(one.forwarded) for one in upstreams))
        self._forwarded = frozenset(name.encode() for name in ["authorization", *forwarded])
        self._prompts = Prompts(server.prompts_dir)
        self._steering = refused_fields(upstreams)
        self._refuses_unknown = server.unknown_fields == "refuse"

    def parse(self, body: Any, size: int, scope: Scope) -> CreateResponse:
        """Parse the decoded body of the request with this `scope`. Its JSON has `size` bytes.

        Raises `BadRequest` if the body is invalid, and `NotFound` if the request's API key may not use the model.
        """
        return self.resolve_and_parse(body, size, scope)[1]

    def resolve_and_parse(self, body: Any, size: int, scope: Scope) -> tuple[Any, CreateResponse]:
        """Like `parse`, but also return the body with its prompt template applied, and with the only model of the API key."""
        refuse_steering(body, self._steering)
        if self._refuses_unknown:
            refuse_unknown(body)
        resolved = check_body(scope, self._prompts.resolve(body))
        return resolved, parse(resolved, size)

    def caller(self, request: HTTPConnection, model: str | None = None) -> Caller:
        """Return the caller, and record its owner for logs and spans. Raises the same errors as `owner_in`.

        `model` is the model that the request is for, or None if the request is not for a model.
        """
        scope = request.scope
        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            if raw in self._forwarded:
                name, text = raw.decode(), value.decode("latin-1")
                headers[name] = f"{headers[name]}, {text}" if name in headers else text
        owner = owner_in(scope, self._auth)
        annotate(owner=owner, key=scope.get(API_KEY, ""), is_captured=asks_for_capture(request.headers))
        protect(partial(credentials_in, headers))
        return Caller(owner, headers, scope, Standing(API_KEY in scope, API_KEY in scope), model=model)


def refused_fields(upstreams: Iterable[UpstreamSettings]) -> frozenset[str]:
    """Return the fields that steer one of the `upstreams`, act for the owner of its credential, and are not allowed there."""
    steering = (steering_fields(one.allowed_fields) for one in upstreams if one.has_credential)
    return frozenset[str]().union(*steering)


async def next_message(receive: Receive, deadline: float = math.inf) -> Message:
    """Return the next ASGI message of a request body.

    Raises `RequestTimeout` if none arrives for `BODY_TIMEOUT` seconds or before `deadline`, a time of the event loop.
    """
    try:
        async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + BODY_TIMEOUT)):
            return await receive()
    except TimeoutError:
        raise RequestTimeout("The data of the request body arrives too slowly.") from None


@dataclass(frozen=True, eq=False)
class EndpointContext:
    """The objects that the endpoints share. Those that need stored state are None if the server has none."""

    runner: Runner
    upstreams: Upstreams
    state: State | None
    jobs: JobService | None
    cache: Cache | None
    files: FileLibrary | None
    vector_stores: VectorStores | None
    retrieval: Retrieval | None
    reader: Reader
    origins: Origins
    limits: RateLimits
    settings: Settings

    async def verify(self, request: HTTPConnection, model: str | None = None) -> Caller:
        """Return the caller after checking its credential. Raises the same errors as `owner_in` and `Upstreams.verify`.

        `model` is the model that the request is for, or None if the request is not for a model.
        """
        caller = self.reader.caller(request, model)
        await self.upstreams.verify(caller)
        return caller


def paging(request: Request, *, default: int = DEFAULT_LIMIT, maximum: int = MAX_LIMIT) -> dict[str, Any]:
    """Return the query parameters `after`, `limit` and `order`, or their defaults. Raises `BadRequest` for invalid values."""
    query = request.query_params
    order = checks.one_of(query.get("order", "desc"), "order", {"asc", "desc"})
    limit = checks.integer(number(request, "limit", default), "limit", minimum=1, maximum=maximum)
    return {"after": query.get("after"), "limit": limit, "order": order}


def number(request: Request, name: str, default: int) -> int:
    """Return the integer query parameter `name`, or `default` if it is missing. Raises `BadRequest` if it is invalid."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if not _INTEGER.fullmatch(value):  # int() would also accept '1_0', ' 1' and '+1'
        return checks.wrong_type(name, "an integer", value)
    return int(value)


def flag(request: Request, name: str) -> bool:
    """Return the boolean query parameter `name`, by default false. Raises `BadRequest` if it is not `true` or `false`."""
    return checks.one_of(request.query_params.get(name, "false").lower(), name, {"true", "false"}) == "true"


def included(request: Request) -> frozenset[str]:
    """Return the values of the query parameter `include`. Raises `BadRequest` if a value is unknown."""
    query = request.query_params
    values = [*query.getlist("include"), *query.getlist("include[]")]
    return frozenset(checks.one_of(value, "include", INCLUDABLE) for value in values)


_PARTS = {"message": "content", "reasoning": "content", "function_call_output": "output"}
"""Maps the types of items to the member that contains the content parts."""

_TEXTS = frozenset({"text", "input_text", "output_text"})
_DEFAULTS: dict[str, dict[str, Any]] = {"output_text": {"annotations": []}, "input_image": {"detail": "auto"}}


def listed(page: Page, include: frozenset[str]) -> dict[str, Any]:
    """Return a page of items as the API's list object."""
    items = page.items
    return {
        "object": "list",
        "data": [shown(item, include) for item in items],
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": page.has_more,
    }


def shown(item: Item, include: frozenset[str]) -> Item:
    """Return `item` as the API returns it. Optional members are omitted unless `include` lists them.

    Content parts get the types and default members of the API.
    """
    item = document.shown(item, include)
    member = _PARTS.get(item["type"], "")
    parts = item.get(member)
    if not isinstance(parts, list):
        return item
    text = "output_text" if item.get("role") == "assistant" else "input_text"
    if item["type"] == "reasoning":
        text = "reasoning_text"
    typed: list[Part] = [{**part, "type": text if part["type"] in _TEXTS else part["type"]} for part in parts]
    return {**item, member: [{**_DEFAULTS.get(part["type"], {}), **part} for part in typed]}
