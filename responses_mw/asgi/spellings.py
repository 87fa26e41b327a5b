"""Recognize other spellings of paths, such as `//v1/responses`, `/v1/Responses` and `/v1/x/../responses`.

Some servers normalize a path before they route it. A request with such a path would reach the upstream's own Responses API,
past everything that this server checks. For this reason, it is not passed on.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_RESPONSES = ("responses", "conversations")
_FILES = ("files", "uploads", "vector_stores")
_SEPARATORS = re.compile(r"[/\\]+")
_IGNORED = re.compile(r"[\x00-\x20\x7f]+|;[^/\\]*")
_MAX_DECODINGS = 3
"""Maximum number of times that a path is decoded. No known chain of servers decodes a path as often."""


class Paths:
    """The paths `/v1/NAME` of some names, and all paths below."""

    def __init__(self, *names: str) -> None:
        either = "|".join(names)
        self._ours = re.compile(rf"/v1/({either})(/|\Z)")
        self._suspect = re.compile(f"{either}|%", re.IGNORECASE)

    def __contains__(self, path: str) -> bool:
        return self._ours.match(path) is not None

    def has_other_spelling(self, path: str) -> bool:
        """Return whether a server that normalizes `path` could take it for one of these paths."""
        for _ in range(_MAX_DECODINGS):
            if not self._suspect.search(path):
                return False
            if self._ours.match(_normalized(path)):
                return True
            path = unquote(path)
        return False


class OurPaths(Paths):
    """The paths that this server serves instead of the upstream."""

    def __init__(self, *, files: bool = False) -> None:
        """`files` includes the paths of files and vector stores."""
        super().__init__(*_RESPONSES, *(_FILES if files else ()))


def _normalized(path: str) -> str:
    segments: list[str] = []
    for segment in _SEPARATORS.split(_IGNORED.sub("", path.lower())):
        if segment == "..":
            del segments[-1:]
        elif segment.strip("."):
            segments.append(segment.rstrip("."))
    return "/" + "/".join(segments)
