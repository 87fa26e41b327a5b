"""Forward clients' requests to the endpoints of one upstream, over connections that are used for nothing else.

1. A request is retried at another endpoint if the connection failed or a server refused it at once, but never if a part of its
   body was read from the client and is no longer in memory.
2. If the client has an API key of this server, the upstream gets the operator's headers instead of the client's, and no header
   with which the client could act for the operator. No other upstream gets the operator's headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

import httpx

from ..errors import BadRequest
from ..settings.upstreams import UpstreamSettings
from ..settings.values import ACTING_HEADERS, ROUTING_HEADERS
from ..telemetry.context import annotate
from .endpoint import Endpoint
from .pool import Lease, Pool, Wanted
from .sending import Attempts

Headers: TypeAlias = list[tuple[bytes, bytes]]

_SESSION_HEADER = "x-session-id"
"""Header that names the session of a request if `upstream.session_header` is not set."""


class BodyStream(httpx.AsyncByteStream):
    """A body that is read from the client while it is sent."""

    is_begun = False
    """Whether the iteration has begun."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A client's request to be forwarded."""

    method: str
    path: bytes
    """The path below the base path of this server, as the client has encoded it."""
    query: bytes
    headers: Headers
    """The headers to forward, including those that announce the body. The names are in lower case."""
    body: bytes | BodyStream
    has_api_key: bool
    """Whether the client has an API key of this server."""

    def is_repeatable(self) -> bool:
        """Return whether the request can be sent again."""
        return isinstance(self.body, bytes) or not self.body.is_begun


class Forwarder:
    """Forwards requests to the endpoints of `pool`."""

    def __init__(self, transport: httpx.AsyncBaseTransport, pool: Pool, settings: UpstreamSettings) -> None:
        self._transport = transport
        self._pool = pool
        self._own_headers = [(name.encode(), value.encode("latin-1")) for name, value in settings.own_headers.items()]
        acting = ACTING_HEADERS if settings.has_credential else frozenset()
        replaced = (ROUTING_HEADERS | acting).difference(settings.forwarded).union(settings.own_headers)
        self._replaced = frozenset(name.replace("_", "-").encode() for name in replaced)
        self._adds_session = bool(settings.session_header)
        self.session_header = (settings.session_header or _SESSION_HEADER).encode()
        """The header that names the session of a request."""
        self.has_base_path = any(urlsplit(url).path for url in settings.url)
        """Whether the endpoints have a base path, to which the path of a request is appended."""

    async def send(self, request: PassedRequest, session: str = "", model: str | None = None) -> tuple[httpx.Response, Lease]:
        """Send `request` to an endpoint. Return the response, whose body is not read yet, and the lease.

        `session` is the key of the request's session, and `model` the upstream's name for its model.

        The caller must close the response and release the lease. Raises httpx's `TransportError` if there is no response,
        `UpstreamUnreachable` if there are no endpoints, and `BadRequest` if the target is not a path.
        """
        send = partial(self._send, request, self._headers(request, session))
        return await Attempts(self._pool, session, Wanted(model)).run(send, request.is_repeatable)

    def _headers(self, request: PassedRequest, session: str) -> Headers:
        headers = request.headers
        if request.has_api_key:
            # CGI and WSGI map "api_key" and "api-key" to one name.
            kept = [(name, value) for name, value in headers if name.replace(b"_", b"-") not in self._replaced]
            headers = kept + self._own_headers
        if session and self._adds_session and all(name != self.session_header for name, _ in headers):
            headers = [*headers, (self.session_header, session.encode())]
        return headers

    async def _send(
        self, request: PassedRequest, headers: Sequence[tuple[bytes, bytes]], endpoint: Endpoint, connect_timeout: float
    ) -> httpx.Response:
        query = request.query
        target = (endpoint.base_path + request.path or b"/") + (b"?" + query if query else b"")
        if target[:1] != b"/" or not target.isascii():
            raise BadRequest("The request's target is not a path of ASCII characters.")
        annotate(endpoint=endpoint.address.url)
        body = request.body
        # "target" replaces the URL's path, which httpx would normalize in 25 us.
        extensions = {"target": target, "timeout": {"connect": connect_timeout}, **endpoint.extensions}
        return await self._transport.handle_async_request(
            httpx.Request(
                request.method,
                endpoint.base_url,
                headers=[(b"host", endpoint.host), *headers],
                stream=httpx.ByteStream(body) if isinstance(body, bytes) else body,
                extensions=extensions,
            )
        )
