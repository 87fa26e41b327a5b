"""The text within a call's arguments, while they are still being written.

A tool that takes one text is to the model a function with one string, ``{"input": "..."}``; the client is to see the text grow.
Models are careless with JSON: line breaks stand in strings as they are, and so do backslashes that begin no escape.
"""

from __future__ import annotations

import re

from .toolcalls import parse_arguments

_SPECIAL = re.compile(r'["\\]')
_ESCAPE = re.compile(
    r"\\(?:u(?P<hex>[0-9a-fA-F]{4})(?:(?<=[dD][89abAB]..)\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2}))?|(?P<one>.))", re.DOTALL
)
# An escape, or a pair of them, of which the end has not come yet.
_CUT = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z")
_MEANT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WHITE = " \t\r\n"
_REPLACEMENT = "\ufffd"


class StringMember:
    """Reads the fragments of an object's JSON; gives what they add to its string ``name``, if that is its first member.

    ``"".join(feed(piece) for piece in pieces) + rest(whole)`` does not depend on how ``whole`` was cut into the pieces.
    """

    __slots__ = ("_expected", "_held", "_inside", "_name", "_over", "_place")

    def __init__(self, name: str) -> None:
        self._name = name
        self._expected = f'{{"{name}":"'
        self._place = 0  # how much of that has come
        self._inside = False
        self._over = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """What ``piece`` adds to the text. An escape that it cuts is held back."""
        if self._over:
            return ""
        if not self._inside:
            piece = self._after_opening(piece)
        if not self._inside:
            return ""
        return self._decoded(self._held + piece) if self._held or _SPECIAL.search(piece) else piece

    def rest(self, whole: str) -> str:
        """What is missing of the text when all has been fed: all of it, where the member is not the first one; and ``whole``
        itself where that is no object with such a member, so that nothing is lost that the model wrote."""
        if self._inside:
            return self._held
        arguments = parse_arguments(whole or "{}")
        if arguments == {}:
            return ""
        value = arguments.get(self._name) if arguments else None
        return value if isinstance(value, str) else whole

    def _after_opening(self, piece: str) -> str:
        """What follows the quote with which the text begins. Anything else that comes before it ends the reading."""
        name_begins, name_ends = 2, len(self._expected) - 2
        for position, character in enumerate(piece):
            if character in _WHITE and not name_begins <= self._place < name_ends:
                continue
            if character != self._expected[self._place]:
                self._over = True
                break
            self._place += 1
            if self._place == len(self._expected):
                self._inside = True
                return piece[position + 1 :]
        return ""

    def _decoded(self, text: str) -> str:
        pieces = []
        position = 0
        self._held = ""
        while special := _SPECIAL.search(text, position):
            start = special.start()
            pieces.append(text[position:start])
            if special[0] == '"':
                self._over = True
                return "".join(pieces)
            if _CUT.match(text, start):
                self._held = text[start:]
                return "".join(pieces)
            escape = _ESCAPE.match(text, start)
            assert escape is not None  # a backslash at the end is cut
            pieces.append(_meant(escape))
            position = escape.end()
        pieces.append(text[position:])
        return "".join(pieces)


def _meant(escape: re.Match[str]) -> str:
    if escape["one"]:
        return _MEANT.get(escape["one"], escape[0])
    code = int(escape["hex"], 16)
    if escape["low"]:
        return chr(0x10000 + ((code & 0x3FF) << 10) + (int(escape["low"], 16) & 0x3FF))
    return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)
