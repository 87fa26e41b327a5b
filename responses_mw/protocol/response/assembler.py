"""Convert chat chunks to the events of one response.

- At most one item is open, and it is closed before another item is added. If an upstream interleaves calls, each call waits
  until the previous one is complete. Text after an incomplete call or a server-side call waits for the end of the turn.
- One text chunk becomes one delta. White space alone does not begin an item. It is held back until more output arrives.
  If a call or text of another kind follows, the white space is dropped. If nothing follows, only white space of the answer
  itself is kept.
- A run consists of turns (chat completions). `feed` begins a turn, and `end_turn` completes it. The calls in `asked` are then
  executed in any order. Their results are passed to `settle` in the order of the calls.
- After `break_off`, another answer is fed to the same turn. If `join` is called first, this answer continues the text of the
  message. Its reasoning also becomes text, unless it is in tags. If functions are offered, an answer that begins with
  reasoning is an error.
- `conclude` or `fail` completes the document. It can then be stored, before `terminal` returns the last event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import UpstreamError
from ...ids import RunIds
from ..chat.chunks import Text, choices_of
from ..chat.tool_calls import ToolCall, ToolCalls
from ..parts import texts_of
from ..request.checks import malformed
from ..request.create import SERVICE_TIERS
from ..types import Chunk, Document
from .builder import ResponseOptions
from .document import UsageSum
from .events import CALL_TEXTS, OPEN_REASONING_TEXT, OUTPUT_TEXT, REASONING_TEXT, REFUSAL, SUMMARY_TEXT, Event, EventTarget
from .items import ItemBuilder, OpenCall
from .replay import Phase, Seam, Takeover, phase_of
from .text import OpenText, ThinkingSplitter, logprobs_of

INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Assembler(ItemBuilder):
    """Builds one response from the chat chunks of its turns."""

    def __init__(self, document: Document, ids: RunIds, options: ResponseOptions) -> None:
        super().__init__(document, ids, options)
        self._usage = UsageSum()
        content = OPEN_REASONING_TEXT if options.open_reasoning else REASONING_TEXT
        self._reasoning = SUMMARY_TEXT if options.summary else content
        self._begin_turn()
        self._turn_is_over = True  # items may precede the first turn

    def _begin_turn(self) -> None:
        self.turn_begins_at = len(self.response["output"])
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._turn_is_over = False
        self._seam: Seam | None = None
        self._show_thinking_as(self._reasoning)
        self.finish_reason = None
        self.asked: list[ToolCall] = []
        self.has_client_calls = self.has_left_out = False
        self._usage.reported = None
        self._usage_is_last = self._has_bare_chunk = False
        self._splitter = ThinkingSplitter(self._options.think_tag) if self._options.think_tag else None
        self._held: list[tuple[EventTarget, str, Any]] = []
        self._late: list[tuple[EventTarget, str, Any]] = []
        self._tool_calls = ToolCalls()
        self._shown = 0  # number of calls that have been opened or left out

    def _show_thinking_as(self, kind: EventTarget) -> None:
        self._thinking = kind
        # The kind of text in each member of a delta. Content that may contain reasoning tags is excluded.
        self._direct = {"reasoning": kind, "reasoning_content": kind}
        if not self._options.think_tag:
            self._direct["content"] = OUTPUT_TEXT

    # -- the run --------------------------------------------------------------------------------------------------

    def conclude(self, completed_at: int) -> None:
        super().conclude(completed_at)
        if reason := INCOMPLETE_REASONS.get(self.finish_reason or ""):
            self.response.update(status="incomplete", completed_at=None, incomplete_details={"reason": reason})

    def fail(self, code: str, message: str) -> None:
        if self._open is not None:  # without a done event
            self._open.put()
            self._open.item["status"] = "incomplete"
            self._open = None
        self.response["usage"] = self._usage.with_turn(self.response["usage"])
        super().fail(code, message)

    # -- one turn -------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        # Without a finish reason, the turn is complete if the last chunk has usage and another chunk has none.
        by_usage = self._usage_is_last and self._has_bare_chunk
        return not self._turn_is_over and (self.finish_reason is not None or by_usage)

    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        if self._turn_is_over:
            self._begin_turn()
        for chunk in chunks:
            if isinstance(chunk, dict):
                self._feed_chunk(chunk)
                continue
            self._usage_is_last, self._has_bare_chunk = False, True
            member, text = chunk
            part = self._open
            if part.__class__ is OpenText and part.kind is self._direct.get(member):  # nearly every token
                part.utf8 += text.encode()
                self._emitter.delta(part.template, text)
            elif member == "content":
                self._content(text, None)
            else:
                self._text(self._thinking, text)
        return self._emitter.drain()

    def delta(self, text: Text) -> bytes | None:
        part = self._open
        if self._turn_is_over or part.__class__ is not OpenText or part.kind is not self._direct.get(text[0]):
            return None
        self._usage_is_last, self._has_bare_chunk = False, True
        number = self._emitter.next_number
        self._emitter.next_number = number + 1
        return part.frame(text[1], number)

    def _feed_chunk(self, chunk: Chunk) -> None:
        usage = chunk.get("usage")
        self._usage_is_last = bool(usage)
        self._has_bare_chunk |= not usage
        if usage:
            if not isinstance(usage, dict):
                malformed("usage")
            self._usage.reported = usage
        tier = chunk.get("service_tier")
        if isinstance(tier, str) and tier in SERVICE_TIERS:
            self.response["service_tier"] = tier
        for choice in choices_of(chunk):
            if not choice.get("index"):  # n is 1; other choices (watsonx) are ignored
                self._feed_choice(choice)

    def _feed_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if delta:
            if not isinstance(delta, dict):
                malformed("delta")
            # Some servers send the same text under both names.
            reasoning = delta.get("reasoning") or delta.get("reasoning_content")
            if reasoning:
                self._text(self._thinking, reasoning)
            if delta.get("content"):
                self._content(delta["content"], self._logprobs(choice, delta, reasoning))
            if delta.get("refusal"):
                self._text(REFUSAL, delta["refusal"])
            if delta.get("tool_calls"):
                self._calls(delta["tool_calls"])
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])

    def _logprobs(self, choice: dict[str, Any], delta: dict[str, Any], reasoning: Any) -> Any:
        logprobs = choice.get("logprobs") if self._options.logprobs else None
        # A whole answer, or a chunk that also has reasoning or calls, has log probabilities of other tokens as well.
        if logprobs and (reasoning or delta.get("tool_calls") or "message" in choice):
            return logprobs_of(delta["content"], logprobs, after=reasoning)
        return logprobs

    def end_turn(self) -> list[Event]:
        if self._turn_is_over:
            self._begin_turn()
        if self._splitter:
            self._split(self._splitter.flush())
        self._end_seam()
        if not self._tool_calls.calls:
            for kind, text, logprobs in self._held:  # an answer that consists only of white space
                if kind is OUTPUT_TEXT:
                    self._show(kind, text, logprobs)
        self._decide()
        self._show_rest()
        self.response["usage"] = self._usage.with_turn(self.response["usage"])
        self._turn_is_over = True
        return self._emitter.drain()

    @property
    def phase(self) -> Phase:
        if self._turn_is_over:
            return Phase.NOTHING
        current = self._open
        is_waiting = isinstance(current, OpenCall) and current.form.served and not current.is_finished
        return phase_of(self.response["output"][self.turn_begins_at :], self.awaited if is_waiting else None)

    def break_off(self) -> list[Event]:
        if self._turn_is_over:
            self._begin_turn()
        current = self._open
        if isinstance(current, OpenText) and current.kind is OUTPUT_TEXT:
            current.put()  # for the request that continues the text
        else:
            self._close("incomplete")
        self._served -= sum(bool(call.form and call.form.served) for call in self._tool_calls.calls)
        self._begin_answer()
        return self._emitter.drain()

    def take_over(self, takeover: Takeover, number: int) -> list[Event]:
        self.response["output"], self.response["status"] = takeover.items, "in_progress"
        self._emitter.next_number = number
        self._begin_turn()
        self.turn_begins_at = takeover.turn_begins_at
        self._served = takeover.calls
        if takeover.is_charged:
            self._usage.continues(None)
        if takeover.open is not None:
            self._reopen(takeover.open, self._reasoning)
        events = self.break_off()
        if takeover.is_over and takeover.items[-1].get("status") == "incomplete":
            self.finish_reason = "length"
        return events

    def join(self, text: str, *, is_trimmed: bool, usage: dict[str, Any] | None) -> None:
        self._seam = Seam(text, is_trimmed=is_trimmed)
        self._direct = {}  # until the seam is passed
        self._usage.continues(usage)

    def _pass_seam(self, seam: Seam, kind: EventTarget, text: str, logprobs: Any) -> None:
        if kind is REFUSAL:
            self._end_seam()
            self._text(kind, text, logprobs)
            return
        if kind is not OUTPUT_TEXT and self._forms:  # calls in this answer would appear as text
            raise UpstreamError("The upstream continued its interrupted answer as reasoning.")
        passed = seam.feed(text, logprobs)
        if passed is not None:
            self._end_seam(passed)

    def _end_seam(self, passed: list[tuple[str, Any]] | None = None) -> None:
        """Remove the seam. Emit `passed`, or all text that the seam holds back if `passed` is None."""
        seam, self._seam = self._seam, None
        if seam is None:
            return
        self._show_thinking_as(OUTPUT_TEXT)
        for text, logprobs in seam.flush() if passed is None else passed:
            self._text(OUTPUT_TEXT, text, logprobs)

    def settle(self, members: Mapping[str, Any], *, failed: bool = False) -> list[Event]:
        assert isinstance(self._open, OpenCall), "results come after end_turn, one for each call"
        self._open.settle(members, failed=failed)
        self._end_item("failed" if failed else "completed")
        self._show_rest()
        return self._emitter.drain()

    @property
    def _is_cut(self) -> bool:
        return self.finish_reason in INCOMPLETE_REASONS

    def _decide(self) -> None:
        """Decide which calls of the turn are executed. Raises `UpstreamError` if a call has no name and was not cut off."""
        for call in self._tool_calls.calls:
            if not (call.name or call.find_name()):
                if self._is_cut:
                    break  # the call was cut off before its name
                raise UpstreamError("The upstream's model called a function without naming it.")
            form = self._form(call)
            if form and form.served and not self._is_cut:  # the model of a cut turn may have intended more arguments or calls
                self.asked.append(call)
            self.has_client_calls |= bool(form and not form.served)

    def _show_rest(self) -> None:
        """Emit and close the remaining calls and text, up to a call that waits for its result."""
        for call in self._tool_calls.calls[self._shown :]:
            if self._is_cut and not (self._is_over() and self._can_be_shown(call)):
                break  # the open call was cut off
            if self._is_awaited():
                return
            self._close("completed")
            self._show_call(call)
        if self._is_awaited():
            return
        if self._late and not (self._is_cut and not self._is_over()):
            self._close("completed")
            late, self._late = self._late, []
            for text in late:
                self._text(*text)
        if self.finish_reason and len(self.response["output"]) == self.turn_begins_at:
            self._open_part(OUTPUT_TEXT)  # an empty answer
        self._close("incomplete" if self._is_cut else "completed")  # only the last item of a cut turn is incomplete

    def _is_awaited(self) -> bool:
        """Return whether the open item is a call that waits for its result. If so, emit the events that mark it as running."""
        current = self._open
        if self._is_cut or not (isinstance(current, OpenCall) and current.form.served):
            return False
        if not current.is_finished:
            current.finish()
            current.emit(current.form.runs)
        return True

    # -- text -----------------------------------------------------------------------------------------------------

    def _content(self, content: Any, logprobs: Any) -> None:
        if isinstance(content, list):  # Mistral's own API
            content = "".join(texts_of(content))
        if not isinstance(content, str):
            malformed("delta")
        if self._splitter and content:
            self._split(self._splitter.feed(content, logprobs))
        elif content:
            self._text(OUTPUT_TEXT, content, logprobs)

    def _split(self, pieces: Iterable[tuple[bool, str, Any]]) -> None:
        for thinking, piece, logprobs in pieces:
            self._text(self._reasoning if thinking else OUTPUT_TEXT, piece, logprobs)

    def _text(self, kind: EventTarget, text: str, logprobs: Any = None) -> None:
        if not isinstance(text, str):
            malformed("delta")
        if self._seam is not None:
            self._pass_seam(self._seam, kind, text, logprobs)
            return
        current = self._open
        if isinstance(current, OpenText) and current.kind is kind:
            current.add(text, logprobs)
            return
        if self._late or not self._is_over():
            self._late.append((kind, text, logprobs))
            return
        if self._held and self._held[0][0] is not kind:
            self._held.clear()
        if text.isspace():
            self._held.append((kind, text, logprobs))
            return
        held, self._held = [*self._held, (kind, text, logprobs)], []
        for shown in held:
            self._show(*shown)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _calls(self, fragments: Any) -> None:
        self._end_seam()
        self._held.clear()
        grown = self._tool_calls.feed(fragments)
        if isinstance(self._open, OpenCall) and self._open.call in grown:
            self._open.grow()
        calls = self._tool_calls.calls
        while self._shown < len(calls) and self._is_over() and self._can_be_shown(calls[self._shown]):
            self._close("completed")
            self._show_call(calls[self._shown])

    def _can_be_shown(self, call: ToolCall) -> bool:
        if not call.name:
            return False
        form = self._form(call)
        return form is None or form.item in CALL_TEXTS or call.is_whole()

    def _show_call(self, call: ToolCall) -> None:
        self._shown += 1
        if form := self._form(call):
            self._open_call(form, call)
