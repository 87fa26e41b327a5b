"""Read the arguments of a call: one JSON object that arrives in pieces, and that servers and gateways repeat in several ways.

1. The arguments end where the object ends. What follows is dropped, such as a special token, or a repetition of the arguments
   as an object or as a string. An object that differs from the arguments belongs to another call.
2. An empty object before another object is a placeholder. Therefore, the end of an empty object is held back until more
   arrives or the arguments end.
3. A piece may repeat all text so far, and continue it. If it could also be a nested object that begins like the outer one, it
   is held back until the next piece shows which it is.
4. A JSON string that contains an object is held back until it ends, and then replaced with the object.
5. Text that is not an object is passed on unchanged. The model may have written the text of a custom tool, or invalid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import ClassVar

import orjson

from ..tool_kinds.form import parse_arguments

_MARKS = re.compile(r'["{}]|\\.?', re.DOTALL)
_VALUE = re.compile(r'[{"]')
_EMPTY_OBJECTS = re.compile(r"\A(?>(?:[ \t\r\n]*+\{[ \t\r\n]*+\})*)[ \t\r\n]*+")
_WHITE = " \t\r\n"
_AFTER_STRING = frozenset(":,}]" + _WHITE)
_BEFORE_OBJECT = (":", ",", "[")


class _State(Enum):
    BEGIN = auto()  # only white space so far
    OBJECT = auto()
    STRING = auto()  # a string, which may contain the object
    EMPTY = auto()  # after an empty object
    UNCLEAR = auto()  # after a piece that repeats the text so far, or continues it
    END = auto()  # after the object
    OTHER = auto()  # not an object


_OBJECT = _State.OBJECT  # looked up for every token


class _ValueEnd:
    """Finds the end of a JSON object or string that arrives in pieces. Each piece is read once."""

    __slots__ = ("_depth", "_is_escaped", "is_quoted")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self.is_quoted = self._is_escaped = False

    def find(self, piece: str, start: int = 0) -> int:
        """Return the position after the end of the value in `piece`, or 0 if it does not end there."""
        start, self._is_escaped = start + self._is_escaped, False
        for mark in _MARKS.finditer(piece, start):
            if mark[0].startswith("\\"):
                self._is_escaped = mark[0] == "\\"  # the escaped character is in the next piece
                continue
            if mark[0] == '"':
                self.is_quoted = not self.is_quoted
            elif not self.is_quoted:
                self._depth += 1 if mark[0] == "{" else -1
            if self._depth <= 0 and not self.is_quoted:
                return mark.end()
        return 0


class CallArguments:
    """The arguments of one call."""

    __slots__ = ("_end", "_held", "_length", "_others", "_pieces", "_state", "_taken")

    def __init__(self) -> None:
        self._state = _State.BEGIN
        self._end = _ValueEnd()
        self._pieces: list[str] = []
        self._taken = 0
        self._held: list[str] = []  # text that cannot be passed on yet. In the state END, the value after the object
        self._length = 0  # length of the text that a piece may repeat
        self._others: set[bytes] | None = None  # the objects after the arguments, and the arguments

    @property
    def text(self) -> str:
        """The text that is not held back."""
        return "".join(self._pieces)

    @property
    def size(self) -> int:
        """The number of characters that have arrived."""
        return sum(map(len, self._pieces)) + sum(map(len, self._held))

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a complete object. An empty object is complete only after `end`."""
        return self._state is _State.END

    @property
    def is_cut(self) -> bool:
        """Whether an object or a string has begun but not ended."""
        match self._state:
            case _State.OBJECT | _State.STRING:
                return True
            case _State.UNCLEAR:
                return parse_arguments(self._held[0]) is None
            case _State.END:
                return bool(self._held) and self._held[0].startswith("{")
        return False

    @property
    def has_content(self) -> bool:
        """Whether there is more than an empty object or the beginning of one."""
        return self._state not in (_State.BEGIN, _State.EMPTY) and self._length > 1

    def take(self) -> list[str]:
        """Return the pieces that have arrived since `take` was last called, without those that are held back."""
        fresh = self._pieces[self._taken :]
        self._taken = len(self._pieces)
        return fresh

    def feed(self, piece: str) -> list[str]:
        """Add a piece. Return further objects that follow the arguments in it, without repetitions."""
        if self._state is _OBJECT and len(piece) < self._length:  # nearly every piece
            return self._read_object(piece)
        return self._READERS[self._state](self, piece) if piece else []

    def end(self) -> list[str]:
        """End the arguments, and pass on what is held back. Return further objects, as `feed` does."""
        match self._state:
            case _State.EMPTY:
                self._pass(self._held.pop())
                self._state = _State.END
            case _State.BEGIN | _State.STRING:
                self._pass_other("".join(self._held), cut=self._state is _State.STRING)
            case _State.UNCLEAR:
                piece = self._held.pop()
                is_repetition = parse_arguments(piece) is not None
                self._state = _State.OBJECT
                return self._read_object(piece[self._length :] if is_repetition else piece)
        return []

    def end_empty(self) -> None:
        """End the arguments if they are an empty object."""
        if self._state is _State.EMPTY:
            self.end()

    def may_precede_call(self, arguments: str) -> bool:
        """Return whether `arguments` may be those of another call. After an empty object, they must be an object."""
        if self._state is _State.EMPTY:
            return parse_arguments(arguments) is not None
        return self._state is _State.END

    def repeats(self, arguments: str) -> bool:
        """Return whether `arguments`, an object or a string that contains one, equals these arguments."""
        text = _unquoted(arguments)
        if text is None or self._state not in (_State.END, _State.EMPTY):
            return False
        return _canonical(text) == _canonical("{}" if self._state is _State.EMPTY else self.text)

    def _pass(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)

    # -- states ----------------------------------------------------------------------------------------------------------

    def _begin(self, piece: str) -> list[str]:
        self._held.append(piece)
        first = piece.lstrip(_WHITE)[:1]
        if not first:
            return []
        text = "".join(self._held)
        self._held.clear()
        if first == "{":
            self._state = _State.OBJECT
            return self._read_object(text)
        if first == '"':
            self._state = _State.STRING
            return self._read_string(text)
        self._pass_other(text)
        return []

    def _continue_object(self, piece: str) -> list[str]:
        added = self._strip_repeated(piece, self._pieces)
        return self._read_object(added) if added else []

    def _continue_string(self, piece: str) -> list[str]:
        return self._read_string(self._strip_repeated(piece, self._held))

    def _read_other(self, piece: str) -> list[str]:
        self._pass(piece)
        return []

    def _read_object(self, piece: str) -> list[str]:
        end = self._end.find(piece)
        if not end:
            self._pass(piece)
            return []
        arguments = parse_arguments("".join([*self._pieces, piece[:end]]))
        if arguments is None:
            self._state = _State.OTHER
            self._pass(piece)
            return []
        if not arguments:
            self._state = _State.EMPTY
            self._held.append(piece[:end])
        else:
            self._state = _State.END
            self._pass(piece[:end])
        return self.feed(piece[end:])

    def _read_decoded(self, text: str) -> None:
        """Read an object that was in a string."""
        text = text.strip(_WHITE)
        self._state, self._end = _State.OBJECT, _ValueEnd(depth=bool(self._pieces))
        self._read_object(text[1:] if self._pieces else text)

    def _read_after_empty(self, piece: str) -> list[str]:
        piece = _EMPTY_OBJECTS.sub("", piece, count=1)
        if piece.startswith("{"):
            self._held.clear()
            self._state, self._end = _State.OBJECT, _ValueEnd(depth=bool(self._pieces))
            return self._read_object(piece[1:] if self._pieces else piece)
        if piece.startswith('"'):
            self._held.clear()
            self._end = _ValueEnd()
            self._state, self._length = _State.STRING, 0
            return self._read_string(piece)
        if piece:
            self.end()
        return self.feed(piece)

    def _read_string(self, piece: str) -> list[str]:
        self._held.append(piece)
        self._length += len(piece)
        end = self._end.find(piece)
        if not end:
            return []
        held = "".join(self._held)
        self._held.clear()
        self._length = len(self.text)
        text = _unquoted(held[: len(held) - len(piece) + end])
        if text is None:
            self._pass_other(held)
            return []
        self._read_decoded(text)
        rest = piece[end:].lstrip(_WHITE)
        if rest:
            self.end_empty()
        return self.feed(rest)

    def _pass_other(self, text: str, *, cut: bool = False) -> None:
        """Pass on text that is not an object. `cut` is whether it is an unterminated string."""
        self._held.clear()
        if self._pieces:  # text after an empty object, whose beginning was passed on
            self._pass("}")
            self._state = _State.END
        else:
            self._state = _State.STRING if cut else _State.OTHER
            self._pass(text)

    def _read_rest(self, piece: str) -> list[str]:
        others: list[str] = []
        start = 0
        while True:
            if not self._held:
                begin = _VALUE.search(piece, start)
                if begin is None:
                    return others
                start, self._end = begin.start(), _ValueEnd()
            end = self._end.find(piece, start)
            self._held.append(piece[start : end or None])
            if not end:
                return others
            start, text = end, "".join(self._held)
            self._held.clear()
            if self._is_other(text):
                others.append(text)

    def _is_other(self, text: str) -> bool:
        """Return whether `text` is an object that has not been seen and is not empty."""
        if self._others is None:
            self._others = {_canonical(self.text), _canonical("{}")}
        seen = len(self._others)
        if parse_arguments(text) is not None:
            self._others.add(_canonical(text))
        return len(self._others) > seen

    # -- repetitions -------------------------------------------------------------------------------------------------------

    def _strip_repeated(self, piece: str, written: list[str]) -> str:
        """Return the part of a piece that continues `written`, the text so far. If this is unclear, hold the piece back."""
        if not 0 < self._length <= len(piece):
            return piece
        so_far = "".join(written)
        if not piece.startswith(so_far):
            return piece
        if self._end.is_quoted:
            after = piece[piece.index('"') + 1 :][:1]
            return piece if not after or after in _AFTER_STRING else piece[self._length :]
        if not so_far.rstrip(_WHITE).endswith(_BEFORE_OBJECT):
            return piece[self._length :]
        self._state = _State.UNCLEAR
        self._held.append(piece)
        return ""

    def _read_after_unclear(self, piece: str) -> list[str]:
        unclear = self._held.pop()
        self._state = _State.OBJECT
        if piece.startswith(unclear):
            return self._read_object(piece[self._length :])
        return [*self._read_object(unclear), *self.feed(piece)]

    _READERS: ClassVar[dict[_State, Callable[[CallArguments, str], list[str]]]] = {
        _State.BEGIN: _begin,
        _State.OBJECT: _continue_object,
        _State.STRING: _continue_string,
        _State.EMPTY: _read_after_empty,
        _State.UNCLEAR: _read_after_unclear,
        _State.END: _read_rest,
        _State.OTHER: _read_other,
    }


def _unquoted(text: str) -> str | None:
    """Return the JSON object that is in `text`, perhaps within strings, as text. Return None if there is none."""
    while True:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(value, str):
            return text if isinstance(value, dict) else None
        text = value


def _canonical(text: str) -> bytes:
    """Return the same bytes for equal objects. `text` must be JSON."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # nested deeper than the encoder allows
        return text.encode()
