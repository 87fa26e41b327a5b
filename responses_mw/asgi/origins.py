"""From which pages a browser may change something here.

Any page can have a browser post to any address, without asking; what the browser adds to the request then tells on the page. A
credential would too, but an upstream that needs none leaves nothing else. What is no browser's request says nothing of a page
and passes.

1. A page of our own host passes, and one whose origin is among ``server.cors_origins``.
2. ``Sec-Fetch-Site: same-origin`` is as good: a page cannot set it, and a proxy that rewrites ``Host`` leaves it alone.
3. ``Origin: null`` (a sandboxed frame, a file) is an origin like any other: no host of ours, but it may be listed.

This does not help against DNS rebinding: there the browser takes the attacker's name for our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import Forbidden

if TYPE_CHECKING:
    from starlette.datastructures import Headers

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN = frozenset({"cross-site", "same-site"})


class Origins:
    """``allowed`` are the origins of pages beside our own; ``*`` is all of them."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def check(self, headers: Headers) -> None:
        """Raises ``Forbidden`` for a request that a page of another origin made."""
        if "*" in self._allowed:
            return
        origins = headers.getlist("origin")
        site = headers.get("sec-fetch-site")
        if site == "same-origin":
            return
        own = headers.get("host", "").lower()
        if not all(origin in self._allowed or _host(origin) == own for origin in origins) or (not origins and site in _FOREIGN):
            message = "Pages of this origin may not do this: it is not among server.cors_origins."
            raise Forbidden(message, code="origin_not_allowed")


def _host(origin: str) -> str | None:
    """The host of an origin, with its port; None where it has none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
