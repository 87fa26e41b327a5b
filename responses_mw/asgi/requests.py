"""Parse requests (caller, body and query parameters), and convert items to the format of the API."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import Message, Receive

from ..auth import API_KEY, owner_in
from ..cache import Cache
from ..engine.prompt_templates import Prompts
from ..engine.runner import Runner
from ..errors import BadRequest, RequestTimeout, TooLarge, Unavailable
from ..jobs import JobService
from ..protocol.request import checks
from ..protocol.request.checks import decode
from ..protocol.request.create import INCLUDABLE, CreateResponse, parse, refuse_unknown
from ..protocol.response import document
from ..protocol.types import Item, Part
from ..settings import Settings
from ..settings.groups import AuthSettings, LimitSettings, ServerSettings
from ..state import Page, State
from ..telemetry.context import annotate
from ..telemetry.metrics import LIMITS_REFUSED
from ..threads import by_size
from ..upstream import Caller, Standing, Upstream
from .access import Origins, RateLimits

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


class Reader:
    """Reads the caller and the body of each request."""

    def __init__(
        self, limits: LimitSettings, auth: AuthSettings, server: ServerSettings, forward_headers: Iterable[str]
    ) -> None:
        """`forward_headers` are names in lower case. These headers and `authorization` are forwarded to the upstream."""
        self._auth = auth
        self._max_bytes = limits.max_request_bytes
        self._inbound = Inbound(max(limits.memory_bytes, limits.max_request_bytes))
        self._forwarded = frozenset(name.encode() for name in ["authorization", *forward_headers])
        self._prompts = Prompts(server.prompts_dir)
        self._refuses_unknown = server.unknown_fields == "refuse"

    def parse(self, body: Any, size: int) -> CreateResponse:
        """Parse the decoded body of a request, whose JSON has `size` bytes. Raises `BadRequest` if the body is invalid."""
        return self.resolve_and_parse(body, size)[1]

    def resolve_and_parse(self, body: Any, size: int) -> tuple[Any, CreateResponse]:
        """Like `parse`, but also return the body with its prompt template applied."""
        if self._refuses_unknown:
            refuse_unknown(body)
        resolved = self._prompts.resolve(body)
        return resolved, parse(resolved, size)

    def caller(self, request: HTTPConnection) -> Caller:
        """Return the caller, and record its owner for logs and spans. Raises the same errors as `owner_in`."""
        scope = request.scope
        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            if raw in self._forwarded:
                name, text = raw.decode(), value.decode("latin-1")
                headers[name] = f"{headers[name]}, {text}" if name in headers else text
        owner = owner_in(scope, self._auth)
        annotate(owner=owner, key=scope.get(API_KEY, ""))
        return Caller(owner, headers, scope, Standing(API_KEY in scope, API_KEY in scope))

    async def read(self, request: Request, parse: Callable[[Any, int], T]) -> T:
        """Read and decode the body, and return the result of `parse(body, size)`. `size` is in bytes.

        Raises the same errors as `parse`, and:

        - `BadRequest` if the body is compressed or is not JSON, or `TooLarge` if it exceeds a limit
        - `RequestTimeout` if the client stops sending or sends too slowly, or `ClientDisconnect` if it disconnects
        - `Unavailable` if too many large bodies are being received
        """
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            message = f"The content-encoding '{encoding}' of the request body is not supported."
            raise BadRequest(message, code="unsupported_encoding")
        size = 0
        deadline = asyncio.get_running_loop().time() + MESSAGE_TIMEOUT
        chunks, more = list[bytes](), True
        try:
            while more:
                received = await next_message(request.receive, deadline)
                if received["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunks.append(received.get("body", b""))
                if size + len(chunks[-1]) > self._max_bytes:
                    raise TooLarge(f"The request body is larger than {self._max_bytes} bytes.")
                size = self._inbound.resize(size, size + len(chunks[-1]))
                more = received.get("more_body", False)
            data = b"".join(chunks)
            chunks.clear()
            return await by_size(size, lambda: parse(decode(data), size))
        finally:
            self._inbound.resize(size, 0)


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
    """The objects that the endpoints share. `state`, `jobs` and `cache` are None if the server has no stored state."""

    runner: Runner
    upstream: Upstream
    state: State | None
    jobs: JobService | None
    cache: Cache | None
    reader: Reader
    origins: Origins
    limits: RateLimits
    settings: Settings

    async def verified(self, request: HTTPConnection) -> Caller:
        """Return the caller after checking its credential. Raises the same errors as `owner_in` and `Upstream.verify`."""
        caller = self.reader.caller(request)
        await self.upstream.verify(caller)
        return caller


def paging(request: Request) -> dict[str, Any]:
    """Return the query parameters `after`, `limit` and `order`, or their defaults. Raises `BadRequest` for invalid values."""
    query = request.query_params
    order = checks.one_of(query.get("order", "desc"), "order", {"asc", "desc"})
    limit = checks.integer(number(request, "limit", DEFAULT_LIMIT), "limit", minimum=1, maximum=MAX_LIMIT)
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
