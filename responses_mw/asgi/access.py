"""Access control: API keys, origins of web pages, and rate limits.

An owner's rate of requests, open streams and unfinished background responses are counted in Redis, so that the limits apply
across all replicas.

1. If Redis is unavailable, all requests are accepted. A metric counts the requests that were not checked.
2. A stream is counted while it is open. The replica that serves the stream renews its entry regularly. If the replica is lost,
   the entry expires `STREAM_COUNTS` seconds after the last renewal.
3. A background response is counted until it ends, but for at most `JOB_COUNTS` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..auth import API_KEY, APIKeys, Gate, key_in
from ..errors import Forbidden, RateLimited, Unauthorized
from ..ids import random_part
from ..settings import LimitSettings
from ..state import StateUnavailable
from ..state.usage import Kind, Usage
from ..telemetry.metrics import LIMITS_REFUSED, LIMITS_UNCHECKED
from ..upstream import Caller
from .http_responses import ErrorResponse
from .telemetry import add_headers, websocket_request_span

logger = logging.getLogger(__name__)

STREAM_COUNTS = 60.0
JOB_COUNTS = 3600.0

_LIMITS, _STREAMS = "responses_mw.limits", "responses_mw.streams"
"""Keys in an ASGI scope. Their values are the limits, and the owner and the name of each stream counted for the request."""
_REFUSED: dict[Kind, tuple[str, int]] = {"streams": ("open streams", 1), "background": ("unfinished background responses", 5)}
"""The objects counted, for the error message, and the number of seconds after which to retry."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_REFUSAL = ErrorResponse(
    Unauthorized("Missing or incorrect API key: use 'Authorization: Bearer KEY'.", headers={"www-authenticate": "Bearer"})
)


class APIKeyMiddleware:
    """ASGI middleware that passes requests with a valid API key to `app`, and refuses requests without one.

    The API key is removed from the request, so it is never sent to the upstream. Its name is added to the ASGI scope.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys, *, upstream_key: str | None = None) -> None:
        """`upstream_key` replaces the API key in the request's headers. Set it if `app` forwards the headers unchanged."""
        self._app = app
        self._keys = keys
        self._instead = [(b"authorization", f"Bearer {upstream_key}".encode("latin-1"))] if upstream_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        name = self._keys.name(Headers(scope=scope).get("authorization", ""))
        if name is None:
            await _REFUSAL(scope, receive, send)
            return
        others = [(key, value) for key, value in scope["headers"] if key.lower() != b"authorization"]
        scope["headers"] = [*others, *self._instead]
        scope[API_KEY] = name
        await self._app(scope, receive, send)


class Origins:
    """Check of the origin of web pages that send requests with side effects.

    Any web page can make a browser send a POST request to any address. The browser names the page's origin in `Origin` or
    describes it in `Sec-Fetch-Site`. The check matters if the upstream requires no credential. These requests are accepted:

    - requests without these headers;
    - requests from pages of our own host, and from pages whose origin is in `allowed`;
    - requests with `Sec-Fetch-Site: same-origin`, which a page cannot set, and which is still correct behind a proxy that
      rewrites `Host`.

    `Origin: null`, which browsers send for sandboxed frames and local files, is accepted only if it is in `allowed`. The check
    does not protect against DNS rebinding, in which the attacker's host name resolves to our address.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        """`allowed` are origins such as `https://example.com`, or `*` for all origins."""
        self._allowed = frozenset(allowed)

    def check(self, headers: Headers) -> None:
        """Raise `Forbidden` if the request with these `headers` is from a page whose origin is not allowed."""
        site, origins = headers.get("sec-fetch-site"), headers.getlist("origin")
        if not (site or origins) or "*" in self._allowed or site == "same-origin":
            return
        own = headers.get("host", "").lower()
        is_foreign = any(origin not in self._allowed and _host(origin) != own for origin in origins)
        if is_foreign or (not origins and site in ("cross-site", "same-site")):
            raise Forbidden("The origin of this page is not in server.cors_origins.", code="origin_not_allowed")


def _host(origin: str) -> str | None:
    """Return the host and port of `origin`, or None if the origin has no host."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


# -- limits --------------------------------------------------------------------------------------------------------------


class RateLimits:
    """The rate limits of owners, and the open streams of this process. If `usage` is None, nothing is limited.

    The `gate` is awaited before anything is counted, so that requests with invalid credentials write nothing to Redis.
    `request`, `stream` and `background` raise `RateLimited` if the owner is over a limit, and the errors of the gate.
    """

    def __init__(self, usage: Usage | None, settings: LimitSettings) -> None:
        self._per_minute = settings.requests_per_minute
        self._maximums: dict[Kind, int] = {"streams": settings.streams, "background": settings.background}
        self._usage = usage
        self._open: dict[str, set[str]] = {}
        self.are_set = bool(self._per_minute or settings.streams or settings.background)
        if usage is None and self.are_set:
            logger.warning("limits are not enforced, because they need stored state: configure Redis")

    async def request(self, scope: Scope, owner: str, gate: Gate) -> None:
        """Check the owner's rate of requests, including this request, and add `x-ratelimit-*` headers to the HTTP response."""
        if not self.are_set:
            return
        await gate()
        if not self._per_minute or self._usage is None:
            return
        try:
            rate = await self._usage.request(owner, self._per_minute)
        except StateUnavailable:
            LIMITS_UNCHECKED.add(1, {"limit": "requests"})
            return
        headers = {  # as OpenAI's API sends them
            "x-ratelimit-limit-requests": str(self._per_minute),
            "x-ratelimit-remaining-requests": str(rate.remaining),
            "x-ratelimit-reset-requests": f"{rate.reset:.3f}".rstrip("0").rstrip(".") + "s",
        }
        if not rate.passes:
            LIMITS_REFUSED.add(1, {"limit": "requests"})
            limit = f"Rate limit reached: {self._per_minute} requests per minute."
            message = f"{limit} Please try again in {rate.retry_after:.3g} s."
            raise RateLimited(message, retry_after=math.ceil(rate.retry_after), headers=headers)
        if scope["type"] == "http":
            add_headers(scope, headers)

    async def stream(self, scope: Scope, owner: str, gate: Gate) -> None:
        """Add a stream to the owner's open streams until the request with this `scope` has ended.

        Only one stream is counted per request.
        """
        if self.are_set and not scope[_STREAMS]:
            await gate()
            name = random_part()
            if await self._enter("streams", owner, name):
                scope[_STREAMS].append((owner, name))
                self._open.setdefault(owner, set()).add(name)

    async def end_stream(self, owner: str, name: str) -> None:
        """Remove the stream `name` from the owner's open streams."""
        self._open[owner].discard(name)
        if not self._open[owner]:
            del self._open[owner]
        await self._leave("streams", owner, name)

    @asynccontextmanager
    async def background(self, response_id: str, owner: str, gate: Gate) -> AsyncIterator[None]:
        """Add a background response, which is created in the `with` block, to the owner's unfinished background responses.

        If the block raises an exception, the response is removed again.
        """
        await gate()
        is_counted = await self._enter("background", owner, response_id)
        try:
            yield
        except BaseException:
            if is_counted:
                await self._leave("background", owner, response_id)
            raise

    async def _enter(self, kind: Kind, owner: str, name: str) -> bool:
        """Add the entry `name` of a stream or a background response to Redis, and return true.

        Return false if there is no limit or Redis is unavailable. Raises `RateLimited` if the owner has reached the limit.
        """
        maximum = self._maximums[kind]
        if not maximum or self._usage is None:
            return False
        seconds = STREAM_COUNTS if kind == "streams" else JOB_COUNTS
        try:
            entered = await self._usage.enter(kind, owner, name, maximum=maximum, seconds=seconds)
        except StateUnavailable:
            LIMITS_UNCHECKED.add(1, {"limit": kind})
            return False
        if not entered:
            LIMITS_REFUSED.add(1, {"limit": kind})
            noun, retry_after = _REFUSED[kind]
            message = f"Limit reached: {maximum} {noun}. Please try again when one has ended."
            rates = {f"x-ratelimit-limit-{kind}": str(maximum), f"x-ratelimit-remaining-{kind}": "0"}
            raise RateLimited(message, retry_after=retry_after, headers=rates)
        return True

    async def _leave(self, kind: Kind, owner: str, name: str) -> None:
        """Remove the entry `name` from Redis. If Redis is unavailable, the entry expires later."""
        assert self._usage is not None
        with suppress(StateUnavailable), anyio.CancelScope(shield=True):
            await self._usage.leave(kind, owner, name)

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Renew the entries of open streams in Redis until the context exits."""
        task = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(STREAM_COUNTS / 3)
            names = {owner: list(some) for owner, some in self._open.items()}
            if names and self._usage is not None:
                with suppress(StateUnavailable):
                    await self._usage.renew("streams", names, STREAM_COUNTS)


_UNLIMITED = RateLimits(None, LimitSettings())


class RateLimitMiddleware:
    """ASGI middleware that makes `limits` available to `app` through `limits_of`, and ends a request's streams with it."""

    def __init__(self, app: ASGIApp, limits: RateLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_LIMITS], scope[_STREAMS] = self._limits, []
        try:
            await self._app(scope, receive, send)
        finally:
            for owner, name in scope[_STREAMS]:
                await self._limits.end_stream(owner, name)


def limits_of(scope: Mapping[str, Any] | None) -> RateLimits:
    """Return the limits for the request with this ASGI `scope`. Without `RateLimitMiddleware`, nothing is limited."""
    limits: RateLimits = (scope or {}).get(_LIMITS, _UNLIMITED)
    return limits


@asynccontextmanager
async def admitted(scope: Scope, verify: Callable[[Caller], Awaitable[None]], caller: Caller) -> AsyncIterator[None]:
    """Create the span and the access line of one response on the WebSocket with this ASGI `scope`, and count it as a request.

    The credential is verified again, because it may have expired since the upgrade. Raises `RateLimited` if the owner is over
    the limit, and the errors of `verify`.
    """
    with websocket_request_span("response.create", caller.headers, caller.owner, key_in(scope)):
        await verify(caller)
        await limits_of(scope).request(scope, caller.owner, partial(verify, caller))
        yield
