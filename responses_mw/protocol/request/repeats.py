"""Leave out input items that the history already contains.

Some clients send items of earlier turns again, although they continue a response or a conversation.

1. A call without a known id is left out if it equals the history's last call with the same `call_id`. The same applies to an
   output if its call already has an equal output, and to requests for approval and their answers.
2. If such an item, or the output of a call in the history, follows a message or a reasoning item, that item is left out if it
   equals the last one of its kind before the call. A user message without a repeated item or an output after it is never left
   out, because a user may say the same twice. What the model wrote at the end of the history, or after a repeated item, is left
   out if it is repeated too.
3. An item with a known id is left out if it equals the item of that id. A different item gets a 400. Beside
   `previous_response_id`, a call or output with a known id gets OpenAI's 400 in any case.
4. Other outputs of answered calls are kept. They get a 400 when the messages are built.

Items are equal if they mean the same: JSON may be formatted differently, and members that the history adds may be missing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import orjson

from ...errors import BadRequest
from .. import origin
from ..parts import reasoning_text
from ..tool_kinds.form import Role
from ..types import Item
from .items import ITEMS

_Key = tuple[str, str]
_IDENTITY = frozenset({"id", "status", "created_by", origin.MEMBER})
_APPROVALS = frozenset({"mcp_approval_request", "mcp_approval_response"})


def without_repeats(items: Sequence[Item], history: Sequence[Item], *, in_conversation: bool) -> list[Item]:
    """Return `items`, the input of a request, without those that `history` contains.

    Raises `BadRequest` if an item has a known id (rule 3), or if an answered request for approval gets another answer.
    """
    repeats = _Repeats(items, history, in_conversation=in_conversation)
    return [item for position, item in enumerate(items) if position not in repeats.dropped]


def may_repeat(item: Item) -> bool:
    """Return whether an input with this item may repeat items of a history. Most inputs consist of messages without ids."""
    return "id" in item or _key(item) is not None or _is_models(item)


class _Repeats:
    """Finds the positions of repeated items (`dropped`)."""

    def __init__(self, items: Sequence[Item], history: Sequence[Item], *, in_conversation: bool) -> None:
        self.dropped: set[int] = set()
        self._history = history
        self._in_conversation = in_conversation
        self._by_id: dict[str, int] = {}
        self._calls: dict[_Key, int] = {}
        self._outputs: dict[_Key, int] = {}
        self._pending: Counter[_Key] = Counter()  # number of calls without an output
        self._new_calls: set[_Key] = set()
        self._executed = {item.get("approval_request_id") for item in history if item["type"] == "mcp_call"}  # approval ids
        for position, item in enumerate(history):
            if (key := _key(item)) is not None:
                self._index(key, item, position)
        if any("id" in item for item in items):
            self._by_id = {item["id"]: position for position, item in enumerate(history) if isinstance(item.get("id"), str)}
        self._reached = self._end_of_others() if any(map(_is_models, items)) else None
        """The place of the last repeated item, or None after a new item. At first, that of the last item not by the model."""
        anchors: dict[int, int] = {}
        for position, item in enumerate(items):
            place = self._place(item, position)
            if place is not None:
                anchors[position] = place
        self._align(items, anchors)

    def _index(self, key: _Key, item: Item, position: int) -> None:
        if _is_answer(item):
            self._outputs[key] = position
            self._pending[key] -= 1
        else:
            self._calls[key] = position
            self._pending[key] += 1

    @cached_property
    def _of_kind(self) -> Mapping[tuple[Any, Any], list[int]]:
        """The positions of the other items in the history, by type and role."""
        positions: defaultdict[tuple[Any, Any], list[int]] = defaultdict(list)
        for position, item in enumerate(self._history):
            if _key(item) is None:
                positions[item["type"], item.get("role")].append(position)
        return positions

    def _end_of_others(self) -> int:
        others = (place for place, item in enumerate(self._history) if not (_key(item) or _is_models(item)))
        return max(max(others, default=-1), *self._outputs.values(), -1)

    def _place(self, item: Item, position: int) -> int | None:
        """Decide whether an item is dropped. Return the place in the history of the item or its call, if it has one."""
        known, key = self._known(item), _key(item)
        if known is not None:
            self._check_resent(item, self._history[known], position)
            self._drop(position, known)
        elif key is None:
            return self._repeats_next(item, position)
        elif _is_answer(item):
            self._take_answer(key, item, position)
        elif not self._repeats_call(key, item, position):
            self._pending[key] += 1
            self._new_calls.add(key)
            self._reached = None
        return known if key is None or key in self._new_calls else self._calls.get(key)

    def _drop(self, position: int, place: int) -> None:
        self.dropped.add(position)
        self._reached = place

    def _known(self, item: Item) -> int | None:
        # The id of a shell output may be the id of its call, and approvals are compared by the id of the request.
        if item["type"] in _APPROVALS or item["type"] == "local_shell_call_output":
            return None
        return self._by_id.get(item.get("id", ""))

    def _check_resent(self, item: Item, known: Item, position: int) -> None:
        if not self._in_conversation and _key(item) is not None:
            _refuse(position, f"Duplicate item found with id {item['id']}: it is already in the history; send only new items.")
        if not _is_equal(item, known):
            _refuse(position, f"The item with id {item['id']} differs from that in the history. Leave out its id.")

    def _repeats_call(self, key: _Key, item: Item, position: int) -> bool:
        if key not in self._calls:
            return False
        is_equal = _is_equal(item, self._history[self._calls[key]])
        if not is_equal and item["type"] == "mcp_approval_request":
            _refuse(position, f"The approval request {item['id']} differs from that in the history.")
        if is_equal:
            self._drop(position, self._calls[key])
        return is_equal

    def _take_answer(self, key: _Key, item: Item, position: int) -> None:
        if self._pending[key] > 0 or key not in self._outputs:
            self._pending[key] -= 1
            self._reached = None
            return
        known = self._history[self._outputs[key]]
        is_repeated = _is_equal(item, known)
        if item["type"] == "mcp_approval_response":
            if item["approve"] != known["approve"]:
                _refuse(position, f"The approval request {key[1]} already has a response; send each response once.")
            is_repeated = not item["approve"] or key[1] in self._executed  # otherwise, the call is still to be executed
        if is_repeated:
            self._drop(position, self._outputs[key])

    def _repeats_next(self, item: Item, position: int) -> int | None:
        """Drop the model's items after the repeated items so far, if they are repeated as well. Return the place after them."""
        if self._reached is None:
            return None
        is_models = _is_models(item)
        places = self._of_kind.get((item["type"], item.get("role")), [])
        index = bisect_right(places, self._reached)
        if index == len(places) or not _is_equal(item, self._history[places[index]]):
            self._reached = self._reached if is_models else None
            return None
        self._reached = places[index]
        if not is_models:
            return None
        self.dropped.add(position)
        return places[index]

    def _align(self, items: Sequence[Item], anchors: Mapping[int, int]) -> None:
        """Drop the repeated items before calls and outputs (rule 2)."""
        end: int | None = None  # the position in the history before which an equal item is searched
        for position in reversed(range(len(items))):
            item = items[position]
            if position in anchors:
                end = anchors[position] if end is None else min(end, anchors[position])
            elif end is not None and position not in self.dropped and _key(item) is None:
                found = self._last_of_kind(item, end)
                if found is not None and _is_equal(item, self._history[found]):
                    self.dropped.add(position)
                    end = found

    def _last_of_kind(self, item: Item, end: int) -> int | None:
        positions = self._of_kind.get((item["type"], item.get("role")), [])
        count = bisect_left(positions, end)
        return positions[count - 1] if count else None


def _refuse(position: int, message: str) -> NoReturn:
    raise BadRequest(message, param=f"input[{position}]", code="duplicate_item")


_LINKS: Mapping[str, tuple[str, str]] = {
    **{kind: ("call", "call_id") for kind, item in ITEMS.items() if item.role in (Role.CALL, Role.OUTPUT)},
    "mcp_approval_request": ("approval", "id"),
    "mcp_approval_response": ("approval", "approval_request_id"),
}
_ANSWERS = frozenset({"mcp_approval_response", *(kind for kind, item in ITEMS.items() if item.role is Role.OUTPUT)})


def _key(item: Item) -> _Key | None:
    """Return what links calls to outputs, or requests for approval to answers. None for other items."""
    link = _LINKS.get(item["type"])
    return None if link is None else (link[0], str(item.get(link[1])))


def _is_models(item: Item) -> bool:
    """Return whether the model wrote the item, which is not a call."""
    return item["type"] == "reasoning" or item.get("role") == "assistant"


def _is_answer(item: Item) -> bool:
    return item["type"] in _ANSWERS


def _is_equal(item: Item, known: Item) -> bool:
    """Return whether `item` means the same as the item `known` of the history."""
    if item["type"] == known["type"] == "reasoning":
        # Some clients move the text between content and summary, or send only one of them.
        text = reasoning_text(item).strip()
        is_sealed = "encrypted_content" in item and item["encrypted_content"] == known.get("encrypted_content")
        return not text or is_sealed or text == reasoning_text(known).strip()
    has_failed = [one.get("status") == "failed" for one in (item, known)]
    members = {name: value for name, value in item.items() if name not in _IDENTITY}
    return has_failed[0] == has_failed[1] and _agrees(members, known)


def _agrees(one: Any, known: Any) -> bool:
    if isinstance(one, dict) and isinstance(known, dict):
        return all(_agrees(value, known.get(name)) for name, value in one.items())
    if isinstance(one, list) and isinstance(known, list):
        return len(one) == len(known) and all(map(_agrees, one, known))
    one, known = _plain(one), _plain(known)
    if isinstance(one, str) and isinstance(known, str):
        return one == known or (_normal(one) or one) == _normal(known)
    return bool(one == known) or (known is None and not one)


def _plain(value: Any) -> Any:
    """Return the text of a list that consists of one text, and any other value unchanged."""
    match value:
        case [{"type": "input_text" | "output_text", "text": str(text)}]:
            return text
    return value


def _normal(text: str) -> bytes | None:
    """Return a JSON object or array in a normal form, or None if `text` is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
