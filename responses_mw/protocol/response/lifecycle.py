"""What of a request shapes the events of its response.

What the events of a response have in common, whoever makes its output: how they begin and end, and items that come whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ..types import Document, Item
from . import usage as usages
from .document import whole
from .events import Emitter, Event, NullEmitter, terminal_type


@dataclass(frozen=True, slots=True)
class Options:
    """What of the request shapes the events. ``allowed`` and ``single_call`` enforce what an upstream may ignore."""

    summary: bool = False
    open_reasoning: bool = False
    """Whether the events of reasoning have the names of the Open Responses specification, not OpenAI's."""
    logprobs: bool = False
    think_tag: str | None = None
    allowed: frozenset[str] | None = None
    single_call: bool = False
    most_calls: int | None = None
    """How many calls are carried out here, at most."""
    include: frozenset[str] = frozenset()
    used_call_ids: frozenset[str] = frozenset()
    seal: Callable[[str], str] | None = None
    """Makes a reasoning item's ``encrypted_content`` out of its text, where that was asked for."""


DEFAULTS = Options()


QUEUED_EVENTS = 2
"""A queued run has begun with so many events: created and queued."""


class Ids(Protocol):
    """Where ids come from (``responses_mw.ids.RunIds``): ``protocol`` draws no random numbers itself."""

    def item(self, prefix: str) -> str: ...


class Lifecycle:
    """One response in the making. Methods return the events that they cause, in order."""

    def __init__(self, document: Document, ids: Ids, options: Options) -> None:
        """``document`` is the response as created (``document.create``); it is kept up to date as ``response``."""
        self.response = document
        self._ids = ids
        self._options = options
        self._emitter: Emitter = Emitter()

    # -- beginning and end ----------------------------------------------------------------------------------------

    def discard_events(self) -> None:
        """Of its events only the documents will be read. To be called before the first of them."""
        self._emitter = NullEmitter()

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

    def terminal(self) -> list[Event]:
        """The one event that ends the stream. Made again, as the document has changed, it has the same number."""
        number = self._emitter.next_number
        self._lifecycle(terminal_type(self.response))
        self._emitter.next_number = number
        return self._emitter.drain()

    def _lifecycle(self, event: str) -> None:
        self._emitter.emit(event, response=whole(self.response, self._options.include))

    # -- items ----------------------------------------------------------------------------------------------------

    def list_tools(self, listings: Iterable[Item]) -> list[Event]:
        """The tools of MCP servers as items, before the first turn: ``server_label`` and ``tools`` of each."""
        for listing in listings:
            added = {"type": "mcp_list_tools", "server_label": listing["server_label"], "tools": []}
            item, output_index = self._add_item(added, "mcpl")
            place = {"item_id": item["id"], "output_index": output_index}
            self._emitter.emit("response.mcp_list_tools.in_progress", **place)
            item |= listing
            self._emitter.emit("response.mcp_list_tools.completed", **place)
            self._emitter.emit("response.output_item.done", output_index=output_index, item=item)
        return self._emitter.drain()

    def add_whole(self, item: Item, prefix: str, usage: dict[str, Any] | None) -> list[Event]:
        """An item that is done as it is added; ``usage`` is what making it took."""
        item, output_index = self._add_item(item, prefix)
        self._emitter.emit("response.output_item.done", output_index=output_index, item=item)
        if usage:
            self.response["usage"] = usages.add(self.response["usage"], usage)
        return self._emitter.drain()

    def _add_item(self, item: Item, prefix: str) -> tuple[Item, int]:
        """The only place that mints an item's id and its ``output_index``."""
        output = self.response["output"]
        item = {"id": self._ids.item(prefix), **item}
        output.append(item)
        self._emitter.emit("response.output_item.added", output_index=len(output) - 1, item=item)
        return item, len(output) - 1
