"""Which requests may pass through to the upstream.

Behind API keys of our own the upstream trusts us, and with us whoever holds a key: there only what is listed passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from ..errors import BadRequest, MethodNotAllowed, NotFound

__all__ = ["PassablePaths", "check_path"]

_USUAL = ("GET", "HEAD", "OPTIONS", "POST")
_SEPARATORS = re.compile(rb"[/\\]")
_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_MOST_DECODED = 3
"""How often a path is decoded to look for dot segments: once more than any chain of servers is known to."""


class PassablePaths:
    """The requests that pass, from lines such as ``/v1/`` (all below), ``/health`` (this one) and ``DELETE /v1/files/``.

    A line without a method is of GET, HEAD, OPTIONS and POST; one of GET is of HEAD too.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._entries: list[tuple[frozenset[str], bytes]] = []
        for line in lines:
            method, space, path = line.rpartition(" ")
            methods = ({method, "HEAD"} if method == "GET" else {method}) if space else _USUAL
            self._entries.append((frozenset(methods), path.encode()))

    def check(self, method: str, path: bytes) -> None:
        """Raises ``NotFound``, ``MethodNotAllowed``."""
        fitting = [
            methods for methods, entry in self._entries if path == entry or (entry[-1:] == b"/" and path.startswith(entry))
        ]
        if not fitting:
            raise NotFound("This path is not passed on to the upstream.", code="unknown_url")
        allowed = frozenset[str]().union(*fitting)
        if method not in allowed:
            raise MethodNotAllowed(
                f"Method {method} is not passed on at this path.", headers={"allow": ", ".join(sorted(allowed))}
            )


def check_path(path: bytes) -> None:
    """Refuse a path that a server may take for one outside of where it seems to be. Raises ``BadRequest``.

    Such do not begin with a slash, have control characters, or segments ``.`` or ``..``: plain, percent-encoded (once or
    more), between backslashes, or with parameters (``..;x``).
    """
    if not path.startswith(b"/"):
        raise BadRequest("The path does not begin with a slash.", code="invalid_path")
    for _ in range(_MOST_DECODED):
        segments = (segment.partition(b";")[0] for segment in _SEPARATORS.split(path))
        if any(segment in (b".", b"..") for segment in segments) or _CONTROLS.search(path):
            raise BadRequest("The path has a segment '.' or '..', or control characters.", code="invalid_path")
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return
        path = decoded
    raise BadRequest("The path is percent-encoded more than twice.", code="invalid_path")
