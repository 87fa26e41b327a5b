"""Find items that take another place in the chat than in the list of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..request.items import ITEMS
from ..tool_kinds.form import Role
from ..types import Item

WRITTEN = frozenset({Role.ASSISTANT_MESSAGE, Role.REASONING, Role.CALL, Role.SERVED_CALL, Role.APPROVAL_REQUEST})
"""The roles of items that the model writes."""


def role_of(item: Item) -> Role:
    """Return the role of an item. A type that this version does not know has the role `NOTHING`."""
    if item.get("role") == "assistant":
        return Role.ASSISTANT_MESSAGE
    kind = ITEMS.get(item["type"])
    return kind.role if kind is not None else Role.NOTHING


def early_messages(roles: Sequence[Role], answers: Mapping[int, int]) -> frozenset[int]:
    """Return the positions of messages between a call and its output, without items of the assistant before the output."""
    if (Role.MESSAGE, Role.OUTPUT) not in pairwise(role for role in roles if role is not Role.NOTHING):  # nearly always
        return frozenset()
    candidates = _before_outputs(roles)
    early, last_output = set[int](), -1
    for position, role in enumerate(roles):
        if role is Role.CALL:
            last_output = max(last_output, answers.get(position, -1))
        elif position in candidates and position < last_output:
            early.add(position)
        elif role is Role.MESSAGE:
            last_output = -1
    return frozenset(early)


def _before_outputs(roles: Sequence[Role]) -> set[int]:
    """Return the positions of messages before outputs, without items of the assistant in between."""
    found: set[int] = set()
    is_before_output = False
    for position in reversed(range(len(roles))):
        role = roles[position]
        is_before_output = role is Role.OUTPUT or (is_before_output and role not in WRITTEN)
        if is_before_output and role is Role.MESSAGE:
            found.add(position)
    return found


def approved_calls(items: Sequence[Item]) -> dict[int, int]:
    """Map positions of approval requests to the positions of the executed calls."""
    requests: dict[str, int] = {}
    approved: dict[int, int] = {}
    for position, item in enumerate(items):
        if item["type"] == "mcp_approval_request":
            requests.setdefault(item["id"], position)
        elif item["type"] == "mcp_call" and item.get("approval_request_id") in requests:
            approved.setdefault(requests[item["approval_request_id"]], position)
    return approved
