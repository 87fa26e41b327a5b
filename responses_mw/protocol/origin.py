"""The member `upstream` of an item: what the item's chat message contained besides the members that clients see.

Clients get short, unique call ids, and items with the members of OpenAI's API. The upstream gets its own ids and members back,
because some servers keep a signature in them, and some chat templates print the ids. Clients that send items back can send
this member with them. Without it, a call has the id that the client knows. The members are:

    id          the upstream's id of the call, if it differs from the item's `call_id`
    call        other members of the call in the chat message, such as `extra_content`
    function    other members of the call's `function`, such as `thought_signature`
    same_turn   true if the model wrote the item in the same turn as a server-side call before it, without seeing its result

Many clients drop members that OpenAI's API does not have. If the request asks for encrypted reasoning, copies of the members
of a turn's calls are therefore encrypted as the `encrypted_content` of a reasoning item without text. It follows the calls,
because their members may arrive last. A turn has such an item only if a call `needs_keeping`.

A client can forge this member. So it only affects the chat messages of the client's own requests, and it cannot replace the
members of a call that come from the item itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from . import checks
from .types import Item

logger = logging.getLogger(__name__)

MEMBER = "upstream"
MAX_BYTES = 64 * 1024
"""Maximum size in bytes of the member as JSON. Signatures in ids and members have a few kilobytes."""

CALL_MEMBERS = frozenset({"id", "index", "type", "function"})
FUNCTION_MEMBERS = frozenset({"name", "arguments"})
"""The members of a call and its function that Chat Completions defines. The upstream gets them from the item."""

_check_members = checks.fields(
    id=partial(checks.string, max_length=MAX_BYTES),
    call=checks.json_object,
    function=checks.json_object,
    same_turn=checks.boolean,
)
_NAMES = frozenset({"id", "call", "function", "same_turn"})


def check(value: Any, path: str) -> dict[str, Any]:
    """Check the member of an input item. Members that this version does not know are left out."""
    given = checks.mapping(value, path)
    checked = _check_members({name: given[name] for name in given if name in _NAMES}, path)
    if len(orjson.dumps(checked)) > MAX_BYTES:
        checks.invalid(path, f"it has more than {MAX_BYTES} bytes.")
    return checked


def unknown_members(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the members of `given` that are not `known`, without empty ones."""
    return {name: value for name, value in given.items() if name not in known and value not in (None, "")}


def record(item: Item, call_id: str | None, call: Mapping[str, Any], function: Mapping[str, Any]) -> None:
    """Add the upstream's id and the unknown members of a call and its function to the item of the call."""
    given: dict[str, Any] = {"id": call_id} if call_id and call_id != item.get("call_id") else {}
    given |= {name: dict(members) for name, members in (("call", call), ("function", function)) if members}
    if not given:
        return
    size = _size(given)
    if size > MAX_BYTES:
        logger.warning("an id or unknown members of a tool call were dropped, because they have %d bytes", size)
        return
    item[MEMBER] = {**_object(item, MEMBER), **given}


def _size(value: Any) -> int:
    try:
        return len(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested deeper than the encoder allows
        return MAX_BYTES + 1


def with_id(item: Item) -> Item:
    """Return a call with its own id as the upstream's id, unless the upstream's id is known. So it can get another id."""
    known = _object(item, MEMBER)
    return item if "id" in known or "id" not in item else {**item, MEMBER: {**known, "id": item["id"]}}


def without(item: Item) -> Item:
    """Return the item without this member, for upstreams with a Responses API, which may not accept it."""
    return {name: value for name, value in item.items() if name != MEMBER} if MEMBER in item else item


def in_same_turn(item: Item) -> Item:
    """Return the item with the mark of the same turn."""
    return {**item, MEMBER: {**_object(item, MEMBER), "same_turn": True}}


def is_same_turn(item: Item) -> bool:
    return MEMBER in item and _object(item, MEMBER).get("same_turn") is True


def id_of(item: Item) -> str:
    """Return the id of a call in chat messages."""
    return str((MEMBER in item and _object(item, MEMBER).get("id")) or item.get("call_id") or item.get("id", ""))


def chat_call(item: Item, name: str, arguments: Any) -> dict[str, Any]:
    """Return the call of a chat message."""
    call: dict[str, Any] = {"id": id_of(item), "type": "function", "function": {"name": name, "arguments": arguments}}
    if MEMBER not in item:  # nearly every call for the client
        return call
    known = _object(item, MEMBER)
    call["function"] |= unknown_members(_object(known, "function"), FUNCTION_MEMBERS)
    return call | unknown_members(_object(known, "call"), CALL_MEMBERS)


# -- encrypted copies ---------------------------------------------------------------------------------------------------------


def needs_keeping(items: Sequence[Item]) -> bool:
    """Return whether a call has unknown members, or is executed by the client under another id than the upstream's.

    Return False if `items` already contain a copy.
    """
    known = [(item, _object(item, MEMBER)) for item in items if MEMBER in item]
    is_needed = any("call" in given or "function" in given or ("id" in given and "call_id" in item) for item, given in known)
    return is_needed and not any(map(is_kept, items))


def copies(items: Sequence[Item]) -> str:
    """Return the members of the calls in `items` as JSON. The keys are the ids of calls, or of items without a `call_id`."""
    calls = [item for item in items if MEMBER in item and item["type"] != "message"]
    return orjson.dumps({str(item.get("call_id") or item["id"]): item[MEMBER] for item in calls}).decode()


def kept(encrypted: str) -> Item:
    """Return the reasoning item for encrypted copies. It is part of the turn before it."""
    return in_same_turn({"type": "reasoning", "summary": [], "encrypted_content": encrypted, "status": "completed"})


def is_kept(item: Item) -> bool:
    """Return whether `item` may come from `kept`: a reasoning item that has only encrypted content."""
    return item["type"] == "reasoning" and "encrypted_content" in item and not (item.get("content") or item.get("summary"))


def decrypted(item: Item) -> Item:
    """Return an item from `kept` without its encrypted copies."""
    return in_same_turn({name: value for name, value in item.items() if name != "encrypted_content"})


def restored(items: Sequence[Item], found: Mapping[str, Any]) -> list[Item]:
    """Return `items` with the members in the copies `found`. An item that still has its member is not changed."""
    return [_with_copy(item, found) for item in items]


def _with_copy(item: Item, found: Mapping[str, Any]) -> Item:
    if item["type"].endswith("_output"):  # it has the `call_id` of its call
        return item
    known = _object(item, MEMBER)
    if "call_id" in item or known.keys() != {"id"}:
        copy = None if MEMBER in item else found.get(item.get("call_id", ""))
    else:
        copy = found.get(known["id"])  # the id that the client knows (`with_id`)
    return item if copy is None else {**item, MEMBER: copy}


def _object(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}  # an upstream's own Responses API may have sent anything
