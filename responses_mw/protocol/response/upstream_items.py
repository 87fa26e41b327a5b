"""Find the items of a response that the upstream's Responses API makes, and replace their ids."""

from __future__ import annotations

import re
from typing import Any

from ...ids import RunIds
from ..request.items import ID_PREFIXES
from ..types import Item
from .replay import OutputReplay

_PREFIX = re.compile(r"([a-z]{1,16})_.+")


class UpstreamItems:
    """The places and the new ids of the upstream's items.

    The *place* of an item is its index in this server's response. The upstream's index may differ.
    """

    def __init__(self, output: OutputReplay, ids: RunIds) -> None:
        """`output` is the output of this server's response, which gets its ids from `ids`."""
        self.first = 0
        """The place of the upstream's first item. Items that this server added precede it."""
        self._output = output
        self._ids = ids
        self._known: dict[str, str] = {}
        """Maps the upstream's ids to this server's ids."""
        self._places: dict[int, int] = {}
        """Maps the upstream's indices to places."""
        self._place_of: dict[str, int] = {}
        """Maps the upstream's item ids and call ids to places, for events without an index."""

    def register(self, item: Item, index: Any) -> Item:
        """Return the next item with a new id, and record its place. `index` is its index in the upstream's output."""
        theirs = item.get("id")
        given = _PREFIX.fullmatch(theirs) if isinstance(theirs, str) else None
        ours = self._ids.item(ID_PREFIXES.get(item["type"]) or (given[1] if given else "item"))
        place = len(self._output.items)
        for name in (item.get("call_id"), theirs):
            if isinstance(name, str):
                self._place_of[name] = place
        if isinstance(index, int):
            self._places[index] = place
        return self.with_id(item, ours)

    def with_id(self, item: Item, ours: str) -> Item:
        """Return a copy of `item` with this server's id `ours`. Later, `renamed` also replaces the id that it had."""
        if isinstance(item.get("id"), str):
            self.replace_id(item["id"], ours)
        return {**self.renamed(item), "id": ours}

    def replace_id(self, theirs: str, ours: str) -> None:
        """Let `renamed` replace the upstream's id `theirs` with `ours`."""
        self._known[theirs] = ours

    def place_at(self, index: int) -> int:
        """Return the place of the item with this `index` in the upstream's output, which may not have been streamed."""
        return self._places.get(index, index + self.first)

    def find(self, event: dict[str, Any], wanted: str | None, *names: Any) -> int | None:
        """Return the place of the item that an event belongs to, or None. If `wanted` is None, search only by index.

        Otherwise, if the index is unknown, search by `item_id` and `names`. If there is no index, finally search for the last
        open item of type `wanted` (empty: of any type).
        """
        index = event.get("output_index")
        if isinstance(index, int) and index in self._places:
            return self._places[index]
        if wanted is None:
            return None
        for name in (event.get("item_id"), *names):
            if isinstance(name, str) and name in self._place_of:
                return self._place_of[name]
        if isinstance(index, int):
            return None
        fitting = (place for place in self._output.open if not wanted or self._output.items[place]["type"] == wanted)
        return max(fitting, default=None)

    def renamed(self, value: Any) -> Any:
        """Return a copy of `value` in which the upstream's ids are replaced with this server's ids."""
        if isinstance(value, dict):
            known = self._known
            return {
                name: (known.get(member, member) if _names_an_item(name) else member)
                if isinstance(member, str)
                else self.renamed(member)
                for name, member in value.items()
            }
        return [self.renamed(one) for one in value] if isinstance(value, list) else value


def _names_an_item(member: str) -> bool:
    """Return whether a member holds the id of an item. A `call_id` does not, even if a server uses one value for both ids."""
    return member == "id" or (member.endswith("_id") and member != "call_id")
