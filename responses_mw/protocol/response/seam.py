"""Tell whether the answer to a request for the rest of a message continues the message, repeats it or begins a new answer.

A server that ignores this request reports no error. The following tells the difference:

1. The prompt tokens in the usage. If they are those of the prompt that ends with the message, the server continues the message.
   Otherwise, it has begun a new answer, perhaps because a router has selected another server.
2. The completion tokens. A server may send the message again before it continues. It has not generated these tokens.
3. The texts, if the usage is missing. A text that begins with the whole message is a repetition.

The new text is held back until this is clear, but not if it differs from the message from the start. If each chunk has the
usage, this is clear after one chunk. Otherwise, a text that begins like the message is held back until the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from ...errors import UpstreamError, UpstreamStartedOver

MIN_REPEATED = 8  # minimum length of a text whose repetition is recognized. A shorter text may occur twice in an answer
MAX_CHANCE = 64
"""Maximum number of characters that the beginnings of a continuation and of the answer may have in common by chance."""
_STARTED_OVER = "The upstream started a new answer instead of continuing the interrupted one."


class Passed(NamedTuple):
    """New text that is not a repetition."""

    text: str
    logprobs: Any
    is_reasoning: bool
    """Whether the upstream sent the text as reasoning."""


class _Held(NamedTuple):
    text: str
    logprobs: Any
    is_reasoning: bool
    is_compared: bool


class _Match(Enum):
    """The relation of the new text to the message so far."""

    PART = auto()  # it equals the beginning of the message
    WHOLE = auto()  # it begins with the whole message
    DIFFERS = auto()


class _Verdict(Enum):
    KEEP = auto()  # the new text continues the message
    DROP = auto()  # the new text begins with a repetition of the message
    WAIT = auto()


class _Comparison:
    """Compares the new text with the message so far, except for white space around them."""

    __slots__ = ("_begin", "_beyond", "_lead", "length", "match", "matched", "tail", "target")

    def __init__(self, before: str) -> None:
        self.target = before.strip()
        self.tail = before[len(before.rstrip()) :]
        self.match = _Match.PART if self.target else _Match.DIFFERS
        self.matched = self.length = self._lead = 0
        self._begin = self._beyond = ""  # of the new text, and of what follows the repetition. As long as `tail` at most

    def feed(self, text: str) -> None:
        self.length += len(text)
        self._begin += text[: len(self.tail) - len(self._begin)]
        if self.match is _Match.PART:
            text = self._compare(text)
        if self.match is _Match.WHOLE:
            self._beyond += text[: len(self.tail) - len(self._beyond)]

    def _compare(self, text: str) -> str:
        """Compare the next piece of text, and return what follows the repetition of the message."""
        if not self.matched:
            stripped = text.lstrip()
            self._lead += len(text) - len(stripped)
            text = stripped
        expected = self.target[self.matched : self.matched + len(text)]
        common = _common(text, expected)
        self.matched += common
        if common < len(expected):
            self.match = _Match.DIFFERS
        elif self.matched == len(self.target):
            self.match = _Match.WHOLE
        return text[common:]

    @property
    def is_only_target(self) -> bool:
        """Whether the new text so far is only the message."""
        return self.match is _Match.WHOLE and self.length <= self._lead + len(self.target) + len(self.tail)

    def repeated(self, *, with_target: bool, is_final: bool) -> int | None:
        """Return how many characters at the start of the new text repeat the message, or None if more text is needed.

        If `with_target` is false, only the white space at the end of the message is repeated.
        """
        begin, before = (self._beyond, self._lead + len(self.target)) if with_target else (self._begin, 0)
        common = _common(begin, self.tail)
        return None if common == len(begin) < len(self.tail) and not is_final else before + common


class Seam:
    """The point where the answer to a new request meets the message so far."""

    def __init__(self, before: str, *, is_trimmed: bool, prompt_tokens: int | None = None, tokens: int = 0) -> None:
        """`before` is the message so far, and has `tokens` tokens. It is empty if the new text belongs to another item.

        `prompt_tokens` is the number of tokens in the prompt that ends with the message, or None if it is unknown. If
        `is_trimmed`, the upstream did not see the white space at the end of the message.
        """
        self._new = _Comparison(before)
        self._repeats_itself = repeats_itself(self._new.target) or repeats_itself(before)
        self._is_trimmed = is_trimmed
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens
        self._count: int | None = None  # tokens generated so far, if the last chunk has reported them
        self._held_tokens: int | None = None  # tokens of the text that is held back
        self._held: list[_Held] = []
        self._is_passed = False
        self.continues: bool | None = None
        """Whether the upstream continues the message according to the usage, or None if that is unknown."""

    @property
    def repeated_tokens(self) -> int:
        """Number of tokens of the message if the upstream began a new answer, which repeats it. Otherwise 0."""
        return self._tokens if self.repeats else 0

    @property
    def repeats(self) -> bool:
        """Whether the upstream began a new answer, which repeats the message."""
        return self.continues is False and bool(self._new.target)

    @property
    def waits_for_usage(self) -> bool:
        """Whether text is held back until the upstream reports the usage."""
        return bool(self._held) and self.continues is None and self._prompt_tokens is not None

    @property
    def uncounted(self) -> str | None:
        """The text that begins with the whole message, if its tokens must be counted to tell whether they were generated."""
        is_needed = self.continues and self._held_tokens is None and self._new.match is _Match.WHOLE and self._count is not None
        return "".join(held.text for held in self._held) or None if is_needed else None

    def count_held(self, tokens: int) -> None:
        """Set the number of tokens of `uncounted`."""
        self._held_tokens = tokens

    def report(self, usage: Mapping[str, Any] | None) -> None:
        """Record the usage in the last chunk, or None if it has none. Call this before the chunk's text is fed.

        Raises `UpstreamError` if the text that has already passed belongs to a new answer.
        """
        counts = usage or {}
        prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens")
        self._count = completion if type(completion) is int else None
        if self.continues is None and self._prompt_tokens is not None and type(prompt) is int and prompt > 0:
            self.continues = prompt == self._prompt_tokens
            if self._is_passed and self._new.target and not self.continues:
                raise UpstreamError(_STARTED_OVER)

    def feed(self, text: str, logprobs: Any, *, is_reasoning: bool = False) -> list[Passed] | None:
        """Return the new texts, or None if more text or the usage is needed. Raises the same error as `decide`."""
        is_compared = not is_reasoning or bool(self.continues) or self._prompt_tokens is None
        self._held.append(_Held(text, logprobs, is_reasoning, is_compared))
        if is_compared:
            self._new.feed(text)
        return self.decide()

    def decide(self, *, is_final: bool = False) -> list[Passed] | None:
        """Return the texts that were held back, without a repetition, or None if more text or the usage is needed.

        If `is_final`, no more text follows, and the result is not None. Raises `UpstreamStartedOver` if the upstream began a
        new answer that differs from the message.
        """
        if not (self._held or is_final):
            return None
        verdict = self._judge(is_final)
        if verdict is _Verdict.WAIT:
            return None
        is_dropped, skipped = verdict is _Verdict.DROP, 0
        if is_dropped or self._is_trimmed:
            repeated = self._new.repeated(with_target=is_dropped, is_final=is_final)
            if repeated is None:
                return None
            skipped = repeated
        self._is_passed = True
        return self._without(skipped, with_reasoning=not is_dropped)

    def _judge(self, is_final: bool) -> _Verdict:
        new = self._new
        if self.continues is None and (is_final or self._prompt_tokens is None):
            return self._guess(is_final)
        if self.continues is None:
            is_clear = new.match is _Match.DIFFERS and new.matched <= MAX_CHANCE and all(one.is_compared for one in self._held)
            return _Verdict.KEEP if is_clear else _Verdict.WAIT
        if self.continues:
            return self._judge_continuation(is_final)
        if not new.target:
            return _Verdict.KEEP
        if new.match is _Match.DIFFERS or (is_final and new.match is _Match.PART):
            raise UpstreamStartedOver(_STARTED_OVER)
        return _Verdict.DROP if new.match is _Match.WHOLE else _Verdict.WAIT

    def _judge_continuation(self, is_final: bool) -> _Verdict:
        """Decide whether a server that continues the message has sent the message again before."""
        new, count = self._new, self._count
        if new.match is _Match.DIFFERS or (is_final and (count is None or new.match is _Match.PART)):
            return _Verdict.KEEP
        if count is None or (new.match is _Match.PART and not count):
            return _Verdict.WAIT
        if new.match is _Match.PART:
            return _Verdict.KEEP
        if not count or (self._held_tokens is not None and count < self._held_tokens - self._tokens / 2):
            return _Verdict.DROP
        is_generated = self._held_tokens is not None or (new.is_only_target and 2 * count >= self._tokens)
        return _Verdict.KEEP if is_generated or is_final else _Verdict.WAIT

    def _guess(self, is_final: bool) -> _Verdict:
        """Decide without proof. A message of repetitions, such as a line of dashes, may continue with the same text."""
        new = self._new
        if self._repeats_itself or (new.match is _Match.WHOLE and len(new.target) < MIN_REPEATED):
            return _Verdict.KEEP
        if new.match is _Match.WHOLE:
            return _Verdict.DROP
        if new.match is _Match.PART and not is_final:
            return _Verdict.WAIT
        if new.matched > MAX_CHANCE:
            raise UpstreamStartedOver(_STARTED_OVER)
        return _Verdict.KEEP

    def _without(self, skipped: int, *, with_reasoning: bool) -> list[Passed]:
        """Return the texts that are held back, without the first `skipped` characters."""
        passed = []
        for text, logprobs, is_reasoning, is_compared in self._held:
            cut = min(skipped, len(text)) if is_compared else 0
            skipped -= cut
            if text[cut:] and (is_compared or with_reasoning):
                passed.append(Passed(text[cut:], logprobs, is_reasoning))
        self._held.clear()
        return passed


def repeats_itself(text: str) -> bool:
    """Return whether `text` consists of repetitions of one piece. The last repetition may be cut off."""
    period = text.find(text[: (len(text) + 1) // 2], 1)
    return 0 < period <= len(text) // 2 and text[period:] == text[:-period]


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
