"""Send requests to the endpoints of one upstream. If an endpoint fails before it answers, try another one.

A request is retried only if no server can have begun to process it: the connection failed, or a server refused the request at
once with 429, 502 or 503. Each endpoint is tried once before any is tried again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial

import httpx

from .. import ids
from ..backoff import Backoff
from ..errors import UpstreamUnreachable
from ..settings.upstreams import UpstreamSettings
from ..telemetry.context import annotate
from ..telemetry.endpoints import count_affinity, count_fail_over
from ..telemetry.metrics import Affinity
from .caller import Caller
from .endpoint import Endpoint
from .errors import CRASH_AFTER, from_transport
from .pool import ANY, Lease, Pool, Wanted, choose, favourite

CONNECT_TIMEOUT = 5.0
"""Connection timeout in seconds. Even a busy server accepts connections at once."""
FAIL_OVER_TIMEOUT = 2.0
"""Connection timeout in seconds if there is another endpoint to try."""

_RETRIED = frozenset({502, 503})
_PASSED_ON = frozenset({429, 502, 503})
_FIRST_BACK_OFF = 0.01


class Sender:
    """Sends requests to the endpoints of `pool` with the operator's headers. `chat_path` is the upstream's path for answers.

    `transport` connects to a server over the network or in this process. It is used without an `httpx.AsyncClient`, which would
    spend time on redirects, cookies and proxies.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, pool: Pool, settings: UpstreamSettings, chat_path: str) -> None:
        self._transport = transport
        self._pool = pool
        self._settings = settings
        self._own_headers = settings.own_headers
        self._chat_path = chat_path
        self._session_header = settings.session_header.lower()

    async def send(
        self, method: str, path: str, caller: Caller, content: bytes = b"", limit: float = math.inf, wanted: Wanted = ANY
    ) -> tuple[httpx.Response, Lease]:
        """Send a request to one of the `wanted` endpoints. Return the response, whose body is not read yet, and the lease.

        The caller must close the response and release the lease. Raises `UpstreamError` if there is no response.

        Each endpoint is tried at least once. After that, no attempt begins later than half of `upstream.status_grace`, or half
        of `limit` seconds if that is shorter.
        """
        # The last attempt gets the second half of the grace period, so that its status can still be sent to the caller.
        until = time.monotonic() + min(self._settings.status_grace, limit) / 2
        attempts = Attempts(self._pool, caller.session, wanted, until)
        try:
            response, lease = await attempts.run(partial(self._try, method, path, caller, content))
        except (httpx.HTTPError, TimeoutError) as error:
            raise from_transport(error) from error
        if path == self._chat_path and len(self._pool.endpoints) > 1:
            count_affinity(self._pool.upstream, attempts.affinity(lease.endpoint))
        return response, lease

    def _url_of(self, endpoint: Endpoint) -> str:
        """Return the URL of `endpoint` for logs and traces, or "" for an application in this process."""
        return endpoint.address.url if self._settings.url else ""

    async def _try(
        self, method: str, path: str, caller: Caller, content: bytes, endpoint: Endpoint, connect_timeout: float
    ) -> httpx.Response:
        # Each call needs a new id, because vLLM uses it as the id of the completion, which must be unique.
        request_id = ids.random_part()
        if path == self._chat_path:
            annotate(upstream_request=request_id, endpoint=self._url_of(endpoint))
        headers = {**caller.headers, "x-request-id": request_id, "accept-encoding": "identity"}
        if self._session_header and caller.session:
            headers.setdefault(self._session_header, caller.session)
        headers |= self._own_headers
        if content:
            headers |= {"content-type": "application/json", "content-length": str(len(content))}
        # Headers were decoded as Latin-1, because a caller's headers may contain any byte.
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        extensions = {"timeout": {"connect": connect_timeout}, "asgi_scope": caller.scope, **endpoint.extensions}
        # With `content` instead of `stream`, httpx would make the headers a second time.
        request = httpx.Request(
            method,
            endpoint.url_of(path),
            headers=[(b"host", endpoint.host), *encoded],
            stream=httpx.ByteStream(content),
            extensions=extensions,
        )
        try:
            async with asyncio.timeout(self._settings.timeout):
                return await self._transport.handle_async_request(request)
        except (httpx.HTTPError, TimeoutError):
            annotate(endpoint=self._url_of(endpoint))
            raise


class Attempts:
    """The attempts to send one request. After every endpoint was tried once, they go on with pauses up to the time `until`."""

    def __init__(self, pool: Pool, session: str, wanted: Wanted, until: float = 0.0) -> None:
        """`until` is a time of `time.monotonic`. With the default, each endpoint is tried only once."""
        self._pool = pool
        self._wanted = wanted
        self._left = pool.candidates(wanted)
        self._session = session
        self._last: Endpoint | None = None
        self._favourite = favourite(self._left, session) if session and self._left else None
        self._until = until
        self._backoff = Backoff(_FIRST_BACK_OFF)
        self._pause = 0.0
        """Seconds to wait before the next attempt."""

    async def run(
        self,
        send: Callable[[Endpoint, float], Awaitable[httpx.Response]],
        is_repeatable: Callable[[], bool] = lambda: True,
    ) -> tuple[httpx.Response, Lease]:
        """Return the response and the lease of the last attempt. The `elapsed` extension is the time until the response began.

        `send` sends the request to an endpoint, with a connection timeout in seconds. If all attempts fail, its last error is
        raised. `is_repeatable` is called after a failed attempt; if it returns false, there is no other attempt. The endpoint
        then counts as failed only if it could not be connected to, as it may have closed the connection to end an upload.
        """
        while True:
            endpoint = self._begin()
            lease = Lease(self._pool, endpoint)
            began = time.monotonic()
            try:
                response = await send(endpoint, FAIL_OVER_TIMEOUT if self._left else CONNECT_TIMEOUT)
            except BaseException as error:
                is_unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if is_unsent or is_repeatable():
                    lease.record_error(error)
                lease.release()
                if not is_unsent or not is_repeatable() or not self._may_repeat():
                    raise
            else:
                response.extensions["elapsed"] = time.monotonic() - began
                lease.record_status(response.status_code)
                if not self._is_refused(response) or not is_repeatable() or not self._may_repeat():
                    return response, lease
                await response.aclose()
                lease.release()
            if self._pause:
                await asyncio.sleep(self._pause)

    def _begin(self) -> Endpoint:
        """Return the endpoint of the next attempt. Raises `UpstreamUnreachable` if there is none."""
        if not self._left:
            raise UpstreamUnreachable("The upstream cannot be reached: it has no endpoints.", is_overload=True)
        if self._last is None:
            endpoint = choose(self._left, self._session, self._favourite)
        else:
            endpoint = choose(self._left, self._session)
            if endpoint is not self._last:
                count_fail_over(self._pool.upstream, "endpoint")
        self._left = [one for one in self._left if one is not endpoint]
        self._last = endpoint
        return endpoint

    def affinity(self, endpoint: Endpoint) -> Affinity:
        """Return `none` without a session, `hit` if it prefers `endpoint` even to ejected ones, and otherwise `moved`."""
        if not self._session:
            return "none"
        model = self._wanted.model
        left_out = [one for one in self._pool.endpoints if one.is_ejected and one.serves(model)]
        is_hit = endpoint is self._favourite and favourite([endpoint, *left_out], self._session) is endpoint
        return "hit" if is_hit else "moved"

    def _is_refused(self, response: httpx.Response) -> bool:
        """Return whether a server refused the request at once, so that it can be sent again."""
        statuses = _PASSED_ON if self._left else _RETRIED
        return response.status_code in statuses and response.extensions["elapsed"] < CRASH_AFTER

    def _may_repeat(self) -> bool:
        """Return whether another attempt is allowed. If so, set `_pause`."""
        if self._left:
            self._pause = 0.0
            return True
        self._left = self._pool.candidates(self._wanted)
        self._pause = self._backoff.next()
        return time.monotonic() + self._pause <= self._until
