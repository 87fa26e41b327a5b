"""``truncation: auto``: select the oldest items to drop.

1. Instructions, system and developer messages, compactions and ``additional_tools`` are never dropped.
2. Before the last user turn, whole exchanges are dropped: user messages and everything that answers them. What remains
   begins with a user message, which chat templates expect. The last user messages stay.
3. After them, the oldest steps of the tool loop are dropped: an assistant's text and calls with their outputs. The last step
   stays.
4. A call and its output, or an approval request and its response, are never separated: their blocks are dropped together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from ..types import Item


def truncated(items: Sequence[Item], fits: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Drop as few of the oldest blocks as possible so that ``items`` fit; drop all droppable blocks if nothing fits.

    ``fits`` must be monotonic: if it holds for some items, it holds for fewer.
    """
    cuts = Truncation(items)
    return cuts.without(bisect_left(range(len(cuts)), True, key=lambda count: fits(cuts.without(count))))


class Truncation:
    """The ways to shorten ``items``: without the ``n`` oldest droppable blocks, for ``n`` up to ``len``."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        block_of = _joined(items, _blocks(items))
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
        dropped = {position for block in self._blocks[:count] for position in block}
        return [item for position, item in enumerate(self._items) if position not in dropped]


def is_kept(item: Item) -> bool:
    """Whether the item is never dropped."""
    return item.get("role") in ("system", "developer") or item["type"] in ("compaction", "additional_tools")


def _blocks(items: Sequence[Item]) -> list[int]:
    """Number the block of each item: exchanges before the last user turn, then that turn, then steps."""
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


def _joined(items: Sequence[Item], block_of: Sequence[int]) -> list[int]:
    """Renumber the blocks so that linked blocks, and all between them, become one."""
    reaches = list(range(block_of[-1] + 1 if block_of else 0))
    for first, second in _links(items):
        begin, end = sorted((block_of[first], block_of[second]))
        reaches[begin] = max(reaches[begin], end)
    joined, reach = [0] * len(reaches), -1
    for number, furthest in enumerate(reaches):
        joined[number] = number if number > reach else joined[number - 1]
        reach = max(reach, furthest)
    return [joined[number] for number in block_of]


def _links(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Yield the positions of calls (or approval requests) and their answers. The n-th call with an id has the n-th output."""
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    keys = list(map(_link, items))
    for position, (key, is_answer) in enumerate(keys):
        if key and not is_answer:
            waiting[key].append(position)
    for position, (key, is_answer) in enumerate(keys):
        if is_answer and waiting[key]:
            yield waiting[key].popleft(), position


def _link(item: Item) -> tuple[str, bool]:
    """The key that links the item to another (empty for none), and whether the item is the answer."""
    match item["type"]:
        case "mcp_approval_request":
            return f"approval {item.get('id')}", False
        case "mcp_approval_response":
            return f"approval {item['approval_request_id']}", True
    call_id = item.get("call_id")
    return (f"call {call_id}" if call_id else ""), item["type"].endswith("_output")
