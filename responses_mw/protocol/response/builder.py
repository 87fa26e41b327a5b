"""The base class for response builders: the first and last events, and items that arrive whole.

`Assembler` builds the output from chat chunks, `ResponsesPassthrough` from the events of an upstream's own Responses API.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..chat.chunks import Text, ToolCall
from ..request.items import ID_PREFIXES
from ..tool_kinds.form import OfferedFunction
from ..types import Chunk, Document, Item
from .citations import Source
from .document import add_usage, whole
from .events import ADDED, DONE, Emitter, Event, NullEmitter, terminal_type
from .seam import Phase
from .takeover import Takeover


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of the request that affect its events. ``allowed`` and ``single_call`` enforce what an upstream may ignore."""

    summary: bool = False
    open_reasoning: bool = False
    """Whether reasoning events have the names of the Open Responses specification instead of OpenAI's."""
    logprobs: bool = False
    think_tag: str | None = None
    allowed: frozenset[str] | None = None
    single_call: bool = False
    max_calls: int | None = None
    """Maximum number of calls that the server executes."""
    include: frozenset[str] = frozenset()
    used_call_ids: frozenset[str] = frozenset()
    seal: Callable[[str], str] | None = None
    """Makes the ``encrypted_content`` of a reasoning item from its text. None if it is not requested."""


DEFAULTS = ResponseOptions()


QUEUED_EVENTS = 2
"""Number of events of a queued run before it starts: created and queued."""


class IdSource(Protocol):
    """A source of ids (``responses_mw.ids.RunIds``). The protocol itself makes no random numbers."""

    def item(self, prefix: str) -> str: ...


class ResponseBuilder(ABC):
    """A response being built. Methods return the events they cause, in order.

    `feed` and `end_turn` build the output, turn by turn. The members about calls keep their defaults if the upstream runs
    the tools itself.
    """

    finish_reason: str | None = None
    asked: Sequence[ToolCall] = ()
    """The calls of the last turn that the server executes."""
    has_client_calls: bool = False
    """Whether the last turn has calls that the client executes."""
    sources: Sequence[Source] = ()
    """The sources that the answer may cite."""
    turn_begins_at: int = 0
    """Number of items before those of the turn."""

    def __init__(self, document: Document, ids: IdSource, options: ResponseOptions) -> None:
        """`document` is the response as created (`document.create`); `response` is its current state."""
        self.response = document
        self._ids = ids
        self._options = options
        self._emitter: Emitter = Emitter()

    # -- beginning and end ----------------------------------------------------------------------------------------

    def discard_events(self) -> None:
        """Emit only the events that hold the document. Call this before the first event."""
        self._emitter = NullEmitter()

    def start(self, *, queued: bool = False) -> list[Event]:
        """Emit ``response.created``, then ``queued`` (the run waits for a worker) or ``in_progress``."""
        self.response["status"] = "queued" if queued else "in_progress"
        self._lifecycle("response.created", "response.queued" if queued else "response.in_progress")
        return self._emitter.drain()

    def resume(self, number: int) -> list[Event]:
        """Start a queued run whose next event has this ``number``.

        Emit ``response.in_progress``, unless another worker already did.
        """
        self._emitter.next_number = number
        self.response["status"] = "in_progress"
        if number == QUEUED_EVENTS:
            self._lifecycle("response.in_progress")
        return self._emitter.drain()

    def take_over(self, takeover: Takeover, number: int) -> list[Event]:
        """Continue the output of another worker. The next event has this ``number``.

        Text stays open; any other open item is closed as ``incomplete``.
        """
        raise NotImplementedError

    def terminal(self) -> list[Event]:
        """Emit the event that ends the stream. Called again after the document has changed, it uses the same number."""
        number = self._emitter.next_number
        self._lifecycle(terminal_type(self.response))
        self._emitter.next_number = number
        return self._emitter.drain()

    def _lifecycle(self, *events: str) -> None:
        """Emit events that hold the document as it is now."""
        self._emitter.emit(*events, response=whole(self.response, self._options.include))

    def conclude(self, completed_at: int) -> None:
        """Complete the document after the last turn."""
        self.response["status"] = "completed"
        self.response["completed_at"] = completed_at

    def fail(self, code: str, message: str) -> None:
        """Mark the document as failed, even if it was concluded before."""
        self.response["status"] = "failed"
        self.response["completed_at"] = self.response["incomplete_details"] = None
        self.response["error"] = {"code": code, "message": message}

    # -- turns ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the turn fed so far is complete, even if the upstream's stream ends here."""

    @abstractmethod
    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        """Take what the upstream sent. Raises `UpstreamError` if it is malformed."""

    @abstractmethod
    def end_turn(self) -> list[Event]:
        """Finish the turn, up to the first call that the server executes."""

    @property
    def phase(self) -> Phase:
        """What the client has seen of the turn. The default says that the turn cannot be continued."""
        return Phase.FIXED

    def break_off(self) -> list[Event]:
        """Prepare for another answer to the turn. Text stays open; any other open item is closed as ``incomplete``."""
        raise NotImplementedError

    def join(self, text: str, *, is_trimmed: bool, usage: dict[str, Any] | None) -> None:
        """Expect an answer that continues `text`, the message so far.

        If `is_trimmed`, the upstream does not see the white space at its end. `usage` is the chat usage of the answer so far;
        None if it is not known.
        """
        raise NotImplementedError

    @abstractmethod
    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        """Set the functions that the model may call. `choice` is the request's `tool_choice`."""

    @property
    def has_left_out(self) -> bool:
        """Whether the last turn had more calls than `max_tool_calls` allows."""
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether `max_tool_calls` allows no further call."""
        return False

    @property
    def awaited(self) -> Item:
        """The item of the call whose result `settle` takes next."""
        raise NotImplementedError

    def settle(self, members: Mapping[str, Any], *, failed: bool = False) -> list[Event]:
        """Add the result of the next of the `asked` calls to its item."""
        raise NotImplementedError

    # -- items ----------------------------------------------------------------------------------------------------

    def list_tools(self, listings: Iterable[Item]) -> list[Event]:
        """Add the tools of MCP servers as items before the first turn, given the ``server_label`` and ``tools`` of each."""
        for listing in listings:
            added = {"type": "mcp_list_tools", "server_label": listing["server_label"], "tools": []}
            item, output_index = self._add_item(added)
            place = {"item_id": item["id"], "output_index": output_index}
            self._emitter.emit("response.mcp_list_tools.in_progress", **place)
            item |= listing
            self._emitter.emit("response.mcp_list_tools.completed", **place)
            self._emitter.emit(DONE, output_index=output_index, item=item)
        return self._emitter.drain()

    def add_whole(self, item: Item, usage: dict[str, Any] | None) -> list[Event]:
        """Add a complete item. ``usage`` counts the tokens used to make it."""
        item, output_index = self._add_item(item)
        self._emitter.emit(DONE, output_index=output_index, item=item)
        if usage:
            self.response["usage"] = add_usage(self.response["usage"], usage)
        return self._emitter.drain()

    def _add_item(self, item: Item) -> tuple[Item, int]:
        """Add an item. The only place that assigns an item's id and ``output_index``."""
        output = self.response["output"]
        item = {"id": self._ids.item(ID_PREFIXES[item["type"]]), **item}
        output.append(item)
        self._emitter.emit(ADDED, output_index=len(output) - 1, item=item)
        return item, len(output) - 1
