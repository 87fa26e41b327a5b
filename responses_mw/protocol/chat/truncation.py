"""Drop the oldest items of a list that does not fit the context window (`truncation: auto`).

1. Instructions, system and developer messages, compactions, `additional_tools` and configuration updates are never dropped.
2. Older exchanges are dropped as a whole: user messages together with the items that answer them. The remaining items begin
   with a user message, because chat templates expect one. The last user messages are kept.
3. After the last user messages, the oldest steps of the tool loop are dropped. A step is an assistant's text and calls,
   together with the outputs of the calls. The last step is kept.
4. A call and its output, or an approval request and its response, are never separated. Their blocks are dropped together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from ..request.configuration import CONFIGURATION_UPDATE
from ..request.items import ITEMS
from ..tool_kinds.form import Role
from ..types import Item


def truncated(items: Sequence[Item], fits: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Drop the oldest blocks of `items` until the rest fits. Return the rest.

    If it never fits, all droppable blocks are dropped. If `fits` accepts a list, it must also accept shorter lists.
    """
    cuts = Truncation(items)
    return cuts.without(bisect_left(range(len(cuts)), True, key=lambda count: fits(cuts.without(count))))


class Truncation:
    """The droppable blocks of `items`, oldest first. `len` is the number of these blocks."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        block_of = _linked(items, _blocks(items))
        blocks: defaultdict[int, list[int]] = defaultdict(list)
        last_user = -1
        for position, item in enumerate(items):
            if not is_kept(item):
                blocks[block_of[position]].append(position)
                if item.get("role") == "user":
                    last_user = block_of[position]
        self._blocks = [blocks[number] for number in sorted(blocks)[:-1] if number != last_user]

    def __len__(self) -> int:
        return len(self._blocks)

    def without(self, count: int) -> list[Item]:
        """Return the items without the `count` oldest droppable blocks."""
        dropped = {position for block in self._blocks[:count] for position in block}
        return [item for position, item in enumerate(self._items) if position not in dropped]


_KEPT = frozenset({"additional_tools", "compaction", CONFIGURATION_UPDATE})


def is_kept(item: Item) -> bool:
    """Return whether the item is always kept (rule 1)."""
    return item.get("role") in ("system", "developer") or item["type"] in _KEPT


def _blocks(items: Sequence[Item]) -> list[int]:
    """Return the block number of each item. A block is an exchange (rule 2), the last user messages or a step (rule 3)."""
    last_user = max((position for position, item in enumerate(items) if item.get("role") == "user"), default=-1)
    numbers: list[int] = []
    number, before = 0, "user"
    for position, item in enumerate(items):
        if not is_kept(item):
            is_output = item["type"].endswith(("_output", "_response"))
            side = "user" if item.get("role") == "user" else "output" if is_output else "assistant"
            begins = side == "user" if position <= last_user else side == "assistant" or before == "user"
            number += begins and before != side
            before = side
        numbers.append(number)
    return numbers


def _linked(items: Sequence[Item], block_of: Sequence[int]) -> list[int]:
    """Renumber the blocks so that linked blocks, and all blocks between them, become one block."""
    reaches = list(range(block_of[-1] + 1 if block_of else 0))
    for first, second in links(items):
        begin, end = sorted((block_of[first], block_of[second]))
        reaches[begin] = max(reaches[begin], end)
    linked, reach = [0] * len(reaches), -1
    for number, furthest in enumerate(reaches):
        linked[number] = number if number > reach else linked[number - 1]
        reach = max(reach, furthest)
    return [linked[number] for number in block_of]


def links(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions: of a call and its output, or of an approval request and its response.

    Some models use the same call ids in each turn. Therefore, the n-th output with an id belongs to the n-th call with this id.
    """
    waiting: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
    answers: list[tuple[int, tuple[str, str]]] = []
    for position, item in enumerate(items):
        role = ITEMS[item["type"]].role if item["type"] in ITEMS else Role.NOTHING
        if role is Role.CALL:
            waiting["call", item.get("call_id", "")].append(position)
        elif role is Role.OUTPUT:
            answers.append((position, ("call", item.get("call_id", ""))))
        elif role is Role.APPROVAL_REQUEST:
            waiting["approval", item["id"]].append(position)
        elif item["type"] == "mcp_approval_response":
            answers.append((position, ("approval", item["approval_request_id"])))
    for position, key in answers:
        if waiting[key]:
            yield waiting[key].popleft(), position
