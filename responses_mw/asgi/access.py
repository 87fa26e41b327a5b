"""Who may send requests: API keys, origins of web pages, and limits of an owner.

All replicas share the counts of an owner's responses per minute, open streams and background responses in Redis.

1. If Redis is unavailable, every request is admitted, and a metric counts it.
2. A stream counts while it is open. Its replica renews the count. If the replica is lost, the count expires `STREAM_COUNTS`
   seconds after the last renewal.
3. A background response counts until it ends, but for at most `JOB_COUNTS` seconds.
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
"""Members of a scope: the limits, and the owner and the name of each stream that the request counts."""
_REFUSED: dict[Kind, tuple[str, int]] = {"streams": ("open streams", 1), "background": ("unfinished background responses", 5)}
"""What there are too many of, and after how many seconds to retry."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_REFUSAL = ErrorResponse(
    Unauthorized("Missing or incorrect API key: use 'Authorization: Bearer KEY'.", headers={"www-authenticate": "Bearer"})
)


class APIKeyMiddleware:
    """Pass requests that carry one of our API keys to `app`, and refuse all others.

    The key is removed from the request. The upstream gets the operator's `upstream.api_key`, or none.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys, *, upstream_key: str | None = None) -> None:
        """`upstream_key` replaces the key in the headers. It is for an `app` that forwards them unchanged."""
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
    """The origins of web pages that may send requests with side effects.

    Any page can make a browser post to any address. Browsers then name the page's origin in `Origin` or describe it in
    `Sec-Fetch-Site`. The check matters if the upstream needs no credential. Requests without these headers pass.

    - Pages from our own host and pages whose origin is `allowed` pass.
    - `Sec-Fetch-Site: same-origin` passes too: a page cannot set it, and a proxy that rewrites `Host` does not change it.
    - `Origin: null` (a sandboxed frame, a file) passes only if it is `allowed`.

    This does not protect against DNS rebinding, where the attacker's host name resolves to our address.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        """`*` allows all origins."""
        self._allowed = frozenset(allowed)

    def check(self, headers: Headers) -> None:
        """Raise `Forbidden` for a request from a page of another origin."""
        site, origins = headers.get("sec-fetch-site"), headers.getlist("origin")
        if not (site or origins) or "*" in self._allowed or site == "same-origin":
            return
        own = headers.get("host", "").lower()
        is_foreign = any(origin not in self._allowed and _host(origin) != own for origin in origins)
        if is_foreign or (not origins and site in ("cross-site", "same-site")):
            raise Forbidden("The origin of this page is not in server.cors_origins.", code="origin_not_allowed")


def _host(origin: str) -> str | None:
    """Return the host and port of an origin, or None if it has none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


# -- limits --------------------------------------------------------------------------------------------------------------


class RateLimits:
    """The configured limits, and the open streams of this process. Without `usage`, nothing is limited.

    Only accepted callers are counted, so that an invented credential leaves no trace in Redis. All methods that count raise
    `RateLimited` and the errors of the `gate`.
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
        """Count a request for a response, and add the owner's rate to the headers of its answer."""
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
        """Count a streamed response until the request with this ASGI `scope` has been answered."""
        if self.are_set and not scope[_STREAMS]:
            await gate()
            name = random_part()
            if await self._enter("streams", owner, name):
                scope[_STREAMS].append((owner, name))
                self._open.setdefault(owner, set()).add(name)

    async def end_stream(self, owner: str, name: str) -> None:
        """Stop counting a stream."""
        self._open[owner].discard(name)
        if not self._open[owner]:
            del self._open[owner]
        await self._leave("streams", owner, name)

    @asynccontextmanager
    async def background(self, response_id: str, owner: str, gate: Gate) -> AsyncIterator[None]:
        """Count the background response that the body creates, until it ends or its creation fails."""
        await gate()
        is_counted = await self._enter("background", owner, response_id)
        try:
            yield
        except BaseException:
            if is_counted:
                await self._leave("background", owner, response_id)
            raise

    async def _enter(self, kind: Kind, owner: str, name: str) -> bool:
        """Start counting a stream or background response. Return whether it is counted."""
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
        """Stop counting. If Redis is unavailable, the count expires."""
        assert self._usage is not None
        with suppress(StateUnavailable), anyio.CancelScope(shield=True):
            await self._usage.leave(kind, owner, name)

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Renew the counts of open streams until the context exits."""
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
    """Apply `limits` to the requests to `app`, which gets them from `limits_of`."""

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
    """Return the limits of the request with this ASGI `scope`."""
    limits: RateLimits = (scope or {}).get(_LIMITS, _UNLIMITED)
    return limits


@asynccontextmanager
async def admitted(scope: Scope, verify: Callable[[Caller], Awaitable[None]], caller: Caller) -> AsyncIterator[None]:
    """Observe a response on the WebSocket with this ASGI `scope`, and count it as a request.

    The credential is verified again, because it may have expired since the upgrade. Raises `RateLimited` and the errors of
    `verify`.
    """
    with websocket_request_span("response.create", caller.headers, caller.owner, key_in(scope)):
        await verify(caller)
        await limits_of(scope).request(scope, caller.owner, partial(verify, caller))
        yield
