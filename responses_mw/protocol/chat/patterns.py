"""Convert the regular expression of a custom tool's grammar to a JSON Schema ``pattern``.

Servers constrain arguments with the pattern. The two languages differ, and constrained decoders usually match the JSON text,
not the string that it encodes:

1. A grammar matches the whole input, a ``pattern`` any part of it. So the pattern is ``^(...)$``, which llama.cpp requires
   as well.
2. Only constructs that all servers interpret alike are supported: characters, classes, groups, ``|`` and counts.
3. The pattern must not match anything that JSON escapes (``"``, a backslash, control characters): the arguments would be
   invalid JSON. So ``.`` and ``[^...]`` are not supported, and ``\\s`` is a space. ``\\d`` and ``\\w`` are ASCII, as in
   ECMA-262.

The expression matches everything that the pattern matches. Without a pattern, the model only sees the expression.
Expressions come from clients: they are translated in linear time and never compiled or matched here.
"""

from __future__ import annotations

import re
from functools import lru_cache

MAX_LENGTH = 2000
_MAX_DEPTH = 32
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


class _Unsupported(Exception):
    """The expression has no equivalent pattern."""


def as_pattern(expression: str) -> str | None:
    """The ``pattern`` equivalent to a full match of ``expression``, or None if there is none."""
    return _pattern_of(expression) if len(expression) <= MAX_LENGTH else None


@lru_cache(maxsize=1024)  # clients send the same tools with every request
def _pattern_of(expression: str) -> str | None:
    try:
        return f"^({''.join(_translated(_without_anchors(expression)))})$"
    except _Unsupported:
        return None


def _without_anchors(expression: str) -> str:
    """Remove the outer anchors, which are implied."""
    expression = expression.removeprefix("^")
    bare = expression.removesuffix("$")
    is_escaped = (len(bare) - len(bare.rstrip("\\"))) % 2 == 1
    return expression if is_escaped else bare


def _translated(expression: str) -> list[str]:
    pieces: list[str] = []
    position = depth = 0
    before: str | None = "open"
    while position < len(expression):
        token = _TOKEN.match(expression, position)
        if token is None:
            raise _Unsupported
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if not 0 <= depth <= _MAX_DEPTH or (token.lastgroup == "count" and before in _NOT_COUNTABLE):
            raise _Unsupported
        pieces.append(_piece(token))
        position, before = token.end(), token.lastgroup
    if depth:
        raise _Unsupported
    return pieces


_NOT_COUNTABLE = frozenset({"open", "either", "count"})
"""Tokens that a count must not follow."""


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
        raise _Unsupported
    return count


def _character(character: str) -> str:
    _check_safe(character, character)
    return f"\\{character}" if character in _SPECIAL else character


def _class(members: str) -> str:
    """Translate a character class.

    ``^`` and ``-`` are moved to its end, where they need no escape: not all servers support escapes in a class.
    """
    if any(operator in members for operator in _SET_OPERATORS):
        raise _Unsupported
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
            raise _Unsupported
        else:
            pieces.append(_bound(low) if low == high else f"{_bound(low)}-{_bound(high)}")
    if "^" in last and not pieces:
        raise _Unsupported
    return f"[{''.join(dict.fromkeys(pieces))}{''.join(sorted(last, reverse=True))}]"


def _bound(character: str) -> str:
    return f"\\{character}" if character in "[]" else character


def _check_safe(low: str, high: str) -> None:
    """Refuse a range that includes characters escaped in JSON."""
    if ord(low) < _FIRST_SAFE or any(ord(low) <= unsafe <= ord(high) for unsafe in _UNSAFE):
        raise _Unsupported
