"""Access control of the inspector: the token, session cookies, and protection against other web pages.

- Without a token, the inspector is served only on a loopback address, where the admin port refuses foreign host names.
- A request needs the token in `Authorization`, or a session cookie, which the login form sets. All replicas accept a session.
  It ends after `SESSION_SECONDS`, at the logout, or when the token is changed.
- Requests caused by other web pages are refused, except for links. No other page can show the inspector in a frame.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import Final, NamedTuple

from starlette.requests import Request

COOKIE: Final = "responses_mw_inspector"
SESSION_SECONDS: Final = 12 * 3600

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""The headers of every response of the inspector."""

_SAFE = frozenset({"GET", "HEAD"})


class Session(NamedTuple):
    """A session, and the number of seconds after which it expires."""

    id: str
    seconds_left: float


class Guard:
    """Checks the token and the cookies of requests to the inspector."""

    def __init__(self, token: str) -> None:
        """`token` is "" if the inspector needs none, because the port is bound to a loopback address."""
        self._token = token.encode()
        self._key = hashlib.sha256(b"responses-mw inspector session\0" + self._token).digest()

    @property
    def needs_token(self) -> bool:
        return bool(self._token)

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(hashlib.sha256(text.encode()).digest(), hashlib.sha256(self._token).digest())

    def new_session(self) -> str:
        """Return the value of the cookie for a new session."""
        head = f"{int(time.time()) + SESSION_SECONDS}.{secrets.token_hex(16)}"
        return f"{head}.{self._signature(head)}"

    def session(self, cookie: str) -> Session | None:
        """Return the session of a cookie, or None if the cookie is not ours, or has expired."""
        head, _, signature = cookie.rpartition(".")
        until, _, session_id = head.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(head).encode()) or not until.isdecimal():
            return None
        left = int(until) - time.time()
        return Session(session_id, left) if left > 0 else None

    def session_of(self, request: Request) -> Session | None:
        return self.session(request.cookies.get(COOKIE, ""))

    def _signature(self, head: str) -> str:
        return hmac.new(self._key, head.encode(), hashlib.sha256).hexdigest()

    def has_bearer(self, request: Request) -> bool:
        """Return whether the request has the token in its header. Other web pages cannot send such requests."""
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        return bool(self._token) and scheme.lower() == "bearer" and self.is_token(text.strip())


def is_foreign(request: Request) -> bool:
    """Return whether a page of another origin caused the request. Following a link from another page is allowed."""
    headers = request.headers
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        return True
    if site in ("cross-site", "same-site"):
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return not (is_link and request.method in _SAFE)
    # Browsers send at least one of the two headers with each request that is not a GET.
    is_from_page = origin is not None or site is not None or "cookie" not in headers
    return request.method not in _SAFE and not is_from_page
