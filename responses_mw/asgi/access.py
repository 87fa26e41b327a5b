"""Access checks that need only the head of a request: API keys, origins of web pages, and paths of proxied requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes, urlsplit

from starlette.datastructures import Headers

from ..auth import API_KEY
from ..errors import BadRequest, Forbidden, MethodNotAllowed, NotFound, Unauthorized
from .http_responses import ErrorResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from ..auth import APIKeys

__all__ = ["SAFE_METHODS", "APIKeyMiddleware", "Origins", "PassablePaths", "check_path"]

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_REFUSAL = ErrorResponse(
    Unauthorized("Missing or incorrect API key: use 'Authorization: Bearer KEY'.", headers={"www-authenticate": "Bearer"})
)
_CROSS_ORIGIN = frozenset({"cross-site", "same-site"})
_DEFAULT_METHODS = ("GET", "HEAD", "OPTIONS", "POST")
_SEPARATORS = re.compile(rb"[/\\]")
_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_MAX_DECODINGS = 3
"""How often a path is decoded in the search for dot segments: once more than any known chain of servers decodes it."""


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
        if is_foreign or (not origins and site in _CROSS_ORIGIN):
            raise Forbidden("The origin of this page is not in server.cors_origins.", code="origin_not_allowed")


def _host(origin: str) -> str | None:
    """Return the host and port of an origin, or None if it has none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


class PassablePaths:
    """The requests that the reverse proxy passes on if API keys are required.

    The upstream trusts this server and therefore everyone with an API key, so only listed paths pass. An entry is `/v1/` (all
    paths below it), `/health` (only this path) or `DELETE /v1/files/`. An entry without a method allows GET, HEAD, OPTIONS and
    POST; GET includes HEAD.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries: list[tuple[frozenset[str], bytes]] = []
        for entry in entries:
            method, space, path = entry.rpartition(" ")
            methods = ({method, "HEAD"} if method == "GET" else {method}) if space else _DEFAULT_METHODS
            self._entries.append((frozenset(methods), path.encode()))

    def check(self, method: str, path: bytes) -> None:
        """Raise `NotFound` or `MethodNotAllowed` for a request that may not pass."""
        matching = [
            methods for methods, entry in self._entries if path == entry or (entry[-1:] == b"/" and path.startswith(entry))
        ]
        if not matching:
            raise NotFound("This path is not passed on to the upstream.", code="unknown_url")
        allowed = frozenset[str]().union(*matching)
        if method not in allowed:
            raise MethodNotAllowed(
                f"Method {method} is not passed on at this path.", headers={"allow": ", ".join(sorted(allowed))}
            )


def check_path(path: bytes) -> None:
    """Raise `BadRequest` for a path that some servers may resolve to a different one.

    A path must start with a slash, and contain neither control characters nor a segment `.` or `..`: plain, percent-encoded
    (once or more), between backslashes, or with parameters (`..;x`).
    """
    if not path.startswith(b"/"):
        raise BadRequest("The path does not start with a slash.", code="invalid_path")
    for _ in range(_MAX_DECODINGS):
        segments = (segment.partition(b";")[0] for segment in _SEPARATORS.split(path))
        if any(segment in (b".", b"..") for segment in segments) or _CONTROLS.search(path):
            raise BadRequest("The path contains control characters, or a segment '.' or '..'.", code="invalid_path")
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return
        path = decoded
    raise BadRequest("The path is percent-encoded more than twice.", code="invalid_path")
