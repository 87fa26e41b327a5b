"""vLLM's ``previous_input_messages``: convert a history of Harmony or chat messages to items.

The history consists of ``input_messages`` and ``output_messages`` of earlier responses and messages that the client adds. As
in vLLM, its system and developer messages are ignored: only the instructions of the request count.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import orjson

from ...errors import BadRequest
from ..request import checks
from ..request.items import user_message
from ..types import Item, Message

_ROLES = frozenset({"user", "assistant", "system", "developer", "tool"})
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def parse_previous(value: Any, path: str = "previous_input_messages", max_items: int | None = None) -> list[Item]:
    """Convert ``value`` to items that precede the ``input``. Raise ``BadRequest`` with the path of the invalid value."""
    history = _History()
    for index, one in enumerate(checks.array(value, path, max_length=max_items)):
        history.add(checks.mapping(one, f"{path}[{index}]"), f"{path}[{index}]")
        checks.array(history.items, path, max_length=max_items)  # one message can become many items
    return history.items


def refuse_two_histories(given: dict[str, Any]) -> None:
    """Raise vLLM's 400 if the request has both previous messages and a previous response."""
    if given.get("previous_input_messages") and given.get("previous_response_id"):
        message = "Only one of `previous_input_messages` and `previous_response_id` can be set."
        raise BadRequest(message, param="previous_response_id", code="mutually_exclusive_parameters")


class _History:
    def __init__(self) -> None:
        self.items: list[Item] = []
        self._unanswered: deque[Item] = deque()
        self._by_id: defaultdict[str, deque[Item]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[Item]] = defaultdict(deque)

    def add(self, message: Message, path: str) -> None:
        author = checks.mapping(message["author"], f"{path}.author") if "author" in message else message
        where = f"{path}.author" if "author" in message else path
        role = checks.one_of(checks.required(author, "role", where, checks.string), f"{where}.role", _ROLES)
        step = self._STEPS.get(role)
        if step:
            step(self, {**author, **message}, path)

    def _user(self, message: Message, path: str) -> None:
        self.items.append(user_message(_text(message, path)))

    def _assistant(self, message: Message, path: str) -> None:
        to = message.get("recipient")
        calls = checks.array(message.get("tool_calls") or [], f"{path}.tool_calls")
        if to is not None:
            self._call(checks.string(to, f"{path}.recipient"), _text(message, path), message.get("call_id"))
            return
        if message.get("channel") == "analysis":
            self._reasoning(_text(message, path))
            return
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning:
            self._reasoning(checks.string(reasoning, f"{path}.reasoning"))
        text = _text(message, path) if calls == [] or "content" in message else ""
        if text:
            part = {"type": "output_text", "text": text, "annotations": []}
            self.items.append({"type": "message", "role": "assistant", "content": [part]})
        for index, call in enumerate(calls):
            self._chat_call(checks.mapping(call, f"{path}.tool_calls[{index}]"), f"{path}.tool_calls[{index}]")

    def _reasoning(self, text: str) -> None:
        part = {"type": "reasoning_text", "text": text}
        self.items.append({"type": "reasoning", "summary": [], "content": [part]})

    def _chat_call(self, call: dict[str, Any], path: str) -> None:
        function = checks.required(call, "function", path, checks.mapping)
        name = checks.required(function, "name", f"{path}.function", checks.string)
        arguments = checks.string(function.get("arguments", ""), f"{path}.function.arguments")
        self._call(name, arguments, call.get("id"))

    def _call(self, to: str, arguments: str, call_id: Any) -> None:
        """Add a call. It is ``incomplete`` until its result is added; without a result, it counts as not executed."""
        if to == "python":
            arguments = orjson.dumps({"code": arguments}).decode()
        call = {
            "type": "function_call",
            "call_id": call_id if isinstance(call_id, str) else f"call_{len(self.items)}",
            "name": _NOT_IN_NAMES.sub("_", to.removeprefix("functions."))[:64] or "unnamed",
            "arguments": arguments,
            "status": "incomplete",
        }
        for calls in (self._unanswered, self._by_id[call["call_id"]], self._by_name[call["name"]]):
            calls.append(call)
        self.items.append(call)

    def _tool(self, message: Message, path: str) -> None:
        call_id = message.get("tool_call_id") or message.get("call_id")
        name = _NOT_IN_NAMES.sub("_", str(message.get("name") or "").removeprefix("functions."))[:64]
        matching = _first_open(self._by_id.get(call_id)) if isinstance(call_id, str) else None
        call = matching or _first_open(self._by_name.get(name) if name else self._unanswered)
        if call is None:
            where = f"{path}.name"
            raise BadRequest(f"No tool call found for the tool message '{path}'.", param=where, code="missing_tool_call")
        call["status"] = "completed"
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": _text(message, path)}
        self.items.append(output)

    _STEPS: ClassVar[dict[str, Callable[[_History, Message, str], None]]] = {
        "user": _user,
        "assistant": _assistant,
        "tool": _tool,
    }


def _first_open(calls: deque[Item] | None) -> Item | None:
    """Return the first of ``calls`` without a result, and remove the calls before it."""
    while calls and calls[0]["status"] == "completed":
        calls.popleft()
    return calls[0] if calls else None


def _text(message: Message, path: str) -> str:
    """The text of a message. Harmony has only text parts; a part without text is empty."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = checks.array(content, f"{path}.content")
    texts: list[str] = []
    for index, one in enumerate(parts):
        where = f"{path}.content[{index}]"
        part = checks.mapping(one, where)
        if part.get("type", "text") not in ("text", "input_text", "output_text"):
            checks.unsupported(f"{where}.type", "messages of earlier responses can only hold text.")
        texts.append(checks.string(part.get("text", ""), f"{where}.text"))
    return "\n".join(texts)
