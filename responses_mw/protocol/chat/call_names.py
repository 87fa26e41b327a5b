"""Match the names that models write with the names of the offered functions.

A model may write a name with a channel marker (`get_weather<|channel|>commentary`), a prefix (`functions.get_weather`), the
index of the call (`get_weather:0`), other separators (`get-weather`, `crm.get_weather`) or another case. A name is matched only
if exactly one offered function fits. A server may also send a name in pieces.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

from ..tool_kinds.form import OfferedFunction

_MARKER = re.compile(r"<(?:[|\uff5c].*)?\Z", re.DOTALL)  # nothing from here on belongs to a name
_PREFIX = re.compile(r"functions[-_.:/ ]+", re.IGNORECASE)
_PREFIX_KEY = "functions"
_CALL_INDEX = re.compile(r":\d+\Z")
_SEPARATORS = re.compile(r"[-_.:/\s]+")
_MAX_WRITTEN = 512  # maximum length of a name that is compared inexactly


class OfferedNames:
    """The names of the offered functions."""

    def __init__(self, offered: Iterable[OfferedFunction] = ()) -> None:
        self._offered = list(offered)
        self._names = frozenset(one.name for one in self._offered)

    @cached_property
    def _by_key(self) -> dict[str, set[str]]:
        """Maps each key (`_key`) of an offered function to the names of the functions that have it."""
        names: defaultdict[str, set[str]] = defaultdict(set)
        for one in self._offered:
            for spelling in _spellings(one):
                names[_key(spelling)].add(one.name)
        return dict(names)

    @cached_property
    def _keys(self) -> list[str]:
        return sorted(self._by_key)

    def match(self, written: str) -> str | None:
        """Return the offered name that the model means, or None if no name matches or several do."""
        if written in self._names:
            return written
        if not self._names or len(written) > _MAX_WRITTEN:
            return None
        candidates = list(_bare(written))
        for candidate in candidates:
            if candidate in self._names:
                return candidate
        for candidate in candidates:
            if names := self._by_key.get(_key(candidate)):
                return next(iter(names)) if len(names) == 1 else None
        return None

    def is_open(self, written: str) -> bool:
        """Return whether more text could turn `written` into an offered name, or into a longer one."""
        if not self._names or len(written) > _MAX_WRITTEN or _MARKER.search(written):
            return False
        keys = {_key(candidate) for candidate in _bare(written)}
        is_prefix = _PREFIX_KEY.startswith(min(keys)) and self.match(written) is None
        return is_prefix or any(map(self._is_beginning, keys))

    def _is_beginning(self, key: str) -> bool:
        index = bisect_right(self._keys, key)
        return index < len(self._keys) and self._keys[index].startswith(key)

    def joined(self, written: str, piece: str) -> str | None:
        """Return the name so far after another `piece` of it, or None if `piece` is the name of another function.

        The piece continues the name, or repeats it. A repetition may be longer than the name so far.
        """
        if piece == written:
            return written
        if written + piece in self._names and piece not in self._names:
            return written + piece
        one, other = self.match(written), self.match(piece)
        if one and other:
            return written if one == other else None
        grown = (written + piece, piece) if piece.startswith(written) else (written + piece,)
        return next((name for name in grown if self.match(name) or self.is_open(name)), None)


def without_marker(written: str) -> str:
    """Return a name without a channel marker and surrounding white space, if anything remains."""
    return _MARKER.sub("", written).strip() or written


def _key(name: str) -> str:
    return _SEPARATORS.sub("", name).casefold()


def _spellings(one: OfferedFunction) -> Iterator[str]:
    """Yield the names that a model may use for a function: with a namespace or the label of an MCP server, or without."""
    yield one.name
    members = one.form.members
    name, label = members.get("name"), members.get("server_label")
    if label is not None:
        yield from (f"{label}.{name}", f"mcp.{label}.{name}")
    elif "namespace" in members:
        yield f"{members['namespace']}.{name}"


def _bare(written: str) -> Iterator[str]:
    """Yield `written` without characters that cannot belong to a name. First remove as little, and then as much as possible."""
    clean = _MARKER.sub("", written).strip()
    yield clean
    yield (bare := _PREFIX.sub("", clean, count=1) if _PREFIX.match(clean) else clean)
    yield _CALL_INDEX.sub("", bare)
