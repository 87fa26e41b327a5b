"""From the regular expression of a custom tool's grammar to a JSON Schema ``pattern``, by which servers constrain arguments.

The two are not the same language, and what decodes by a ``pattern`` mostly looks at the JSON text, not at the string in it:

1. A grammar matches the whole input, a ``pattern`` any part of it: so it is ``^(...)$``, which llama.cpp demands as well.
2. Only what all of them read alike is taken: characters, classes, groups, ``|`` and counts.
3. Nothing may match what JSON escapes (``"``, a backslash, control characters): an answer of it would be no JSON. So there is
   no ``.`` and no ``[^...]``, and ``\\s`` is a space. ``\\d`` and ``\\w`` are those of ASCII, as in ECMA-262.

Whatever matches the ``pattern`` matches the expression. Where there is no such pattern, the model is told the expression only.
An expression is a client's: it is translated in linear time, and neither compiled nor matched here.
"""

from __future__ import annotations

import re
from functools import lru_cache

LONGEST = 2000
_DEEPEST = 32
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": " "}
_SPECIAL = frozenset(".*+?()[]{}|^$")
_SET_OPERATORS = ("--", "&&", "~~")
_UNSAFE = (0x22, 0x5C)
_FIRST_SAFE = 0x20

_TOKEN = re.compile(
    r"""
    (?P<open> \( (?: \?: | \?P?<[A-Za-z_]\w*> | (?!\?) ) )
  | (?P<close> \) )
  | (?P<count> (?: [*+?] | \{[0-9]{1,4}(?:,[0-9]{0,4})?\} ) (?![?+*{]) )
  | (?P<either> \| )
  | \[ (?!\^) (?P<members> (?: [^\[\]\\] | \\[^A-Za-z0-9] | \\[dws] )+ ) \]
  | \\ (?P<escaped> [^A-Za-z0-9] | [dws] )
  | (?P<plain> [^\\.*+?()\[\]{}|^$] )
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(r"\\(?P<kind>[dws])|(?P<low>\\[^A-Za-z0-9]|[^\\])(?:-(?P<high>\\[^A-Za-z0-9]|[^\\]))?", re.DOTALL)


class _NotTaken(Exception):
    """The expression has no pattern."""


def as_pattern(expression: str) -> str | None:
    """The ``pattern`` that lets through what ``expression`` matches as a whole; None if there is none that is sure."""
    return _pattern_of(expression) if len(expression) <= LONGEST else None


@lru_cache(maxsize=1024)  # a client sends the same tools with every request
def _pattern_of(expression: str) -> str | None:
    try:
        return f"^({''.join(_translated(_without_anchors(expression)))})$"
    except _NotTaken:
        return None


def _without_anchors(expression: str) -> str:
    """They say what holds anyway."""
    expression = expression.removeprefix("^")
    bare = expression.removesuffix("$")
    is_escaped = (len(bare) - len(bare.rstrip("\\"))) % 2 == 1
    return expression if is_escaped else bare


def _translated(expression: str) -> list[str]:
    pieces: list[str] = []
    place = depth = 0
    before: str | None = "open"
    while place < len(expression):
        token = _TOKEN.match(expression, place)
        if token is None:
            raise _NotTaken
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if not 0 <= depth <= _DEEPEST or (token.lastgroup == "count" and before in _COUNTLESS):
            raise _NotTaken
        pieces.append(_piece(token))
        place, before = token.end(), token.lastgroup
    if depth:
        raise _NotTaken
    return pieces


_COUNTLESS = frozenset({"open", "either", "count"})
"""Kinds of tokens behind which there is nothing to count."""


def _piece(token: re.Match[str]) -> str:
    kind = token.lastgroup
    if kind == "open":
        return "("
    if kind == "count":
        return _count(token.group())
    if kind == "members":
        return _class(token["members"])
    if kind == "escaped" and token["escaped"] in _CLASSES:
        members = _CLASSES[token["escaped"]]
        return f"[{members}]" if len(members) > 1 else members
    if kind in ("escaped", "plain"):
        return _character(token[kind])
    return token.group()


def _count(count: str) -> str:
    low, comma, high = count.strip("{}").partition(",")
    if comma and high and int(low) > int(high):
        raise _NotTaken
    return count


def _character(character: str) -> str:
    _check_safe(character, character)
    return f"\\{character}" if character in _SPECIAL else character


def _class(members: str) -> str:
    """A class, with ``^`` and ``-`` at its end, where they need not be escaped: not all know how."""
    if any(operator in members for operator in _SET_OPERATORS):
        raise _NotTaken
    pieces: list[str] = []
    last: set[str] = set()
    for member in _MEMBER.finditer(members):
        if member["kind"]:
            pieces.append(_CLASSES[member["kind"]])
            continue
        low = member["low"][-1]
        high = (member["high"] or low)[-1]
        _check_safe(low, high)
        if low == high and low in "^-":
            last.add(low)
        elif "-" in (low, high) or "^" in (low, high) or low > high:
            raise _NotTaken
        else:
            pieces.append(_bound(low) if low == high else f"{_bound(low)}-{_bound(high)}")
    if "^" in last and not pieces:
        raise _NotTaken
    return f"[{''.join(dict.fromkeys(pieces))}{''.join(sorted(last, reverse=True))}]"


def _bound(character: str) -> str:
    return f"\\{character}" if character in "[]" else character


def _check_safe(low: str, high: str) -> None:
    """Nothing from ``low`` to ``high`` may be escaped in JSON."""
    if ord(low) < _FIRST_SAFE or any(ord(low) <= unsafe <= ord(high) for unsafe in _UNSAFE):
        raise _NotTaken
