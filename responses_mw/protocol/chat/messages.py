"""Build the chat messages for a list of items.

1. Adjacent assistant items (reasoning, text, calls) become one chat message.
2. The outputs of calls directly follow the message with the calls, in the order of the calls. Tool messages hold only text.
   Therefore, the other parts of outputs, such as images, follow in one user message.
3. A call without an output gets OpenAI's 400, and so does an output without a call. Interrupted (`incomplete`) calls without
   an output are an exception. They were never executed, and are left out.
4. If the server executed a call, the call's item contains the result. The model may have seen the result before it wrote the
   next item. Therefore, the call is the last one in its assistant message.
5. If the user approves a call, the model sees its `mcp_call` item and not the request for approval. If the user declines, the
   model sees the call, with a note that it was not approved. An unanswered request is not sent.
6. Reasoning is sent back only if the dialect has a field for reasoning. By default, only the reasoning after the last user
   message is sent. If `reasoning.context` is `all_turns`, all reasoning is sent.
7. Some chat templates refuse two user messages in a row. Therefore, a turn that consists only of reasoning becomes an empty
   assistant message. The summary of a compaction is joined with the user message that follows.
8. Reasoning was interrupted if it is `incomplete`, or if an interrupted server-side call follows it. The model did not see this
   reasoning when the answer was requested again. Therefore, it is left out if more reasoning or text follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import orjson

from ...errors import BadRequest
from ..parts import Content, reasoning_text, to_chat_content, to_tool_content
from ..request import checks
from ..request.items import ITEMS
from ..request.tools import history_name, search_output
from ..tool_kinds.form import MAX_NESTING, parse_arguments
from ..tool_kinds.registry import arguments_of, is_finished, output_of
from ..types import Item, Message, Part
from .dialects import Dialect
from .truncation import links

Names = Callable[[Item], str]  # returns the name of the function that an item calls
Results = Mapping[str, str | list[Part]]
"""Maps the ids of items of server-side calls to results. The model sees these results instead of those in the items."""


def to_messages(
    items: Sequence[Item],
    dialect: Dialect,
    *,
    instructions: str | None = None,
    all_reasoning: bool = False,
    offset: int = 0,
    names: Names = history_name,
    results: Results | None = None,
) -> list[Message]:
    """Build the chat messages for `items`, after a system message with the `instructions`, if any.

    With `all_reasoning`, the reasoning of earlier turns is sent as well. The request's own input begins at `items[offset]`.
    Errors refer to that item as `input[0]`, and to any earlier item as `input`.

    Raises `BadRequest` if calls and outputs do not match (rule 3), if the type of an item is unknown, if a file cannot be
    decoded, or if an item cannot be expressed in the dialect.
    """
    builder = _MessageBuilder(items, dialect, all_reasoning, offset, names, results or {})
    if instructions is not None:
        builder.messages.append({"role": "system", "content": instructions})
    for position, item in enumerate(items):
        builder.take(item, position)
    builder.close()
    if not dialect.hoist_system:
        return builder.messages
    system = [message["content"] for message in builder.messages if message["role"] == "system"]
    others = [message for message in builder.messages if message["role"] != "system"]
    return [{"role": "system", "content": _joined(system)}, *others] if system else others


class _PendingCall(NamedTuple):
    """A call that has not been added to a message yet. `content` is its result, or None if a separate item has the output."""

    item: Item
    position: int
    call_id: str
    content: str | list[Part] | None = None


class _MessageBuilder:
    """Converts items to chat `messages`, with one method for each role of an item."""

    def __init__(
        self, items: Sequence[Item], dialect: Dialect, all_reasoning: bool, offset: int, names: Names, results: Results
    ) -> None:
        self.messages: list[Message] = []
        self._items = items
        self._dialect = dialect
        self._offset = offset
        self._names = names
        self._results = results
        users = (position for position, item in enumerate(items) if item.get("role") == "user")
        self._reasoning_from = 0 if all_reasoning else max(users, default=0)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._has_reasoned = False  # even if the reasoning itself is not sent back
        self._has_broken_off = False  # whether the reasoning so far, or the call after it, was interrupted
        self._calls: list[_PendingCall] = []
        self._open_call_ids: set[str] = set()
        # Maps positions of calls to those of outputs, and positions of approval requests to those of responses.
        self._answers = dict(links(items))
        self._linked_outputs = frozenset(self._answers.values())
        self._summary: Message | None = None

    def take(self, item: Item, position: int) -> None:
        """Convert the next item. Raises `NotSupported` if its type is unknown, as in a history that a newer version stored."""
        kind = ITEMS.get(item["type"])
        if kind is None:
            checks.unsupported(self._path(position), f"this version does not know items of type '{item['type']}' in a history.")
        if kind.role != "nothing":
            getattr(self, kind.role)(item, position)

    def _path(self, position: int) -> str:
        return f"input[{position - self._offset}]" if position >= self._offset else "input"

    # -- one method for each role of an item -------------------------------------------------------------------------

    def message(self, item: Item, position: int) -> None:
        if item["role"] == "assistant":
            self._drop_broken_reasoning()
            self._texts.extend(part.get("text") or part.get("refusal") or "" for part in item.get("content") or ())
            return
        if item["role"] == "user" and self._has_reasoned and self.messages and self.messages[-1]["role"] == "user":
            self._texts = self._texts or [""]
        self.close()
        role = "system" if item["role"] == "developer" and not self._dialect.developer_role else item["role"]
        content = to_chat_content(item["content"], self._dialect, f"{self._path(position)}.content", flat=role != "user")
        if role == "user" and self.messages and self.messages[-1] is self._summary:
            content = _joined([self.messages.pop()["content"], content])
        self.messages.append({"role": role, "content": content})

    def compaction(self, item: Item, position: int) -> None:
        if "content" not in item:  # not decrypted
            return
        self.close()
        self._summary = {"role": "user", "content": to_chat_content(item["content"], self._dialect, self._path(position))}
        self.messages.append(self._summary)

    def reasoning(self, item: Item, position: int) -> None:
        self._has_reasoned = True
        self._drop_broken_reasoning()
        self._has_broken_off = item.get("status") == "incomplete"
        if position >= self._reasoning_from and (text := reasoning_text(item)):
            self._reasoning.append(text)

    def _drop_broken_reasoning(self) -> None:
        if self._has_broken_off:
            self._reasoning.clear()
        self._has_broken_off = False

    def call(self, item: Item, position: int) -> None:
        self._calls.append(_PendingCall(item, position, item.get("call_id", "")))
        self._open_call_ids.add(item.get("call_id", ""))

    def output(self, item: Item, position: int) -> None:
        call_id, code = item.get("call_id", ""), "missing_tool_call"
        if call_id in self._open_call_ids:
            self.close()
        if position in self._linked_outputs:
            return
        message = f"No tool call found for {_words(item)} with call_id {call_id}."
        if call := self._answered_call(call_id):
            message, code = f"The {_words(call)} {call_id} already has an output; send each output once.", "duplicate_item"
        raise BadRequest(message, param=self._path(position), code=code)

    def served_call(self, item: Item, position: int) -> None:
        if item["id"] in self._results:
            self._add_served(item, position, self._results[item["id"]])
        elif is_finished(item):
            self._add_served(item, position, output_of(item))
        else:
            self._has_broken_off = not self._texts

    def approval_request(self, item: Item, position: int) -> None:
        answer = self._items[self._answers[position]] if position in self._answers else {"approve": True}
        if not answer["approve"]:
            reason = answer.get("reason")
            self._add_served(item, position, "The user did not approve this call." + (f" Reason: {reason}" if reason else ""))

    # -- the assistant's message, and the outputs of its calls -------------------------------------------------------

    def _add_served(self, item: Item, position: int, content: str | list[Part]) -> None:
        self._calls.append(_PendingCall(item, position, item["id"], content))  # closed at once, because no output refers to it
        self.close()

    def close(self) -> None:
        """Finish the current assistant message, and add the outputs of its calls."""
        waited = [(call, self._output_for(call)) for call in self._calls]
        answered = [(call, *output) for call, output in waited if output is not None]
        texts, reasoning = self._texts, self._reasoning
        self._texts, self._reasoning, self._calls = [], [], []
        self._has_reasoned = self._has_broken_off = False
        self._open_call_ids.clear()
        if texts or answered:
            self._add_assistant("\n".join(texts), "\n".join(reasoning), [call for call, *_ in answered])
        self._add_outputs(answered)

    def _add_outputs(self, answered: Sequence[tuple[_PendingCall, str | list[Part], int]]) -> None:
        shown: list[dict[str, Any]] = []
        for call, content, position in answered:
            message, others = to_tool_content(call.call_id, content, self._dialect, f"{self._path(position)}.output")
            self.messages.append(message)
            shown.extend(others)
        if shown:  # after all outputs, because nothing may separate calls from outputs
            self.messages.append({"role": "user", "content": shown})

    def _output_for(self, call: _PendingCall) -> tuple[str | list[Part], int] | None:
        """Return the output of a call, and the position of the item that contains it.

        Return None if the call was interrupted and never executed. Raises `BadRequest` if any other call has no output.
        """
        if call.content is not None:
            return call.content, call.position
        if call.position in self._answers:
            position = self._answers[call.position]
            item = self._items[position]
            is_search = item["type"] == "tool_search_output"
            return search_output(item["tools"], self._names) if is_search else output_of(item), position
        if call.item.get("status") != "incomplete":
            self._refuse_unanswered(call)
        return None

    def _refuse_unanswered(self, call: _PendingCall) -> NoReturn:
        where, first = self._path(call.position), self._answered_call(call.call_id)
        # Some clients resend calls that are already in the history.
        if first is not None and _is_same(first, call.item):
            shown = f"id {first['id']}" if "id" in first else f"call_id {call.call_id}"
            why = f"the {_words(first)} {call.call_id} is already in the history; send only its output."
            raise BadRequest(f"Duplicate item found with {shown}: {why}", param=where, code="duplicate_item")
        message = f"No tool output found for {_words(call.item)} {call.call_id}."
        raise BadRequest(message, param=where, code="missing_tool_output")

    def _add_assistant(self, text: str, reasoning: str, calls: list[_PendingCall]) -> None:
        message: Message = {"role": "assistant"}
        if text or not calls:
            message["content"] = text
        if reasoning and self._dialect.reasoning_field:
            message[self._dialect.reasoning_field] = reasoning
        if calls:
            if text and not self._dialect.content_with_calls:
                self.messages.append(message)
                message = {"role": "assistant"}
            message["tool_calls"] = [self._chat_call(call) for call in calls]
        self.messages.append(message)

    def _chat_call(self, call: _PendingCall) -> dict[str, Any]:
        function = {"name": self._names(call.item), "arguments": _chat_arguments(arguments_of(call.item), self._dialect)}
        return {"id": call.call_id, "type": "function", "function": function}

    def _answered_call(self, call_id: str) -> Item | None:
        calls = [position for position in self._answers if self._items[position].get("call_id") == call_id]
        return self._items[min(calls)] if calls else None


def _is_same(one: Item, other: Item) -> bool:
    is_same_tool = one["type"] == other["type"] and one.get("name") == other.get("name")
    return is_same_tool and arguments_of(one) == arguments_of(other)


def _words(item: Item) -> str:
    return str(item["type"]).replace("_", " ")


def _chat_arguments(arguments: str, dialect: Dialect) -> Any:
    if not dialect.parse_arguments:
        return arguments
    parsed = parse_arguments(arguments)
    if parsed is None:  # the model wrote invalid JSON, but an output refers to the call
        parsed = {"malformed_arguments": arguments}
        arguments = orjson.dumps(parsed).decode()
    if not dialect.object_arguments:
        return arguments
    checks.depth(parsed, MAX_NESTING)
    return parsed


def _joined(contents: list[Content]) -> Content:
    """Join contents to a string if all are strings, otherwise to a list of parts."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    lists = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [part for parts in lists for part in parts]
