"""From chat chunks to the events of one response.

The rules, each a law that the tests hold:

1. Events, replayed, give the document; both come from the same calls here.
2. ``sequence_number`` starts at 0 and is contiguous (``events.Emitter``). ``output_index`` grows; items do not overlap: the
   open item is closed before another is added. Calls that an upstream interleaves wait for their turn, and text that comes
   between the fragments of a call waits for the end.
3. An item is added before its parts and deltas, with its final id; it is done after them, unless the run fails.
4. One text chunk is one delta, never merged, never split. White space alone makes no item: it waits for text, and a
   call or other text that comes instead drops it.
5. A run has turns (chat completions), each begun by ``feed`` and closed by ``end_turn``; ``conclude`` or ``fail`` fixes the
   document, and ``terminal`` gives the last event, so that the document can be stored in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import UpstreamError
from . import usage as usages
from .checks import malformed
from .chunks import choices_of, text_of_parts
from .document import whole
from .events import DeltaTemplate, Emitter, Event, terminal_type
from .items import CALL_ID_LENGTH
from .kinds import OUTPUT_TEXT, REASONING_TEXT, REFUSAL, SUMMARY_TEXT, TextKind
from .logprobs import from_chat as logprobs_from_chat
from .options import DEFAULTS, Options
from .reasoning import text_of
from .shortcut import Text
from .thinking import ThinkingSplitter
from .toolcalls import ToolCall, ToolCalls
from .types import Chunk, Document, Item


class Ids(Protocol):
    """Where ids come from (``responses_mw.ids.RunIds``): ``protocol`` draws no random numbers itself."""

    def item(self, prefix: str) -> str: ...


QUEUED_EVENTS = 2
"""A queued run has begun with so many events: created and queued."""
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(slots=True)
class _OpenText:
    """The text part that is being streamed, and the item around it."""

    kind: TextKind
    item: Item
    place: dict[str, Any]
    template: DeltaTemplate
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class _OpenCall:
    call: ToolCall
    item: Item
    place: dict[str, Any]
    template: DeltaTemplate


class Assembler:
    """Makes one response out of the chunks of its turns. Methods return the events that they cause, in order."""

    def __init__(self, document: Document, ids: Ids, options: Options = DEFAULTS) -> None:
        """``document`` is the response as created (``document.create``); it is kept up to date as ``response``."""
        self.response = document
        self.finish_reason: str | None = None
        self._ids = ids
        self._options = options
        self._emitter = Emitter()
        self.calls: list[Item] = []
        """The complete function calls of the turn, which are the last turn's until the next one begins."""
        self._open: _OpenText | _OpenCall | None = None
        self._call_ids = set(options.used_call_ids)
        self._reasoning = SUMMARY_TEXT if options.summary else REASONING_TEXT
        # What of a delta is text of one kind, unseen; content that may hold tags of reasoning is not.
        self._direct = {"reasoning": self._reasoning, "reasoning_content": self._reasoning}
        if not options.think_tag:
            self._direct["content"] = OUTPUT_TEXT
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn_is_over = False
        self.finish_reason = None
        self.calls = []
        self._usage: dict[str, Any] | None = None
        self._chunks = self._chunks_with_usage = 0
        self._usage_is_last = False
        self._splitter = ThinkingSplitter(self._options.think_tag) if self._options.think_tag else None
        self._held: list[tuple[TextKind, str, Any]] = []
        self._late: list[tuple[TextKind, str, Any]] = []
        self._tool_calls = ToolCalls()
        self._shown = 0  # how many of them have been opened, or left out
        self._called = False
        self._items_before = len(self.response["output"])

    # -- the run --------------------------------------------------------------------------------------------------

    def start(self, *, queued: bool = False) -> list[Event]:
        """``response.created``, then ``queued`` (a background run waits for a worker) or ``in_progress``."""
        self.response["status"] = "queued" if queued else "in_progress"
        self._lifecycle("response.created")
        self._lifecycle("response.queued" if queued else "response.in_progress")
        return self._emitter.drain()

    def resume(self, number: int) -> list[Event]:
        """``response.in_progress`` of a run that was queued, and whose next event has that number. None where another worker
        began it, and did no more."""
        self._emitter.next_number = number
        self.response["status"] = "in_progress"
        if number == QUEUED_EVENTS:
            self._lifecycle("response.in_progress")
        return self._emitter.drain()

    def conclude(self, completed_at: int) -> None:
        """Fixes the document after the last turn: completed, or incomplete where the last turn was cut."""
        reason = INCOMPLETE_REASONS.get(self.finish_reason or "")
        if reason:
            self.response["incomplete_details"] = {"reason": reason}
        self.response["status"] = "incomplete" if reason else "completed"
        self.response["completed_at"] = None if reason else completed_at

    def fail(self, code: str, message: str) -> None:
        """Fixes the document of a run that cannot go on. Open items stay as they are, ``incomplete``, and get no done."""
        self._put_open()
        if self._open:
            self._open.item["status"] = "incomplete"
            self._open = None
        self._count_usage()
        self.response["status"] = "failed"
        self.response["completed_at"] = self.response["incomplete_details"] = None  # it may have been concluded before
        self.response["error"] = {"code": code, "message": message}

    def terminal(self) -> list[Event]:
        """The one event that ends the stream. Made again, as the document has changed, it has the same number."""
        number = self._emitter.next_number
        self._lifecycle(terminal_type(self.response))
        self._emitter.next_number = number
        return self._emitter.drain()

    def _lifecycle(self, event: str) -> None:
        self._emitter.emit(event, response=whole(self.response))

    # -- one turn -------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether what was fed so far is a clean end of the turn, should the stream stop here: a finish reason, or usage at
        the end (where every chunk has usage, it tells nothing)."""
        by_usage = self._usage_is_last and self._chunks_with_usage < self._chunks
        return not self._turn_is_over and (self.finish_reason is not None or by_usage)

    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        """Takes chunks of the turn. Raises ``UpstreamError`` for one that makes no sense; what the ones before it caused then
        comes with the next events."""
        if self._turn_is_over:
            self._begin_turn()
        for chunk in chunks:
            self._chunks += 1
            if isinstance(chunk, dict):
                self._feed_chunk(chunk)
                continue
            self._usage_is_last = False
            member, text = chunk
            part = self._open
            if part.__class__ is _OpenText and part.kind is self._direct.get(member):  # nearly every token
                part.pieces.append(text)
                self._emitter.delta(part.template, text)
            elif member == "content":
                self._content(text, None)
            else:
                self._text(self._reasoning, text)
        return self._emitter.drain()

    def _feed_chunk(self, chunk: Chunk) -> None:
        usage = chunk.get("usage")
        self._usage_is_last = bool(usage)
        if usage:
            if not isinstance(usage, dict):
                malformed("usage")
            self._chunks_with_usage += 1
            self._usage = usage  # cumulative where it comes often: the last one counts
        for choice in choices_of(chunk):
            if not choice.get("index"):  # n is 1; what else comes (watsonx) is not ours
                self._feed_choice(choice)

    def _feed_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if delta:
            if not isinstance(delta, dict):
                malformed("delta")
            # Servers of 2025 send both names with the same text.
            reasoning = delta.get("reasoning") or delta.get("reasoning_content")
            if reasoning:
                self._text(self._reasoning, reasoning)
            if delta.get("content"):
                self._content(delta["content"], choice.get("logprobs"))
            if delta.get("refusal"):
                self._text(REFUSAL, delta["refusal"])
            if delta.get("tool_calls"):
                self._calls(delta["tool_calls"])
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])

    def end_turn(self) -> list[Event]:
        """Closes what is open. ``calls`` and ``finish_reason`` stay until the next turn begins."""
        if self._turn_is_over:
            self._begin_turn()
        if self._splitter:
            for thinking, piece in self._splitter.flush():
                self._text(self._reasoning if thinking else OUTPUT_TEXT, piece)
        if not self._tool_calls.calls:
            self._white_space_at_end()
        self._close_rest(cut=self.finish_reason in INCOMPLETE_REASONS)
        self._count_usage()
        self._turn_is_over = True
        return self._emitter.drain()

    def _close_rest(self, *, cut: bool) -> None:
        """Closes the open item and shows what waited for that. Only the last item can be ``cut``."""
        for call in self._tool_calls.calls[self._shown :]:
            if cut and not self._is_over():
                break  # the open call is what was cut
            if not (call.name or call.find_name()):
                if cut:
                    break  # not even its name came through
                raise UpstreamError("The upstream's model called a function without naming it.")
            self._close("completed")
            self._show_call(call)
        if self._late and not (cut and not self._is_over()):
            self._close("completed")
            late, self._late = self._late, []
            for kind, text, logprobs in late:
                self._text(kind, text, logprobs)
        if self.finish_reason and len(self.response["output"]) == self._items_before:
            self._open_part(OUTPUT_TEXT)  # an answer of no tokens
        self._close("incomplete" if cut else "completed")

    def _white_space_at_end(self) -> None:
        """White space that nothing followed is the answer, in a turn without calls."""
        for kind, text, logprobs in self._held:
            if kind is OUTPUT_TEXT:
                self._show(kind, text, logprobs)

    def _count_usage(self) -> None:
        if self._usage:
            self.response["usage"] = usages.add(self.response["usage"], usages.from_chat(self._usage))
            self._usage = None

    # -- text -----------------------------------------------------------------------------------------------------

    def _content(self, content: Any, logprobs: Any) -> None:
        if isinstance(content, list):  # Mistral's own API
            content = text_of_parts(content)
            if not content:
                return
        if not self._splitter:
            self._text(OUTPUT_TEXT, content, logprobs)
            return
        if not isinstance(content, str):
            malformed("delta")
        for thinking, piece in self._splitter.feed(content):
            self._text(self._reasoning if thinking else OUTPUT_TEXT, piece)

    def _text(self, kind: TextKind, text: str, logprobs: Any = None) -> None:
        if not isinstance(text, str):
            malformed("delta")
        current = self._open
        if current.__class__ is _OpenText and current.kind is kind:
            self._delta(current, text, logprobs)
            return
        if self._late or not self._is_over():
            self._late.append((kind, text, logprobs))
            return
        if self._held and self._held[0][0] is not kind:
            self._held.clear()
        if text.isspace():
            self._held.append((kind, text, logprobs))
            return
        held, self._held = self._held, []
        for _, before, its_logprobs in held:
            self._show(kind, before, its_logprobs)
        self._show(kind, text, logprobs)

    def _show(self, kind: TextKind, text: str, logprobs: Any) -> None:
        if not (isinstance(self._open, _OpenText) and self._open.kind is kind):
            self._open_part(kind)
        assert isinstance(self._open, _OpenText)
        self._delta(self._open, text, logprobs)

    def _delta(self, part: _OpenText, text: str, logprobs: Any) -> None:
        part.pieces.append(text)
        if logprobs and self._options.logprobs and part.kind is OUTPUT_TEXT:
            tokens = logprobs_from_chat(logprobs)
            part.logprobs.extend(tokens)
            self._emitter.emit("response.output_text.delta", **part.place, delta=text, logprobs=tokens)
        else:
            self._emitter.delta(part.template, text)

    def _open_part(self, kind: TextKind) -> None:
        """A part of ``kind`` in the open item where that is of its type, else in a new one."""
        if isinstance(self._open, _OpenText) and self._open.kind.item == kind.item:
            item, output_index = self._open.item, self._open.place["output_index"]
            self._close_part()
        else:
            self._close("completed")
            item, output_index = self._add_item(kind.new_item(), kind.prefix)
        place = {"item_id": item["id"], "output_index": output_index, kind.index: len(item[kind.parts])}
        part = kind.new_part()
        item[kind.parts].append(part)
        self._emitter.emit(f"response.{kind.part_events}.added", **place, part=part)
        template = DeltaTemplate(f"response.{kind.events}.delta", place, kind.delta_extra)
        self._open = _OpenText(kind, item, place, template)

    def _put_open(self) -> None:
        """Writes what was streamed so far into the open item of the document."""
        if isinstance(self._open, _OpenCall):
            self._open.item["arguments"] = self._open.call.arguments
        elif self._open:
            part = self._open.item[self._open.kind.parts][-1]
            part[self._open.kind.text] = "".join(self._open.pieces)
            if "logprobs" in part:
                part["logprobs"] = self._open.logprobs

    def _close_part(self) -> None:
        assert isinstance(self._open, _OpenText)
        self._put_open()
        kind, place = self._open.kind, self._open.place
        part = self._open.item[kind.parts][-1]
        text = {key: part[key] for key in (kind.text, "logprobs") if key in part}
        self._emitter.emit(f"response.{kind.events}.done", **place, **text)
        self._emitter.emit(f"response.{kind.part_events}.done", **place, part=part)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _calls(self, fragments: Any) -> None:
        self._held.clear()
        grown = self._tool_calls.feed(fragments)
        if isinstance(self._open, _OpenCall) and self._open.call in grown:
            self._arguments(self._open)
        calls = self._tool_calls.calls
        while self._shown < len(calls) and calls[self._shown].name and self._is_over():
            self._close("completed")
            self._show_call(calls[self._shown])

    def _is_over(self) -> bool:
        """Whether nothing more can come for the open item: calls that an upstream interleaves wait for that."""
        return not isinstance(self._open, _OpenCall) or self._open.call.is_whole()

    def _show_call(self, call: ToolCall) -> None:
        self._shown += 1
        if self._options.allowed is not None and call.name not in self._options.allowed:
            return  # allowed_tools is a hard limit
        if self._options.single_call and self._called:
            return  # parallel_tool_calls is false
        self._called = True
        call_id = self._call_id(call.id)
        item = {"type": "function_call", "status": "in_progress", "call_id": call_id, "name": call.name, "arguments": ""}
        item, output_index = self._add_item(item, "fc")
        place = {"item_id": item["id"], "output_index": output_index}
        template = DeltaTemplate("response.function_call_arguments.delta", place)
        self._open = _OpenCall(call, item, place, template)
        self._arguments(self._open)

    def _call_id(self, given: str | None) -> str:
        """The upstream's id, unless it is missing, already used in the chain (TGI calls every call "0"), or longer than what
        a caller may send back."""
        usable = given and given not in self._call_ids and len(given) <= CALL_ID_LENGTH
        call_id = given if given and usable else self._ids.item("call")
        self._call_ids.add(call_id)
        return call_id

    def _arguments(self, current: _OpenCall) -> None:
        for piece in current.call.take():
            self._emitter.delta(current.template, piece)

    def _close_call(self, current: _OpenCall, status: str) -> None:
        if not current.call.arguments:
            current.call.extend({"function": {"arguments": "{}"}})
            self._arguments(current)
        self._put_open()
        item = current.item
        self._emitter.emit(
            "response.function_call_arguments.done", **current.place, name=item["name"], arguments=item["arguments"]
        )
        if status == "completed":
            self.calls.append(item)

    # -- items ----------------------------------------------------------------------------------------------------

    def _add_item(self, item: Item, prefix: str) -> tuple[Item, int]:
        """The only place that mints an item's id and its ``output_index``."""
        output = self.response["output"]
        item = {"id": self._ids.item(prefix), **item}
        output.append(item)
        self._emitter.emit("response.output_item.added", output_index=len(output) - 1, item=item)
        return item, len(output) - 1

    def _close(self, status: str) -> None:
        current = self._open
        if current is None:
            return
        if isinstance(current, _OpenText):
            self._close_part()
            if self._options.seal and current.kind.item == "reasoning":
                current.item["encrypted_content"] = self._options.seal(text_of(current.item))
        else:
            self._close_call(current, status)
        self._open = None
        current.item["status"] = status
        self._emitter.emit("response.output_item.done", output_index=current.place["output_index"], item=current.item)
