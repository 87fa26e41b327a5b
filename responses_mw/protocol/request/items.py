"""Check and normalize input items, which clients send as `input` or as vLLM's `previous_input_messages`.

Nulls are removed, and the content of a message becomes a list of parts. Most items keep unknown fields, because clients send
back SDK objects with additional fields. To add a type of item, add it to its `ToolKind` or to `ITEMS`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson

from ...errors import BadRequest
from .. import checks, json_limits, origin
from ..parts import ASSISTANT_PARTS, INPUT_PARTS, REASONING_PARTS, SUMMARY_PARTS, reasoning_text
from ..request.tools import BRINGS_TOOLS
from ..tool_kinds.form import ItemKind, Role, flat_name
from ..tool_kinds.registry import TOOL_ITEMS
from ..types import Item, Message
from .configuration import CONFIGURATION_UPDATE, check_update
from .tools import check_brought_tools

_role = checks.among("user", "assistant", "system", "developer")
_common = checks.fields(id=partial(checks.string, max_length=256), upstream=origin.check)


def user_message(text: str) -> Item:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def _assistant_message(text: str) -> Item:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}


def parse_input(value: Any, path: str = "input") -> list[Item]:
    """Check an `input`, and return its items. A string becomes a user message."""
    if isinstance(checks.string_or_array(value, path), str):
        return [user_message(value)]
    return checks.each(item, max_length=json_limits.MAX_ITEMS)(value, path)


def item(value: Any, path: str) -> Item:
    """Check one input item and return a copy without nulls.

    An item without a `type` is a `message` if it has a `role`. With an `id` and no `role`, it is an `item_reference`.
    """
    given = checks.mapping(value, path)
    if "type" not in given:
        if not given.keys() & {"role", "id"}:
            checks.missing(f"{path}.type")
        given["type"] = "message" if "role" in given else "item_reference"
    kind = checks.string(given["type"], f"{path}.type")
    if kind in NOT_SERVED:
        checks.unsupported(f"{path}.type", f"items of type '{kind}' are not supported.")
    if kind not in ITEMS:
        checks.wrong_value(f"{path}.type", kind, ITEMS.keys())
    if "status" in given:
        checks.one_of(given["status"], f"{path}.status", ITEMS[kind].statuses)
    checked: Item = ITEMS[kind].check(_common(given, path), path)
    if kind in BRINGS_TOOLS:
        checked["tools"] = checks.required(checked, "tools", path, check_brought_tools)
    return checked


def _message(value: Item, path: str) -> Item:
    if value.get("role") == "tool":
        checks.chat_name(f"{path}.role", "an item of type 'function_call_output'")
    if value.get("tool_calls"):
        checks.chat_name(f"{path}.tool_calls", "items of type 'function_call'")
    is_assistant = checks.required(value, "role", path, _role) == "assistant"
    content = value.get("content")
    if isinstance(content, str):
        made = _assistant_message(content) if is_assistant else user_message(content)
        return {**value, "content": made["content"]}
    where = f"{path}.content"
    if content is None:
        checks.missing(where)
    checks.string_or_array(content, where)
    return {**value, "content": (ASSISTANT_PARTS if is_assistant else INPUT_PARTS)(content, where)}


def _compaction(value: Item, path: str) -> Item:
    # Only the encrypted content is authenticated, so the model must not see what other members contain.
    checks.required(value, "encrypted_content", path, checks.string)
    return {name: value[name] for name in ("id", "type", "encrypted_content", "created_by") if name in value}


def _item_reference(value: Item, path: str) -> Item:
    return {"type": "item_reference", "id": checks.required(value, "id", path, checks.string)}


_reasoning = checks.fields(summary=SUMMARY_PARTS, content=REASONING_PARTS, encrypted_content=checks.string)

ITEMS: dict[str, ItemKind] = {
    "message": ItemKind("msg", _message, Role.MESSAGE),
    "reasoning": ItemKind("rs", lambda value, path: {"summary": [], **_reasoning(value, path)}, Role.REASONING),
    "item_reference": ItemKind("", _item_reference),
    "compaction": ItemKind("cmp", _compaction, Role.COMPACTION),
    "compaction_trigger": ItemKind("cmpt", checks.as_it_is),
    CONFIGURATION_UPDATE: ItemKind("cu", check_update),
    "additional_tools": ItemKind("at", checks.fields(role=checks.among("developer"))),
    **TOOL_ITEMS,
}
ID_PREFIXES = {type_: kind.prefix for type_, kind in ITEMS.items() if kind.prefix}
NOT_SERVED = frozenset(
    {"computer_call", "computer_call_output", "image_generation_call"}
    | {"program", "program_output"}
    | {"agent_message", "multi_agent_call", "multi_agent_call_output"}  # from the beta of the reference
)

# -- encrypted reasoning -----------------------------------------------------------------------------------------------
# With `include: ["reasoning.encrypted_content"]`, reasoning items also contain their text as `encrypted_content`. A client that
# stores no responses here sends it back later (OpenAI reference, "Encrypted reasoning items").


def unsealed(
    items: Sequence[Item],
    unseal: Callable[[str], str | None],
    unseal_origins: Callable[[str], Item | None],
    *,
    offset: int = 0,
) -> list[Item]:
    """Return `items` with the missing content of encrypted reasoning items restored, and missing members of calls (`origin`).

    `unseal` returns the decrypted text, and `unseal_origins` the copies of such members, or None if this server did not encrypt
    them for the caller. If both return None, the item is not changed, because it may come from another server. Raises
    `BadRequest` if such an item has no readable text and is part of the request's own input, which begins at `items[offset]`.
    """
    found: Item = {}

    def restored(item: Item, index: int) -> Item:
        if item["type"] != "reasoning" or "encrypted_content" not in item or item.get("content"):
            return item
        text = unseal(item["encrypted_content"])
        if text is not None:
            return {**item, "content": [{"type": "reasoning_text", "text": text}]}
        if origin.is_kept(item) and (copies := unseal_origins(item["encrypted_content"])) is not None:
            found.update(copies)
            return origin.decrypted(item)
        if index >= 0 and not reasoning_text(item):
            checks.foreign_envelope(f"input[{index}].encrypted_content", f"input[{index}].encrypted_content")
        return item

    opened = [restored(item, position - offset) for position, item in enumerate(items)]
    return origin.restored(opened, found) if found else opened


# -- vLLM's previous_input_messages ------------------------------------------------------------------------------------
# A history of Harmony or chat messages: the `input_messages` and `output_messages` of earlier responses, and messages that
# the client adds.

_PREVIOUS = "previous_input_messages"
_author_role = checks.among("user", "assistant", "system", "developer", "tool")


def parse_previous(value: Any) -> list[Item]:
    """Convert the messages in `previous_input_messages` to items that precede the `input`.

    As in vLLM, system and developer messages are ignored, because only the request's own instructions apply. Raises
    `BadRequest` if a message is invalid, or if there are more than `MAX_ITEMS` messages or items.
    """
    history = _PreviousMessages()
    for index, one in enumerate(checks.array(value, _PREVIOUS, max_length=json_limits.MAX_ITEMS)):
        path = f"{_PREVIOUS}[{index}]"
        history.add(checks.mapping(one, path), path)
        checks.array(history.items, _PREVIOUS, max_length=json_limits.MAX_ITEMS)  # one message can become many items
    return history.items


class _PreviousMessages:
    def __init__(self) -> None:
        self.items: list[Item] = []
        # Calls under the keys ("id", <id>) and ("name", <name>), and all calls under (). A queue may begin with finished calls.
        self._calls: defaultdict[tuple[str, ...], deque[Item]] = defaultdict(deque)

    def add(self, message: Message, path: str) -> None:
        author, where = message, path
        if "author" in message:
            where = f"{path}.author"
            author = checks.mapping(message["author"], where)
        role = checks.required(author, "role", where, _author_role)
        message = {**author, **message}
        if role == "user":
            self.items.append(user_message(_text(message, path)))
        elif role == "assistant":
            self._add_answer(message, path)
        elif role == "tool":
            self._add_result(message, path)

    def _add_answer(self, message: Message, path: str) -> None:
        to = message.get("recipient")
        calls = checks.array(message.get("tool_calls") or [], f"{path}.tool_calls")
        if to is not None:
            name = checks.string(to, f"{path}.recipient")
            self._add_call(name, _text(message, path), self._call_id(message.get("call_id"), f"{path}.call_id"))
            return
        if message.get("channel") == "analysis":
            self._add_reasoning(_text(message, path))
            return
        member = "reasoning" if message.get("reasoning") else "reasoning_content"
        if message.get(member):
            self._add_reasoning(checks.string(message[member], f"{path}.{member}"))
        if text := _text(message, path):
            self.items.append(_assistant_message(text))
        for index, call in enumerate(calls):
            self._add_chat_call(call, f"{path}.tool_calls[{index}]")

    def _add_chat_call(self, value: Any, path: str) -> None:
        call = checks.mapping(value, path)
        function = checks.required(call, "function", path, checks.mapping)
        name = checks.required(function, "name", f"{path}.function", checks.string)
        arguments = checks.string(function.get("arguments", ""), f"{path}.function.arguments")
        self._add_call(name, arguments, self._call_id(call.get("id"), f"{path}.id"))

    def _call_id(self, given: Any, path: str) -> str:
        if given is None:
            return f"call_{len(self.items)}"
        return checks.string(given, path, max_length=origin.MAX_BYTES)  # it may be the upstream's own id

    def _add_reasoning(self, text: str) -> None:
        self.items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]})

    def _add_call(self, to: str, arguments: str, call_id: str) -> None:
        call = {
            "type": "function_call",
            "call_id": call_id,
            "name": _function_name(to),
            "arguments": orjson.dumps({"code": arguments}).decode() if to == "python" else arguments,
            "status": "incomplete",  # until the result is added, because a call without a result was not executed
        }
        self.items.append(call)
        for key in (("id", call["call_id"]), ("name", call["name"]), ()):
            self._calls[key].append(call)

    def _add_result(self, message: Message, path: str) -> None:
        call_id = message.get("tool_call_id") or message.get("call_id")
        name = message.get("name")
        call = self._waiting("id", call_id) if isinstance(call_id, str) else None
        call = call or (self._waiting("name", _function_name(str(name))) if name else self._waiting())
        if call is None:
            why = f"No tool call found for the tool message '{path}'."
            raise BadRequest(why, param=f"{path}.name", code="missing_tool_call")
        call["status"] = "completed"
        self.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": _text(message, path)})

    def _waiting(self, *key: str) -> Item | None:
        calls = self._calls[key]
        while calls and calls[0]["status"] == "completed":
            calls.popleft()
        return calls[0] if calls else None


def _function_name(to: str) -> str:
    return flat_name(None, to.removeprefix("functions."))


def _text(message: Message, path: str) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else "\n".join(_texts(content, f"{path}.content"))


def _part_text(value: Any, path: str) -> str:
    part = checks.mapping(value, path)
    if part.get("type", "text") not in ("text", "input_text", "output_text"):
        checks.unsupported(f"{path}.type", "messages of earlier responses can only hold text.")
    return checks.string(part.get("text", ""), f"{path}.text")


_texts = checks.each(_part_text)
