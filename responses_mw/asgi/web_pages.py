"""Protection against web pages: which origins may change something (CSRF), and which host names are served (DNS rebinding)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import BadRequest, Forbidden, Misdirected
from ..network import is_loopback
from .http_responses import ErrorResponse

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_PAGE_HEADERS = frozenset({b"origin", b"sec-fetch-site"})
_MAX_REMEMBERED = 64  # maximum number of `Host` headers whose check is remembered, because clients choose them
_LOCALHOST = ("localhost", "*.localhost")
"""Names that browsers resolve to a loopback address without asking a DNS server."""


class Origins:
    """Protection against cross-site request forgery (CSRF).

    Any web page can make a browser send a POST request to this server. This is dangerous if the upstream requires no
    credential. `check` therefore accepts requests from web pages only if the page is on this server's host or its origin is in
    `allowed`. Requests with neither `Origin` nor `Sec-Fetch-Site` are accepted, because they do not come from a browser.
    GET, HEAD and OPTIONS requests are not checked, except for WebSockets. `Hosts` protects against DNS rebinding.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        """`allowed` are origins such as `https://example.com`. `null` allows sandboxed frames and local files, `*` any page."""
        self._allowed = frozenset(allowed)

    def check(self, headers: Headers) -> None:
        """Check that a request with these `headers` does not come from a disallowed web page. Raises `Forbidden` if it does."""
        if _PAGE_HEADERS.isdisjoint(dict(headers.raw)):
            return
        site, origins = headers.get("sec-fetch-site"), headers.getlist("origin")
        # A page cannot set Sec-Fetch-Site, which stays correct behind a proxy that rewrites Host.
        if "*" in self._allowed or site == "same-origin":
            return
        own = headers.get("host", "").lower()
        is_foreign = any(origin not in self._allowed and _host(origin) != own for origin in origins)
        if is_foreign or (not origins and site in ("cross-site", "same-site")):
            raise Forbidden("The origin of this page is not in server.cors_origins.", code="origin_not_allowed")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


class OriginMiddleware:
    """ASGI middleware that refuses requests of disallowed web pages, except for safe methods."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS:
            try:
                self._origins.check(Headers(scope=scope))
            except Forbidden as error:
                app = ErrorResponse(error)
        await app(scope, receive, send)


class Hosts:
    """The host names that a server accepts, as protection against DNS rebinding.

    A web page can rebind the name of its host to the address of this server. The browser then sends the page's requests to this
    server, but with the page's name in `Host`. IP addresses and requests without `Host` are always accepted, because no page
    can rebind an address.
    """

    def __init__(self, allowed: Iterable[str] = (), listens_on: str = "") -> None:
        """`allowed` are names, `*.example.com` for all names below example.com, or `*` for all names.

        If `allowed` is empty, a server that listens on a loopback address accepts only the names of that address, and any other
        server accepts all names.
        """
        names = {name.lower() for name in allowed}
        own = {*_LOCALHOST, listens_on.lower()} if listens_on else set()
        self._allowed = frozenset(names | own if names or is_loopback(listens_on) else {"*"})
        self._refused = lru_cache(_MAX_REMEMBERED)(self._refused_name)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Check the header `Host`. Raises `Misdirected` if its name is not accepted, or `BadRequest` if there are several."""
        if "*" in self._allowed:
            return
        hosts = [value for name, value in headers if name.lower() == b"host"]
        if len(hosts) > 1:
            raise BadRequest("The request has more than one Host header.", code="invalid_host")
        if hosts and (name := self._refused(hosts[0])):
            message = f"This server does not accept the host name '{name[:200]}'. The setting server.allowed_hosts lists names."
            raise Misdirected(message)

    def _refused_name(self, host: bytes) -> str:
        """Return the name in a `Host` header, or "" if it is accepted."""
        name = _name(host.decode("latin-1"))
        return "" if not name or self._accepts(name) or _is_address(name) else name

    def _accepts(self, name: str) -> bool:
        parent = name
        while name not in self._allowed and (parent := parent.partition(".")[2]):
            name = f"*.{parent}"
        return name in self._allowed


def _name(host: str) -> str:
    """Return the name or the address in a `Host` header, in lower case and without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
