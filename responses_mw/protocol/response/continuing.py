"""Add an answer that should continue a message to the response, in the place of an answer that was interrupted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from ...errors import UpstreamError
from ...ids import RunIds
from ..chat.tool_calls import ToolCalls
from ..types import Document
from .answer import ChatAnswer
from .builder import ResponseOptions
from .document import UsageSum
from .events import OPEN_REASONING_TEXT, OUTPUT_TEXT, REASONING_TEXT, REFUSAL, SUMMARY_TEXT, EventTarget
from .items import ItemBuilder
from .seam import Passed, Seam


class ContinuingBuilder(ItemBuilder):
    """A builder whose text passes a `Seam` if the answer should continue a message."""

    def __init__(self, document: Document, ids: RunIds, options: ResponseOptions) -> None:
        super().__init__(document, ids, options)
        self._usage = UsageSum()
        content = OPEN_REASONING_TEXT if options.open_reasoning else REASONING_TEXT
        self._reasoning = SUMMARY_TEXT if options.summary else content
        self._turn_is_over = True  # items may precede the first turn
        self.answer = self._new_answer()

    @abstractmethod
    def _begin_turn(self) -> None: ...

    @abstractmethod
    def _text(self, kind: EventTarget, text: str, logprobs: Any = None) -> None: ...

    @abstractmethod
    def _calls(self, fragments: Any) -> None: ...

    def _new_answer(self) -> ChatAnswer:
        return ChatAnswer(ToolCalls(self._names), self._reasoning, self._options.think_tag)

    def expect(self, seam: Seam) -> None:
        if self._turn_is_over:
            self._begin_turn()
        self.answer.expect(seam)

    def join(self, seam: Seam, usage: dict[str, Any] | None) -> None:
        self.expect(seam)
        self._usage.continues(usage)

    @property
    def uncounted(self) -> str | None:
        return None if self.answer.seam is None else self.answer.seam.uncounted

    def count_held(self, tokens: int) -> None:
        if self.answer.seam is not None:
            self.answer.seam.count_held(tokens)

    def _report_to_seam(self, usage: dict[str, Any]) -> None:
        if self.answer.joined is not None:
            self.answer.joined.report(usage)
            self._usage.repeated = self.answer.joined.repeated_tokens

    def _ask_seam(self) -> None:
        """Emit the text that the seam holds back, if the usage has shown whether it continues the message."""
        if self.answer.seam is not None and (passed := self.answer.seam.decide()) is not None:
            self._end_seam(passed)

    def _pass_seam(self, seam: Seam, kind: EventTarget, text: str, logprobs: Any) -> None:
        if kind is REFUSAL:
            self._end_seam()
            self._text(kind, text, logprobs)
            return
        if not self.answer.usage_is_last:
            seam.report(None)
        passed = seam.feed(text, logprobs, is_reasoning=kind is not OUTPUT_TEXT)
        if passed is not None:
            self._end_seam(passed)

    def _wait_for_seam(self, fragments: Any) -> bool:
        """Return whether the fragments of calls must wait, because the seam holds back text that precedes them."""
        waits = self.answer.seam is not None and self.answer.seam.waits_for_usage
        if waits:
            self.answer.waiting_calls.append(fragments)
        return waits

    def _end_seam(self, passed: Sequence[Passed] | None = None) -> None:
        """Remove the seam. Emit `passed`, or all text that the seam holds back if `passed` is None. Feed the waiting calls."""
        answer = self.answer
        seam, answer.seam = answer.seam, None
        if seam is None:
            return
        answer.show_thinking_as(self._reasoning if seam.continues is False else OUTPUT_TEXT)
        for text, logprobs, is_reasoning in (seam.decide(is_final=True) or ()) if passed is None else passed:
            if is_reasoning and answer.thinking is OUTPUT_TEXT and self._functions:  # calls in this answer would appear as text
                raise UpstreamError("The upstream continued its interrupted answer as reasoning.")
            self._text(answer.thinking if is_reasoning else OUTPUT_TEXT, text, logprobs)
        waiting, answer.waiting_calls = answer.waiting_calls, []
        for fragments in waiting:
            self._calls(fragments)
