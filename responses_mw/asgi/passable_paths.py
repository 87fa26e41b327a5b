"""The paths that the reverse proxy forwards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from ..errors import BadRequest, MethodNotAllowed, NotFound

_DEFAULT_METHODS = ("GET", "HEAD", "OPTIONS", "POST")
_SEPARATORS = re.compile(rb"[/\\]")
_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_MAX_DECODINGS = 3
"""Maximum number of times that a path is decoded to find dot segments. No known chain of servers decodes a path as often."""


class PassablePaths:
    """The requests that the reverse proxy forwards if API keys are required.

    The upstream trusts this server, and therefore every caller with an API key. For this reason, only listed paths are
    forwarded.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Parse entries such as `/health` (one path), `/v1/` (all paths below) and `DELETE /v1/files/` (one method).

        An entry without a method allows GET, HEAD, OPTIONS and POST. An entry for GET also allows HEAD.
        """
        self._entries: list[tuple[frozenset[str], bytes]] = []
        for entry in entries:
            method, space, path = entry.rpartition(" ")
            methods = ({method, "HEAD"} if method == "GET" else {method}) if space else _DEFAULT_METHODS
            self._entries.append((frozenset(methods), path.encode()))

    def check(self, method: str, path: bytes) -> None:
        """Raise `NotFound` if no entry matches `path`, or `MethodNotAllowed` if no matching entry allows `method`."""
        allowed: set[str] = set()
        for methods, entry in self._entries:
            if path == entry or (entry[-1:] == b"/" and path.startswith(entry)):
                allowed |= methods
        if not allowed:
            raise NotFound("This path is not passed on to the upstream.", code="unknown_url")
        if method not in allowed:
            message = f"Method {method} is not passed on at this path."
            raise MethodNotAllowed(message, headers={"allow": ", ".join(sorted(allowed))})


def check_path(path: bytes) -> None:
    """Raise `BadRequest` if `path` is ambiguous, because servers could resolve it differently.

    A path is ambiguous if it does not start with a slash, has a control character or a `.` or `..` segment in any encoding, or
    is percent-encoded more than twice.
    """
    if not path.startswith(b"/"):
        raise BadRequest("The path does not start with a slash.", code="invalid_path")
    for _ in range(_MAX_DECODINGS):
        # Some servers split paths at backslashes too, and some ignore what follows a semicolon in a segment.
        segments = (segment.partition(b";")[0] for segment in _SEPARATORS.split(path))
        if any(segment in (b".", b"..") for segment in segments) or _CONTROLS.search(path):
            raise BadRequest("The path contains control characters, or a segment '.' or '..'.", code="invalid_path")
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return
        path = decoded
    raise BadRequest("The path is percent-encoded more than twice.", code="invalid_path")
