"""Convert chat chunks to the events of one response.

- At most one item is open, and it is closed before another item is added. If an upstream interleaves calls, each call waits
  until the previous one is complete. Text after an incomplete call or a server-side call waits for the end of the turn.
- One text chunk becomes one delta. White space alone does not begin an item. It is held back until more output arrives.
  If a call or text of another kind follows, the white space is dropped. If nothing follows, only white space of the answer
  itself is kept.
- A run consists of turns (chat completions). `feed` begins a turn, and `end_turn` completes it. The calls in
  `answer.asked` are then executed in any order. Their results are passed to `settle` in the order of the calls.
- After `break_off`, another answer is fed to the same turn. If `join` is called first, this answer continues the text of the
  message. Its reasoning also becomes text, unless it is in tags. If functions are offered, an answer that begins with
  reasoning is an error. After `expect`, the same applies to an answer that continues a message of the request.
- `conclude` or `fail` completes the document. It can then be stored, before `terminal` returns the last event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import UpstreamError
from .. import origin
from ..chat.chunks import Text, choices_of, delta_of, malformed
from ..chat.deltas import is_plain, plain
from ..chat.finish_reasons import Ending, finish_reason_of
from ..chat.tool_calls import ToolCall
from ..request.create import SERVICE_TIERS
from ..types import Chunk, Event
from .answer import CUT_REASONS
from .continuing import ContinuingBuilder
from .events import CALL_TEXTS, OUTPUT_TEXT, REFUSAL, EventTarget, emit_item
from .items import OpenCall
from .replay import Phase, Takeover, parts_of, phase_of
from .text import CitingText, OpenText, logprobs_of


class Assembler(ContinuingBuilder):
    """Builds one response from the chat chunks of its turns."""

    def _begin_turn(self) -> None:
        self.turn_begins_at = len(self.response["output"])
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._turn_is_over = False
        self._usage.reported = None
        self.answer = self._new_answer()

    # -- the run --------------------------------------------------------------------------------------------------

    def conclude(self, completed_at: int) -> None:
        super().conclude(completed_at)
        if self.answer.is_cut and self.answer.ending is not None:
            reason = CUT_REASONS.get(self.answer.ending, "max_output_tokens")
            self.response.update(status="incomplete", completed_at=None, incomplete_details={"reason": reason})

    def update_document(self) -> None:
        if self._open is not None:
            self._open.put()

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
        return not self._turn_is_over and self.answer.has_ended

    @property
    def has_known_end(self) -> bool:
        return self.answer.ending is Ending.COMPLETE

    def check_end(self, *, done: bool) -> None:
        self.answer.check_end(has_ended=self.ended, done=done)

    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        if self._turn_is_over:
            self._begin_turn()
        answer = self.answer
        for chunk in chunks:
            if isinstance(chunk, dict):
                self._feed_chunk(chunk)
                continue
            answer.usage_is_last, answer.has_bare_chunk = False, True
            member, text = chunk
            part = self._open
            if (
                isinstance(part, OpenText)
                and part.kind is answer.direct.get(member)
                and not (isinstance(part, CitingText) and not part.passes(text))
            ):  # nearly every token
                part.utf8 += text.encode()
                self._emitter.delta(part.template, text)
            elif member == "content":
                self._content(text, None)
            else:
                self._text(answer.thinking, text)
        return self._emitter.drain()

    def delta(self, text: Text) -> bytes | None:
        part, answer = self._open, self.answer
        if self._turn_is_over or not isinstance(part, OpenText) or part.kind is not answer.direct.get(text[0]):
            return None
        if isinstance(part, CitingText) and not part.passes(text[1]):
            return None
        answer.usage_is_last, answer.has_bare_chunk = False, True
        number = self._emitter.next_number
        self._emitter.next_number = number + 1
        return part.frame(text[1], number)

    def _feed_chunk(self, chunk: Chunk) -> None:
        usage = chunk.get("usage")
        self.answer.usage_is_last = bool(usage)
        self.answer.has_bare_chunk |= not usage
        if usage:
            if not isinstance(usage, dict):
                malformed("usage")
            self._usage.reported = usage
            self._report_to_seam(usage)
        tier = chunk.get("service_tier")
        if isinstance(tier, str) and tier in SERVICE_TIERS:
            self.response["service_tier"] = tier
        for choice in choices_of(chunk):
            if not choice.get("index"):  # n is 1; other choices (watsonx) are ignored
                self._feed_choice(choice)
        if usage:
            self._ask_seam()

    def _feed_choice(self, choice: dict[str, Any]) -> None:
        delta = delta_of(choice, is_first=not self.answer.has_output)
        if delta:
            if not isinstance(delta, dict):
                malformed("delta")
            for one in (delta,) if is_plain(delta) else plain(delta, self.dropped):
                self._feed_delta(choice, one)
        if choice.get("finish_reason") and (word := finish_reason_of(choice["finish_reason"])):
            self._finish(word)

    def _feed_delta(self, choice: dict[str, Any], delta: dict[str, Any]) -> None:
        # Some servers send the same text under both names.
        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
        if reasoning:
            self._text(self.answer.thinking, reasoning)
        if delta.get("content"):
            self._content(delta["content"], self._logprobs(choice, delta, reasoning))
        if delta.get("refusal"):
            self._text(REFUSAL, delta["refusal"])
        if delta.get("annotations"):
            self._cite(delta["annotations"])
        if delta.get("tool_calls"):
            self._calls(delta["tool_calls"])

    def _finish(self, word: str) -> None:
        self.answer.finish(word)
        if self.answer.ending is Ending.UNKNOWN:
            self.unknown_finish_reason = word

    def _logprobs(self, choice: dict[str, Any], delta: dict[str, Any], reasoning: Any) -> Any:
        logprobs = choice.get("logprobs") if self._options.logprobs else None
        # A whole answer, or a chunk that also has reasoning or calls, has log probabilities of other tokens as well.
        if logprobs and (reasoning or delta.get("tool_calls") or "message" in choice):
            return logprobs_of(delta["content"], logprobs, after=reasoning)
        return logprobs

    def end_turn(self) -> list[Event]:
        if self._turn_is_over:
            self._begin_turn()
        if self.answer.splitter:
            self._split(self.answer.splitter.flush())
        self._end_seam()
        if not self.answer.tool_calls.calls:
            for kind, text, logprobs in self.answer.held:  # an answer that consists only of white space
                if kind is OUTPUT_TEXT:
                    self._show(kind, text, logprobs)
        self._decide()
        self.answer.needs_answer = self._is_unanswered()
        self._show_rest()
        if self._annotations:  # no text that they could belong to
            self.dropped.note("annotations")
        self.response["usage"] = self._usage.with_turn(self.response["usage"])
        self._turn_is_over = True
        return self._emitter.drain()

    def text_size(self) -> int:
        current = self._open if isinstance(self._open, OpenText) else None
        parts = (part for item in self.response["output"][self.turn_begins_at :] for part in parts_of(item))
        finished = sum(len(part.get("text", "")) for part in parts if current is None or part is not current.part)
        is_open = len(current.utf8) if current is not None else 0
        return finished + is_open + sum(call.size for call in self.answer.tool_calls.calls)

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
            current.drop_held()
        else:
            self._close("incomplete")
        self._served -= self.answer.count_served()
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
            self._finish("length")
        return events

    def settle(self, members: Mapping[str, Any], *, failed: bool = False) -> list[Event]:
        assert isinstance(self._open, OpenCall), "results come after end_turn, one for each call"
        self._open.settle(members, failed=failed)
        self._end_item("failed" if failed else "completed")
        self._show_rest()
        return self._emitter.drain()

    def _decide(self) -> None:
        """Decide which calls of the turn are executed. Raises `UpstreamError` if a call has no name and was not cut off."""
        self.answer.tool_calls.end(is_cut=self.answer.is_cut)
        for call in self.answer.tool_calls.calls:
            if not (call.name or call.find_name()):
                if self.answer.is_cut:
                    break  # the call was cut off before its name
                raise UpstreamError("The upstream's model called a function without naming it.")
            form = self._form(call)
            if form and form.served and not self.answer.is_cut:
                self.answer.asked.append(call)  # the model of a cut turn may have intended more arguments or calls
            self.answer.has_client_calls |= bool(form and not form.served)
        if not self.answer.is_cut:
            self._refuse_unoffered()

    def _is_unanswered(self) -> bool:
        """Return whether the turn is a draft without a call or a refusal. A draft that was cut off may be a call."""
        if not self.is_draft or self.answer.is_cut or self.answer.asked or self.answer.has_client_calls:
            return False
        return not any(item["type"] == "message" for item in self.response["output"][self.turn_begins_at :])

    def _show_rest(self) -> None:
        """Emit and close the remaining calls and text, up to a call that waits for its result."""
        for call in self.answer.tool_calls.calls[self.answer.shown :]:
            if self.answer.is_cut and not (self._is_over() and self._can_be_shown(call)):
                break  # the open call was cut off
            if self._is_awaited():
                return
            self._close("completed")
            self._show_call(call)
        if self._is_awaited():
            return
        if self.answer.late and not (self.answer.is_cut and not self._is_over()):
            self._close("completed")
            late, self.answer.late = self.answer.late, []
            for text in late:
                self._text(*text)
        is_empty = len(self.response["output"]) == self.turn_begins_at
        if self.answer.finish_reason and is_empty and not self.answer.needs_answer:
            self._show_no_item()
        self._close("incomplete" if self.answer.is_cut else "completed")  # only the last item of a cut turn is incomplete
        self._keep_origins()

    def _keep_origins(self) -> None:
        """If a call of the turn has members from the upstream, add a reasoning item with encrypted copies of them."""
        seal = self._options.seal_origins
        if seal is None:
            return
        items = self.response["output"][self.turn_begins_at :]
        if not self.answer.is_cut and origin.needs_keeping(items):  # the last item of a cut turn may be continued
            item, output_index = self._append(origin.kept(seal(origin.copies(items))))
            emit_item(self._emitter, output_index, item, open_reasoning=self._options.open_reasoning)

    def _is_awaited(self) -> bool:
        """Return whether the open item is a call that waits for its result. If so, emit the events that mark it as running."""
        current = self._open
        if self.answer.is_cut or not (isinstance(current, OpenCall) and current.form.served):
            return False
        if not current.is_finished:
            current.finish()
            current.emit(current.form.runs)
        return True

    # -- text -----------------------------------------------------------------------------------------------------

    def _content(self, content: Any, logprobs: Any) -> None:
        if not isinstance(content, str):
            malformed("delta")
        if self.answer.splitter:
            self.answer.has_output = True
            self._split(self.answer.splitter.feed(content, logprobs))
        else:
            self._text(OUTPUT_TEXT, content, logprobs)

    def _split(self, pieces: Iterable[tuple[bool, str, Any]]) -> None:
        for thinking, piece, logprobs in pieces:
            self._text(self._reasoning if thinking else OUTPUT_TEXT, piece, logprobs)

    def _text(self, kind: EventTarget, text: str, logprobs: Any = None) -> None:
        if not isinstance(text, str):
            malformed("delta")
        self.answer.has_output = True
        if self.answer.seam is not None:
            self._pass_seam(self.answer.seam, kind, text, logprobs)
            return
        current = self._open
        if isinstance(current, OpenText) and current.kind is kind:
            current.add(text, logprobs)
            return
        if self.answer.late or not self._is_over():
            self.answer.late.append((kind, text, logprobs))
            return
        if self.answer.held and self.answer.held[0][0] is not kind:
            self.answer.held.clear()
        if text.isspace():
            self.answer.held.append((kind, text, logprobs))
            return
        held, self.answer.held = [*self.answer.held, (kind, text, logprobs)], []
        for shown in held:
            self._show(*shown)

    def _show(self, kind: EventTarget, text: str, logprobs: Any) -> None:
        if not (self.is_draft and kind is OUTPUT_TEXT):
            super()._show(kind, text, logprobs)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _calls(self, fragments: Any) -> None:
        self.answer.has_output = True
        if self._wait_for_seam(fragments):
            return
        self._end_seam()
        self.answer.held.clear()
        grown = self.answer.tool_calls.feed(fragments)
        if isinstance(self._open, OpenCall) and self._open.call in grown:
            self._open.grow()
        calls = self.answer.tool_calls.calls
        while self.answer.shown < len(calls) and self._is_over() and self._can_be_shown(calls[self.answer.shown]):
            self._close("completed")
            self._show_call(calls[self.answer.shown])

    def _can_be_shown(self, call: ToolCall) -> bool:
        if not call.name:
            return False
        form = self._form(call)
        return form is None or form.item in CALL_TEXTS or call.is_whole()

    def _show_call(self, call: ToolCall) -> None:
        self.answer.shown += 1
        if form := self._form(call):
            self._open_call(form, call)
