"""Continue an interrupted turn: what the client has seen of it, and where the next answer joins it.

What a client has seen cannot be taken back, so the next answer must fit it. A `Phase` says what is possible. If the client has
seen text of a message, the upstream is asked to continue it; a `Seam` checks that it does not start again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from ...errors import UpstreamError
from ..types import Item

MIN_REPEATED = 8
"""Minimum length of a text whose repetition is recognized. A shorter text may occur twice in an answer."""
MAX_CHANCE = 64
"""Maximum number of characters by which a continuation may repeat the beginning of the answer by chance."""


class Phase(StrEnum):
    """What the client has seen of a turn."""

    NOTHING = "nothing"
    REASONING = "reasoning"
    TEXT = "text"
    """One message with one text, perhaps followed by a call that the server would execute."""
    CALL = "call"
    """A call that the server would execute."""
    FIXED = "fixed"
    """Output that no other answer can continue: a call for the client, a refusal, several messages."""


def phase_of(items: Sequence[Item], served: Item | None) -> Phase:
    """Return the phase of a turn with these `items`. `served` is the open call, if the server would execute it."""
    phase = Phase.NOTHING
    for item in items:
        kind = item["type"]
        if kind == "reasoning" and phase is not Phase.TEXT:
            phase = max(phase, Phase.REASONING, key=_ORDER.index)
        elif kind == "message" and phase is not Phase.TEXT and _has_one_text(item):
            phase = Phase.TEXT
        elif kind not in ("message", "reasoning") and (item is served or item.get("status") == "incomplete"):
            phase = max(phase, Phase.CALL, key=_ORDER.index)
        else:
            return Phase.FIXED
    return phase


_ORDER = (Phase.NOTHING, Phase.REASONING, Phase.CALL, Phase.TEXT)


def _has_one_text(message: Item) -> bool:
    return [part["type"] for part in message["content"]] == ["output_text"]


class Seam:
    """Holds back the first text after an interruption until it is known not to repeat the text before it.

    A text that consists of repetitions, such as a line of dashes, is not compared: its continuation may look the same.
    """

    __slots__ = ("_before", "_held", "_matched", "_tail")

    def __init__(self, before: str, *, is_trimmed: bool) -> None:
        """`before` is the text of the message so far. If `is_trimmed`, the upstream did not see the white space at its end."""
        begun = before.lstrip()
        self._before = "" if repeats_itself(begun) else begun
        self._tail = before[len(before.rstrip()) :] if is_trimmed else ""
        self._held: list[tuple[str, Any]] = []
        self._matched = 0

    def feed(self, text: str, logprobs: Any) -> list[tuple[str, Any]] | None:
        """Take text and return what is new; None while that is not known. Raises `UpstreamError` for a new answer."""
        text = self._without_tail(text)
        self._held.append((text, logprobs))
        rest = text if self._matched else text.lstrip()
        expected = self._before[self._matched : self._matched + len(rest)]
        common = _common(rest, expected)
        self._matched += common
        if self._matched == len(self._before) >= MIN_REPEATED:
            return [(rest[common:], logprobs)] if rest[common:] else []
        if common == len(rest) and self._matched < len(self._before):
            return None
        return self.flush()

    def flush(self) -> list[tuple[str, Any]]:
        """Return the text that is held back. Raises `UpstreamError` if it begins a new answer."""
        if self._matched > MAX_CHANCE:
            raise UpstreamError("The upstream started a new answer instead of continuing the interrupted one.")
        return [(text, logprobs) for text, logprobs in self._held if text]

    def _without_tail(self, text: str) -> str:
        """Remove white space that the client has seen and that the upstream, which did not see it, repeats."""
        common = _common(text, self._tail)
        self._tail = self._tail[common:] if common == len(text) else ""
        return text[common:]


def repeats_itself(text: str) -> bool:
    """Return whether `text` consists of a piece that occurs at least twice. The last occurrence may be cut off."""
    period = text.find(text[: (len(text) + 1) // 2], 1)
    return 0 < period <= len(text) // 2 and text[period:] == text[:-period]


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
