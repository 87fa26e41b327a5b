"""The base class of the builders that produce a response, and their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UpstreamBrokeOff
from ...ids import RunIds
from ...redaction import redacted
from ..chat.chunks import Text
from ..chat.deltas import Dropped
from ..citations import Sources
from ..parts import reasoning_text
from ..request.items import ID_PREFIXES
from ..tool_kinds.form import OfferedFunction
from ..types import Chunk, Document, Event, Item
from .answer import INCOMPLETE, UpstreamAnswer
from .document import add_usage, whole
from .events import ADDED, Emitter, NullEmitter, emit_done, emit_item, terminal_type
from .replay import Phase, Takeover
from .seam import Seam


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of a request that affect the events of its response."""

    summary: bool = False  # whether reasoning is shown as a summary
    open_reasoning: bool = False
    """Whether reasoning events have the names of the Open Responses specification instead of OpenAI's."""
    logprobs: bool = False
    think_tag: str | None = None  # name of the tag around reasoning in the content, or None to leave the content as it is
    single_call: bool = False
    """Whether all calls of a turn but the first are left out, because upstreams may ignore `parallel_tool_calls`."""
    max_calls: int | None = None  # maximum number of calls that the server executes, or None for no limit
    include: frozenset[str] = frozenset()
    used_call_ids: frozenset[str] = frozenset()
    seal: Callable[[str], str] | None = None
    """Encrypts the text of a reasoning item as its `encrypted_content`. None if the request does not ask for encryption."""
    seal_origins: Callable[[str], str] | None = None
    """Encrypts copies of what items keep of the upstream's messages (`protocol/origin.py`). None as for `seal`."""


class ResponseBuilder(ABC):
    """Builds a response from the answers of the upstream. Methods return the events that they emit, in order.

    `ResponsesPassthrough` does not override the members for calls and interruptions, because the upstream runs the tools.
    """

    answer: UpstreamAnswer  # the last answer
    is_draft: bool = False  # whether the turn is requested without the format of the answer. Its text is not shown
    sources: Sources | None = None  # the sources that the answer may cite. None if there are no searches
    turn_begins_at: int = 0  # number of items before the current turn
    unknown_finish_reason: str | None = None  # the last finish reason whose meaning is unknown

    def __init__(self, document: Document, ids: RunIds, options: ResponseOptions) -> None:
        """`document` is the newly created response. It is updated in place, and available as `response`."""
        self.response = document
        self.dropped = Dropped()
        """The members of the upstream's messages that the response lacks."""
        self._ids = ids
        self._options = options
        self._emitter: Emitter = Emitter()

    # Beginning and end

    def discard_events(self) -> None:
        """Discard all events but the terminal one. Call this before the first event."""
        self._emitter = NullEmitter()

    def start(self, *, queued: bool = False) -> list[Event]:
        """Emit `response.created` and `response.in_progress`. If `queued`, the second event is `response.queued` instead."""
        self.response["status"] = "queued" if queued else "in_progress"
        self._lifecycle("response.created", "response.queued" if queued else "response.in_progress")
        return self._emitter.drain()

    def resume(self, number: int) -> list[Event]:
        """Start a queued run. `number` is the sequence number of its next event.

        Emits `response.in_progress` if no other worker has emitted it.
        """
        self._emitter.next_number = number
        self.response["status"] = "in_progress"
        if number == 2:  # after created and queued; otherwise, another worker has already emitted the event
            self._lifecycle("response.in_progress")
        return self._emitter.drain()

    def follow(self, other: ResponseBuilder) -> None:
        """Continue the events of `other`, which has no output."""
        self._emitter = other._emitter

    def take_over(self, takeover: Takeover, number: int) -> list[Event]:
        """Continue the output of another worker. `number` is the sequence number of the next event.

        As in `break_off`, an open output text stays open, and any other open item is closed as `incomplete`.
        """
        raise NotImplementedError

    def conclude(self, completed_at: int) -> None:
        """Set the final status of the document after the last turn. `completed_at` is in seconds since the epoch.

        If the clock was set back meanwhile, the response is completed when it was created.
        """
        self.response.update(status="completed", completed_at=max(completed_at, self.response["created_at"]))

    def fail(self, code: str, message: str) -> None:
        """Mark the document as failed, even after `conclude`."""
        error = {"code": redacted(code), "message": redacted(message)}
        self.response.update(status="failed", completed_at=None, incomplete_details=None, error=error)

    def update_document(self) -> None:  # noqa: B027 (the document of a passthrough is always up to date)
        """Write the open item's text so far to the document."""

    def terminal(self) -> list[Event]:
        """Emit the terminal event. If the document changes afterwards, call this again. The new event has the same number."""
        number = self._emitter.next_number
        self._lifecycle(terminal_type(self.response))
        self._emitter.next_number = number
        return self._emitter.drain()

    def _lifecycle(self, *events: str) -> None:
        if self._emitter.keeps(events[-1]):
            self._emitter.emit(*events, response=whole(self.response, self._options.include))

    # Turns

    @abstractmethod
    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        """Set the functions that the model may call. `choice` is the request's `tool_choice`."""

    @abstractmethod
    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        """Process chunks or events of the upstream's answer. Begin a turn if none is in progress.

        Raises `UpstreamError` if the answer is malformed, exceeds a limit (such as the number of calls), or does not continue
        the interrupted text. Events emitted before the error are not lost: the next method that returns events also returns
        them.
        """

    def delta(self, text: Text) -> bytes | None:
        """Process `text` if it continues the open text. Return the server-sent event that `feed` would have returned.

        Return None without processing `text` if it does not. Pass it to `feed` then.
        """
        return None

    @abstractmethod
    def end_turn(self) -> list[Event]:
        """Complete the turn. Emit its remaining items, up to the first call that the server executes.

        `settle` adds the result of that call, and emits the items that follow, up to the next such call.

        Raises `UpstreamError` if the answer does not continue the interrupted text, or if a call in a complete answer has no
        name. `ResponsesPassthrough` raises `UpstreamBrokeOff` if the answer is incomplete.
        """

    def end_without_calls(self) -> list[Event]:
        """End the run after a turn whose calls were all omitted. If the turn has no items, emit a message that reports this."""
        return []

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the turn would be complete if the upstream ended its stream now, without saying that it is over."""

    @property
    def has_known_end(self) -> bool:
        """Whether the reason why the last answer ended is known to mean that the answer is complete."""
        return True

    def check_end(self, *, done: bool) -> None:
        """Check the turn at the end of the stream. `done` is whether the upstream has said that the answer is over.

        Raises `UpstreamBrokeOff` if the answer is incomplete or was aborted, and `UpstreamError` if there is no answer.
        """
        if not (done or self.ended):
            raise UpstreamBrokeOff(INCOMPLETE)

    @abstractmethod
    def text_size(self) -> int:
        """Return the number of characters that the model has written in the last turn: texts, reasoning and arguments."""

    @property
    def phase(self) -> Phase:
        """What the client has seen of the turn. Builders that do not override this property cannot continue a turn."""
        return Phase.FIXED

    def break_off(self) -> list[Event]:
        """Prepare for another answer to the interrupted turn.

        An open output text stays open, so that it can be continued. Any other open item is closed as `incomplete`.
        """
        raise NotImplementedError

    def expect(self, seam: Seam) -> None:
        """Prepare for an answer that continues a message of the request in a new item."""
        raise NotImplementedError

    def join(self, seam: Seam, usage: dict[str, Any] | None) -> None:
        """Prepare for an answer that continues the interrupted message.

        `usage` is the usage of the turn so far, as in a chat completion, or None if the tokens cannot be counted.
        """
        raise NotImplementedError

    @property
    def uncounted(self) -> str | None:
        """The text whose tokens must be passed to `count_held` before the turn ends, or None."""
        return None

    def count_held(self, tokens: int) -> None:
        """Set the number of tokens of `uncounted`."""
        raise NotImplementedError

    @property
    def is_exhausted(self) -> bool:
        """Whether `max_tool_calls` allows no further call that the server executes."""
        return False

    @property
    def awaited(self) -> Item:
        """The item of the call whose result must be passed to `settle` next."""
        raise NotImplementedError

    def settle(self, members: Mapping[str, Any], *, failed: bool = False) -> list[Event]:
        """Add the result of the next call in `answer.asked`. `members` are the members of the call's item that hold the result.

        `failed` is whether the call failed. Also emit the items that follow, up to the next call that the server executes.
        """
        raise NotImplementedError

    # Items that arrive whole

    def list_tools(self, listings: Iterable[Item]) -> list[Event]:
        """Add an `mcp_list_tools` item for each listing, which contains the `server_label` and `tools` of one MCP server."""
        for listing in listings:
            added = {"type": "mcp_list_tools", "server_label": listing["server_label"], "tools": []}
            item, output_index = self._add_item(added)
            place = {"item_id": item["id"], "output_index": output_index}
            self._emitter.emit("response.mcp_list_tools.in_progress", **place)
            item |= listing
            self._emitter.emit("response.mcp_list_tools.completed", **place)
            emit_done(self._emitter, item, output_index)
        return self._emitter.drain()

    def add_whole(self, item: Item, usage: dict[str, Any] | None = None) -> list[Event]:
        """Add a complete item. `usage` counts the tokens used to make it, if any, and is added to the response's usage."""
        item, output_index = self._append(item)
        self._seal(item)
        emit_item(self._emitter, output_index, item, open_reasoning=self._options.open_reasoning)
        if usage:
            self.response["usage"] = add_usage(self.response["usage"], usage)
        return self._emitter.drain()

    def _add_item(self, item: Item) -> tuple[Item, int]:
        item, output_index = self._append(item)
        self._emitter.emit(ADDED, output_index=output_index, item=item)
        return item, output_index

    def _seal(self, item: Item) -> None:
        """Add the encrypted text to a reasoning item if the request asks for it. Text encrypted by the upstream is kept."""
        seal = self._options.seal
        if seal and item["type"] == "reasoning" and not item.get("encrypted_content") and (text := reasoning_text(item)):
            item["encrypted_content"] = seal(text)

    def _append(self, item: Item) -> tuple[Item, int]:
        """Add a copy of `item` to the output, with a new id unless it has one. Return the copy and its index."""
        output = self.response["output"]
        item = {"id": self._ids.item(ID_PREFIXES[item["type"]]), **item}
        output.append(item)
        return item, len(output) - 1
