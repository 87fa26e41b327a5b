"""Build a response from the events of an upstream that has its own Responses API.

- This module assigns ids, indices and sequence numbers. It emits the first two events itself, and sets the document's members
  that are listed in `_OURS`. Unknown events and members are forwarded. Only the ids in them are replaced, and secrets removed.
- An item gets its new id and its index with its `added` event, and keeps them, although vLLM sends other ids in `done` and in
  the document. The document's output consists of the items that were streamed.
- Missing members and events are filled in from the item. What the client has received of an item wins over an end that
  contradicts it (`streamed`).
- llama.cpp sends no indices, and completes its items only at the end of the answer. If an item is added without an index, all
  open items are therefore completed first. Later events for the text, the parts or the end of a completed item are dropped, and
  so are those for an unknown item.
- The answer is complete only after a terminal event with a response. `[DONE]` or a closed connection is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ...errors import TooLarge, UpstreamBrokeOff, UpstreamError
from ...ids import RunIds
from ...redaction import redacted_values
from .. import json_limits
from ..chat.chunks import Text, malformed
from ..request.create import INCLUDABLE
from ..tool_kinds.form import OfferedFunction
from ..types import Chunk, Document, Event, Item, Tool
from .answer import INCOMPLETE, UpstreamAnswer
from .builder import ResponseBuilder, ResponseOptions
from .document import add_usage, usage_of_responses
from .events import (
    ADDED,
    CALL_TEXTS,
    DONE,
    OPEN_REASONING_TEXT,
    OUTPUT_TEXT,
    PARTS,
    REASONING_TEXT,
    TARGETS,
    TERMINAL,
    TEXTS,
    EventTarget,
    emit_item,
    emit_parts,
    ending,
    summarized,
    with_summary,
)
from .redacted import redacted_event, redacted_item, redacted_members, redacted_usage
from .replay import OutputReplay
from .streamed import reconcile, reconcile_part, text_member
from .text import hide_logprobs
from .upstream_items import UpstreamItems

# Members of the document that are not copied unchanged from the upstream's response.
_OURS = frozenset(
    {"background", "completed_at", "conversation", "created_at", "id", "metadata", "model", "object", "output", "output_text"}
    | {"previous_response_id", "store"}
    | {"error", "incomplete_details", "status", "tools", "usage"}  # checked before they are copied
)
_ENDS = frozenset({"completed", "incomplete", "failed"})
_TYPE = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_MAX_DEPTH = 128
_OPEN_NAMES = {f"{REASONING_TEXT.stem}.{step}": f"{OPEN_REASONING_TEXT.stem}.{step}" for step in ("delta", "done")}


class ResponsesPassthrough(ResponseBuilder):
    """Builds a response from the events of the upstream's response. The run has a single turn.

    For the *place* of an item, see `UpstreamItems`.
    """

    def __init__(
        self, document: Document, ids: RunIds, echo: Callable[[Iterable[Tool]], list[Tool]], options: ResponseOptions
    ) -> None:
        """`echo` removes secrets from the tools in the response. `options.include` is ignored, as the upstream applies it."""
        super().__init__(document, ids, replace(options, include=INCLUDABLE))
        self._names = _OPEN_NAMES if options.open_reasoning else {}
        self._echo = echo
        self.answer = UpstreamAnswer()
        self._output = OutputReplay(document["output"])
        self._items = UpstreamItems(self._output, ids)
        self._ending: Document | None = None
        self._status = ""

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        for event in chunks:
            assert isinstance(event, dict)
            if self._ending is None:
                self._take(event)
        return self._emitter.drain()

    def add_whole(self, item: Item, usage: dict[str, Any] | None = None) -> list[Event]:
        events = super().add_whole(item, usage)
        self._items.first = len(self._output.items)
        return events

    def text_size(self) -> int:
        return self._output.text_size()

    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        """Do nothing, because the upstream itself offers the functions of the request."""

    def end_turn(self) -> list[Event]:
        if self._ending is None:
            raise UpstreamBrokeOff(INCOMPLETE)
        return self._emitter.drain()

    def conclude(self, completed_at: int) -> None:
        ending = self._ending
        if ending is None:  # no request was sent to the upstream
            super().conclude(completed_at)
            return
        self.response |= self._items.renamed(redacted_members(ending, ending.keys() - _OURS, self.response))
        tools = ending.get("tools")
        if isinstance(tools, list) and all(isinstance(tool, dict) and isinstance(tool.get("type"), str) for tool in tools):
            echoed = self._echo(tools)
            self.response["tools"] = echoed if echoed == self.response["tools"] else redacted_values(echoed)
        if self._status == "failed":
            self.fail(*_error(ending))
            return
        details = ending.get("incomplete_details")
        shown = redacted_values(details) if isinstance(details, dict) else None
        self.response.update(status=self._status, incomplete_details=shown)
        done_at = max(completed_at, self.response["created_at"])
        self.response["completed_at"] = done_at if self._status == "completed" else None

    def fail(self, code: str, message: str) -> None:
        self._output.cut()
        super().fail(code, message)

    # -- one event --------------------------------------------------------------------------------------------------

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
            malformed("type")
        try:
            json_limits.depth(event, _MAX_DEPTH)
        except TooLarge:
            raise UpstreamError(f"The upstream sent an event nested deeper than {_MAX_DEPTH} levels.") from None
        self._HANDLERS.get(kind, ResponsesPassthrough._pass)(self, with_summary(event) if self._options.summary else event)

    def _pass(self, event: dict[str, Any]) -> None:
        stem, _, step = event["type"].rpartition(".")
        target = TARGETS.get(stem)
        place = self._items.find(event, target.item if target else None)
        if target and place not in self._output.open:
            return
        if target is None:
            event = redacted_values(event)
        elif step != "delta":
            event = redacted_event(event)
        event = self._items.renamed(event)
        if place is not None:
            event["output_index"] = place
            if "item_id" in event or target:
                event["item_id"] = self._output.items[place]["id"]
            if target:
                self._fill_in(event, place, target, step)
            self._output.take(event)
        self._emit(event)

    def _fill_in(self, event: dict[str, Any], place: int, target: EventTarget, step: str) -> None:
        """Add a missing part index and `logprobs` to an event of an open item, and emit missing events that precede it."""
        if target.holder:
            self._set_index(event, place, target, step)
        if target is OUTPUT_TEXT and step in ("delta", "done"):
            event.setdefault("logprobs", [])
        if step == "done" and target.stem == PARTS.get(target.holder):  # the text of the part ends first
            self._show_rest_of_part(event.get("part"), target.holder, place, event[target.index])
            texts = [text.stem for text in TEXTS.values() if text.holder == target.holder]
            self._end_parts(place, [(stem, event[target.index]) for stem in texts])
            if event[target.index] < len(parts := self._output.put(place).get(target.holder) or []):
                event["part"] = reconcile_part(parts[event[target.index]], event.get("part"))
        elif step == "done" and target.member:
            where = {name: value for name, value in event.items() if name not in (target.member, "name")}
            holder = self._show_rest(event.get(target.member), target, where)
            if isinstance(holder, dict):
                names = {target.member} | ({"name"} & event.keys())
                event |= {name: holder[name] for name in names if holder.get(name)}

    def _set_index(self, event: dict[str, Any], place: int, target: EventTarget, step: str) -> None:
        """Set the index of the event's part. Without a valid index, the event belongs to the last part."""
        item, holder = self._output.items[place], target.holder
        parts, index = item.get(holder), event.get(target.index)
        count = len(parts) if isinstance(parts, list) else 0
        if step == "added" and target.stem == PARTS[holder]:
            index = count
            if isinstance(part := event.get("part"), dict) and part.get("type") == OUTPUT_TEXT.part:
                event["part"] = {**part, "annotations": part.get("annotations", []), "logprobs": part.get("logprobs", [])}
        elif type(index) is not int or not 0 <= index <= count:
            index = max(count - 1, 0)
        event[target.index] = index
        if step != "added" and index == count and target.part:  # the upstream does not announce the part (vLLM, llama.cpp)
            where = {"item_id": item["id"], "output_index": place, target.index: index}
            self._emit_item({"type": f"{PARTS[holder]}.added", **where, "part": target.new_part()})

    def _show_rest(self, text: Any, target: EventTarget, where: dict[str, Any]) -> Any:
        """Emit the end of `text` that its deltas lack, unless they contradict it. Return the holder of the streamed text."""
        place = where["output_index"]
        item = self._output.put(place)
        holder = item[target.holder][where[target.index]] if target.holder else item
        index = where[target.index] if target.holder else 0
        is_over = self._output.open[place].get((target.stem, index)) is False
        if isinstance(text, str) and isinstance(holder, dict) and not is_over:
            shown = holder.get(target.member) or ""
            if isinstance(shown, str) and text.startswith(shown) and text != shown:
                self._emit_item({**where, "type": f"{target.stem}.delta", "delta": text[len(shown) :]})
                self._output.put(place)
        return holder

    def _show_rest_of_part(self, part: Any, holder: str, place: int, index: int) -> None:
        """Emit the end of the text of a finished part that its deltas lack."""
        streamed = self._output.put(place).get(holder)
        begun = streamed[index] if isinstance(streamed, list) and index < len(streamed) else None
        if not (
            isinstance(part, dict) and isinstance(begun, dict) and part.get("type") == begun.get("type") and text_member(begun)
        ):
            return
        target = TEXTS[begun["type"]]
        where = {"item_id": self._output.items[place]["id"], "output_index": place, target.index: index}
        self._show_rest(part.get(target.member), target, where | ({"logprobs": []} if target is OUTPUT_TEXT else {}))

    def _end_parts(self, place: int, some: Iterable[tuple[str, int]]) -> None:
        """Emit the missing `done` events for `some` parts and texts of the item at `place`, if they are open."""
        begun = self._output.open[place]
        for stem, index in [one for one in some if begun.get(one)]:
            item, target = self._output.put(place), TARGETS[stem]
            where = {"item_id": item["id"], "output_index": place} | ({target.index: index} if target.holder else {})
            ended = item[target.holder][index] if target.holder else item
            if isinstance(ended, dict):
                self._emit_item({"type": f"{stem}.done", **where, **ending(ended, target)})

    def _begin(self, event: dict[str, Any]) -> None:
        # The event is not forwarded, because `start` has emitted it with this server's id.
        response = event.get("response")
        if isinstance(response, dict) and isinstance(response.get("id"), str):
            self._items.replace_id(response["id"], self.response["id"])

    def _pass_open(self, event: dict[str, Any]) -> None:
        self._take({**event, "type": REASONING_TEXT.stem + event["type"].removeprefix(OPEN_REASONING_TEXT.stem)})

    def _add(self, event: dict[str, Any]) -> None:
        index = event.get("output_index")
        if not isinstance(index, int):
            self._finish_all("completed")
        item = self._items.register(self._item(event.get("item")), index)
        self._emit_item({**redacted_event(event), "item": item, "output_index": len(self._output.items)})

    def _done(self, event: dict[str, Any]) -> None:
        item = self._item(event.get("item"))
        place = self._items.find(event, item["type"], item.get("id"), item.get("call_id"))
        if place is None:
            self._add_whole(item, event.get("output_index"))
        elif place in self._output.open:
            self._finish(place, item, event)

    def _end(self, event: dict[str, Any]) -> None:
        self._begin(event)
        response = event.get("response")
        if not isinstance(response, dict):
            malformed("response")
        used = usage_of_responses(response.get("usage"))
        if used is not None:
            self.response["usage"] = add_usage(self.response["usage"], redacted_usage(used))
        listed = [] if response.get("output") is None else response["output"]
        if not isinstance(listed, list):
            malformed("output")
        # The document's status takes precedence, because vLLM sends response.completed for an incomplete response.
        status = response.get("status") or event["type"].removeprefix("response.")
        self._ending, self._status = response, str(status) if str(status) in _ENDS else "failed"
        items = list(map(self._item, listed))
        hide_logprobs(items)
        for index, item in enumerate(items):
            place = self._items.place_at(index)
            if place >= len(self._output.items):
                self._add_whole(item, index)
            elif place in self._output.open and self._status != "failed":
                self._finish(place, item)
        if self._status != "failed":
            self._finish_all(self._status)

    def _finish_all(self, status: str) -> None:
        """Finish the items that the upstream left open, with their text so far."""
        for place in sorted(self._output.open):
            item = self._output.put(place)
            self._finish(place, {**item, "status": status} if "status" in item else item)

    _HANDLERS: ClassVar[dict[str, Callable[[ResponsesPassthrough, dict[str, Any]], None]]] = {
        "keepalive": lambda builder, event: None,  # this server sends its own keep-alives to the client
        **dict.fromkeys(("response.created", "response.queued", "response.in_progress"), _begin),
        **dict.fromkeys(TERMINAL, _end),
        **dict.fromkeys(_OPEN_NAMES.values(), _pass_open),
        ADDED: _add,
        DONE: _done,
    }

    # -- items ------------------------------------------------------------------------------------------------------

    def _item(self, value: Any) -> Item:
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            malformed("item")
        parts = value.get("content") or [] if value["type"] == "message" else []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            malformed("content")
        item = redacted_item(value)
        return summarized(item) if self._options.summary else item

    def _add_whole(self, item: Item, index: Any) -> None:
        place = len(self._output.items)
        item = self._items.register(item, index)
        self._seal(item)
        self._output.items.append(item)
        emit_item(self._emitter, place, item, open_reasoning=self._options.open_reasoning)

    def _finish(self, place: int, item: Item, event: dict[str, Any] | None = None) -> None:
        ours = self._output.items[place]["id"]
        item = self._items.with_id(item, ours)
        streamed = self._output.put(place)
        if (call := CALL_TEXTS.get(item["type"])) and item["type"] == streamed["type"]:
            self._show_rest(item.get(call.member), call, {"item_id": ours, "output_index": place})
        for name in PARTS:
            for index, part in enumerate(item[name] if isinstance(item.get(name), list) else ()):
                self._show_rest_of_part(part, name, place, index)
        self._end_parts(place, list(self._output.open[place]))
        item = reconcile(self._output.put(place), item)
        self._seal(item)
        if not any(streamed.get(name) for name in PARTS):
            emit_parts(self._emitter, place, item, open_reasoning=self._options.open_reasoning)
        self._emit_item({**redacted_event(event or {"type": DONE}), "output_index": place, "item": item})

    def _emit_item(self, event: dict[str, Any]) -> None:
        self._output.take(event)  # an event that cannot be applied is not emitted
        self._emit(event)

    def _emit(self, event: dict[str, Any]) -> None:
        members = {name: value for name, value in event.items() if name not in ("type", "sequence_number")}
        self._emitter.emit(self._names.get(event["type"], event["type"]), **members)


def _error(ending: Document) -> tuple[str, str]:
    error = ending.get("error")
    given = error if isinstance(error, dict) else {}
    code, message = given.get("code"), given.get("message")
    return (
        code if isinstance(code, str) else "server_error",
        message if isinstance(message, str) and message else "The upstream aborted its answer.",
    )
