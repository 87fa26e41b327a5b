"""Access control: check API keys, and limit what each owner may use."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..auth import ALLOWED_MODELS, API_KEY, APIKeys
from ..errors import RateLimited, Unauthorized
from ..ids import random_part
from ..settings.groups import LimitSettings
from ..state import StateUnavailable
from ..state.usage import Kind, Rate, Usage
from ..telemetry.context import annotate
from ..telemetry.metrics import LIMITS_REFUSED, LIMITS_UNCHECKED
from ..upstream import Caller
from .http_responses import ErrorResponse
from .telemetry import add_headers

logger = logging.getLogger(__name__)

_STREAM_EXPIRY = 60.0
_COUNTED: dict[Kind, tuple[str, float, int]] = {
    "streams": ("open streams", _STREAM_EXPIRY, 1),
    "background": ("unfinished background responses", 3600.0, 5),
}
"""For each kind of entry: its name in error messages, its lifetime in seconds, and the `Retry-After` of a refusal."""
_STREAM = "responses_mw.stream"
"""The key in an ASGI scope under which the owner and the name of a counted stream are stored."""
_REFUSAL = ErrorResponse(
    Unauthorized("Missing or incorrect API key: use 'Authorization: Bearer KEY'.", headers={"www-authenticate": "Bearer"})
)


class APIKeyMiddleware:
    """ASGI middleware that refuses requests without a valid API key.

    The API key is removed from the request, and is never sent to the upstream. The name of the key and the models that it may
    use are stored in the ASGI scope under `API_KEY` and `ALLOWED_MODELS`.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        found = self._keys.find(Headers(scope=scope).get("authorization", ""))
        if found is None:
            await _REFUSAL(scope, receive, send)
            return
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
        scope[API_KEY], scope[ALLOWED_MODELS] = found
        annotate(key=found.name)
        await self._app(scope, receive, send)


# -- limits --------------------------------------------------------------------------------------------------------------


class RateLimits:
    """Limits on each owner's request rate, open streams and unfinished background responses.

    The counts are stored in Redis and apply to all replicas together. If Redis is unavailable, requests are not limited. If
    `usage` is None, nothing is limited.

    `request`, `stream` and `background` limit nothing if their setting is 0. Otherwise, they first check the credential of the
    caller with `verify`, and raise its errors. They raise `RateLimited` if the owner is over the limit.
    """

    def __init__(self, usage: Usage | None, settings: LimitSettings, verify: Callable[[Caller], Awaitable[None]]) -> None:
        self._per_minute = settings.requests_per_minute
        self._maximums: dict[Kind, int] = {"streams": settings.streams, "background": settings.background}
        self._usage = usage
        self._verify = verify
        self._open: defaultdict[str, set[str]] = defaultdict(set)  # names of this process's streams, by owner
        self.are_set = bool(self._per_minute or settings.streams or settings.background)
        if usage is None and self.are_set:
            logger.warning("limits are not enforced, because they need stored state: configure Redis")

    async def request(self, scope: Scope, caller: Caller) -> None:
        """Count a request against the owner's rate limit. If it arrived over HTTP, add `x-ratelimit-*` headers to the response.

        Raises `RateLimited` if the limit is exceeded.
        """
        headers = await self.admit(caller)
        if headers and scope["type"] == "http":
            add_headers(scope, headers)

    async def admit(self, caller: Caller) -> dict[str, str]:
        """Count a request like `request`, and return the headers."""
        if not self._per_minute or self._usage is None:
            return {}
        await self._verify(caller)
        try:
            rate = await self._usage.request(caller.owner, self._per_minute)
        except StateUnavailable:
            LIMITS_UNCHECKED.add(1, {"limit": "requests"})
            return {}
        headers = self._rate_headers(rate)
        if not rate.passes:
            LIMITS_REFUSED.add(1, {"limit": "requests"})
            limit = f"Rate limit reached: {self._per_minute} requests per minute."
            message = f"{limit} Please try again in {rate.retry_after:.3g} s."
            raise RateLimited(message, retry_after=math.ceil(rate.retry_after), headers=headers)
        return headers

    def _rate_headers(self, rate: Rate) -> dict[str, str]:
        return {  # as OpenAI's API sends them
            "x-ratelimit-limit-requests": str(self._per_minute),
            "x-ratelimit-remaining-requests": str(rate.remaining),
            "x-ratelimit-reset-requests": f"{rate.reset:.3f}".rstrip("0").rstrip(".") + "s",
        }

    async def stream(self, scope: Scope, caller: Caller) -> None:
        """Count a stream as open until `end_stream` is called. Raises `RateLimited` if the owner has too many open streams."""
        if self._maximums["streams"] and await self._enter("streams", caller, name := random_part()):
            scope[_STREAM] = caller.owner, name
            self._open[caller.owner].add(name)

    async def end_stream(self, scope: Scope) -> None:
        """Stop counting the stream of this `scope` as open. Do nothing if the stream was not counted."""
        if _STREAM in scope:
            owner, name = scope[_STREAM]
            self._open[owner].discard(name)
            if not self._open[owner]:
                del self._open[owner]
            await self._leave("streams", owner, name)

    @asynccontextmanager
    async def background(self, response_id: str, caller: Caller) -> AsyncIterator[None]:
        """Count the background response that the `with` block creates. Raises `RateLimited` if the owner has too many.

        The response is counted until it ends, for at most 1 h. If the block raises an exception, the response is not counted.
        """
        is_counted = await self._enter("background", caller, response_id)
        try:
            yield
        except BaseException:
            if is_counted:
                await self._leave("background", caller.owner, response_id)
            raise

    async def _enter(self, kind: Kind, caller: Caller, name: str) -> bool:
        """Add an entry and return true. Without a limit or Redis, return false. Raises `RateLimited` if there are too many."""
        maximum = self._maximums[kind]
        if not maximum or self._usage is None:
            return False
        await self._verify(caller)
        noun, seconds, retry_after = _COUNTED[kind]
        try:
            entered = await self._usage.enter(kind, caller.owner, name, maximum=maximum, seconds=seconds)
        except StateUnavailable:
            LIMITS_UNCHECKED.add(1, {"limit": kind})
            return False
        if not entered:
            LIMITS_REFUSED.add(1, {"limit": kind})
            message = f"Limit reached: {maximum} {noun}. Please try again when one has ended."
            rates = {f"x-ratelimit-limit-{kind}": str(maximum), f"x-ratelimit-remaining-{kind}": "0"}
            raise RateLimited(message, retry_after=retry_after, headers=rates)
        return True

    async def _leave(self, kind: Kind, owner: str, name: str) -> None:
        assert self._usage is not None
        with suppress(StateUnavailable), anyio.CancelScope(shield=True):  # without Redis, the entry expires later
            await self._usage.leave(kind, owner, name)

    async def renew_streams(self) -> None:
        """Renew the entries of this process's open streams periodically. The entries of a lost replica expire."""
        while True:
            await asyncio.sleep(_STREAM_EXPIRY / 3)
            names = {owner: list(some) for owner, some in self._open.items()}
            if names and self._usage is not None:
                await self._usage.renew("streams", names, _STREAM_EXPIRY)
