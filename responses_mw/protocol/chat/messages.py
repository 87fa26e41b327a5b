"""Build the chat messages for a list of items.

1. Adjacent assistant items (reasoning, text, calls) become one chat message.
2. The outputs of calls directly follow the message with the calls, in the order of the calls. Tool messages hold only text.
   Therefore, the other parts of outputs, such as images, follow in one user message. A message that stands before an output,
   after the call, goes ahead of the message with the call.
3. A call without an output gets OpenAI's 400, and so does an output without a call. Interrupted (`incomplete`) calls without
   an output are an exception. They were never executed, and are left out.
4. If the server executed a call, the call's item contains the result. The model has seen the result before it wrote the next
   item, unless this item has the mark of the same turn (`origin`). So an item without the mark begins another message.
5. If the user approves a call, the model sees the call where it requested the approval, with the result in the `mcp_call` item.
   If the user declines, the model sees a note that the call was not approved. An unanswered request is left out.
6. Reasoning is sent back only if the dialect has a field for reasoning. By default, only the reasoning after the last user
   message is sent. If `reasoning.context` is `all_turns`, all reasoning is sent.
7. Some chat templates refuse two user messages in a row, or a user message after results. Therefore, a turn that leaves nothing
   (only reasoning, calls that are left out) becomes an empty assistant message. The summary of a compaction is joined with the
   user message that follows.
8. Reasoning was interrupted if it is `incomplete`, or if an interrupted server-side call follows it. The model did not see this
   reasoning when the answer was requested again. Therefore, it is left out if more reasoning or text follows.
9. A call has the id and the other members that the upstream gave it (`origin`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import orjson

from ...errors import BadRequest
from .. import checks, json_limits, origin
from ..dialects import Dialect
from ..parts import Content, is_unfinished, reasoning_text, to_chat_content, to_tool_content
from ..request.items import ITEMS
from ..request.tools import history_name, search_output
from ..tool_kinds.form import MAX_NESTING, Role, parse_arguments
from ..tool_kinds.registry import arguments_of, is_finished, output_of
from ..types import Item, Message, Part
from .order import WRITTEN, approved_calls, early_messages, role_of
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
    content: str | list[Part] | None = None

    @property
    def call_id(self) -> str:
        return str(self.item.get("call_id", ""))


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
        # Maps positions of calls to those of outputs, and positions of approval requests to those of responses.
        self._answers = dict(links(items))
        self._linked_outputs = frozenset(self._answers.values())
        self._roles = [role_of(item) for item in items]
        self._early = early_messages(self._roles, self._answers)
        self._approved = approved_calls(items) if Role.APPROVAL_REQUEST in self._roles else {}
        self._moved_calls = frozenset(self._approved.values())
        users = (position for position, item in enumerate(items) if item.get("role") == "user" and position not in self._early)
        self._reasoning_from = 0 if all_reasoning else max(users, default=0)
        self._last_role = ""  # role of the last message that is no system or developer message
        self._summary: Message | None = None
        self._is_unfinished = False  # whether the last item is a message that the model continues
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_PendingCall] = []
        self._open_call_ids: set[str] = set()
        self._has_results = False  # whether a result of the message's calls is known
        self._has_broken_off = False  # whether the reasoning so far, or the call after it, was interrupted
        self._has_reasoned = False  # even if the reasoning itself is not sent back
        self._has_left_out = False  # whether a call was left out

    def take(self, item: Item, position: int) -> None:
        """Convert the next item. Raises `NotSupported` if its type is unknown, as in a history that a newer version stored."""
        kind = ITEMS.get(item["type"])
        if kind is None:
            checks.unsupported(self._path(position), f"this version does not know items of type '{item['type']}' in a history.")
        if kind.role is Role.NOTHING or position in self._moved_calls:
            return
        if self._has_results and self._roles[position] in WRITTEN and not origin.is_same_turn(item):
            self.close()
        self._convert(kind.role, item, position)
        self._is_unfinished = self._dialect.prefill is not None and is_unfinished(item)

    def _convert(self, role: Role, item: Item, position: int) -> None:
        match role:
            case Role.MESSAGE:
                self._convert_message(item, position)
            case Role.REASONING:
                self._convert_reasoning(item, position)
            case Role.COMPACTION:
                self._convert_compaction(item, position)
            case Role.CALL:
                self._convert_call(item, position)
            case Role.OUTPUT:
                self._check_output(item, position)
            case Role.SERVED_CALL:
                self._convert_served_call(item, position)
            case Role.APPROVAL_REQUEST:
                self._convert_approval_request(item, position)

    def _path(self, position: int) -> str:
        return f"input[{position - self._offset}]" if position >= self._offset else "input"

    # -- one method for each role of an item -------------------------------------------------------------------------

    def _convert_message(self, item: Item, position: int) -> None:
        if item["role"] == "assistant":
            self._drop_broken_reasoning()
            texts = [part.get("text") or part.get("refusal") or "" for part in item.get("content") or ()]
            if self._is_unfinished and self._texts and texts:
                self._texts[-1] += texts.pop(0)  # the model has continued its message
            self._texts.extend(texts)
            return
        role = "system" if item["role"] == "developer" and not self._dialect.developer_role else item["role"]
        content = to_chat_content(item["content"], self._dialect, f"{self._path(position)}.content", flat=role != "user")
        if position not in self._early:
            self._end_turn()
        if role == "user" and self.messages and self.messages[-1] is self._summary:
            content = _joined([self.messages.pop()["content"], content])
        self._add({"role": role, "content": content})

    def _convert_compaction(self, item: Item, position: int) -> None:
        if "content" not in item:  # not decrypted
            return
        self.close()
        self._summary = {"role": "user", "content": to_chat_content(item["content"], self._dialect, self._path(position))}
        self._add(self._summary)

    def _convert_reasoning(self, item: Item, position: int) -> None:
        self._has_reasoned = True
        self._drop_broken_reasoning()
        self._has_broken_off = item.get("status") == "incomplete"
        if position >= self._reasoning_from and (text := reasoning_text(item)):
            self._reasoning.append(text)

    def _drop_broken_reasoning(self) -> None:
        if self._has_broken_off:
            self._reasoning.clear()
        self._has_broken_off = False

    def _convert_call(self, item: Item, position: int) -> None:
        self._calls.append(call := _PendingCall(item, position))
        self._open_call_ids.add(call.call_id)
        self._has_left_out |= item.get("status") == "incomplete" and position not in self._answers

    def _check_output(self, item: Item, position: int) -> None:
        call_id, code = item.get("call_id", ""), "missing_tool_call"
        self._has_results |= call_id in self._open_call_ids
        if position in self._linked_outputs:
            return
        message = f"No tool call found for {_words(item)} with call_id {call_id}."
        if call := self._answered_call(call_id):
            message, code = f"The {_words(call)} {call_id} already has an output; send each output once.", "duplicate_item"
        raise BadRequest(message, param=self._path(position), code=code)

    def _convert_served_call(self, item: Item, position: int) -> None:
        content = self._result_of(item)
        if content is not None:
            self._add_served(item, position, content)
            return
        self._has_left_out = True
        if not self._has_results:
            self._has_broken_off = not self._texts

    def _convert_approval_request(self, item: Item, position: int) -> None:
        if position in self._approved:
            executed = self._approved[position]
            content = self._result_of(self._items[executed])
            if content is not None:
                self._add_served(item, executed, content)
                return
        answer = self._items[self._answers[position]] if position in self._answers else {"approve": True}
        if answer["approve"]:
            self._has_left_out = True
        else:
            reason = answer.get("reason")
            self._add_served(item, position, "The user did not approve this call." + (f" Reason: {reason}" if reason else ""))

    def _result_of(self, item: Item) -> str | list[Part] | None:
        """Return the result of a server-side call, or None if the call was not executed."""
        if item["id"] in self._results:
            return self._results[item["id"]]
        return output_of(item) if is_finished(item) else None

    # -- the assistant's message, and the outputs of its calls -------------------------------------------------------

    def _add_served(self, item: Item, position: int, content: str | list[Part]) -> None:
        self._calls.append(_PendingCall(item, position, content))
        self._has_results = True

    def _end_turn(self) -> None:
        """Finish the current assistant message, before a message of another role. If nothing is left, it is empty (rule 7)."""
        has_left_out = self._has_left_out
        if (has_left_out or self._has_reasoned) and self._last_role in ("user", "tool"):
            self._texts = self._texts or [""]
        self.close()
        if has_left_out and self._last_role == "tool":
            self._add_assistant("", "", [])

    def close(self) -> None:
        """Finish the current assistant message, and add the outputs of its calls."""
        waited = [(call, self._output_for(call)) for call in self._calls]
        answered = [(call, *output) for call, output in waited if output is not None]
        texts, reasoning = self._texts, self._reasoning
        self._begin_turn()
        if texts or answered:
            self._add_assistant("\n".join(texts), "\n".join(reasoning), [call for call, *_ in answered])
        self._add_outputs(answered)

    def _add_outputs(self, answered: Sequence[tuple[_PendingCall, str | list[Part], int]]) -> None:
        shown: list[dict[str, Any]] = []
        for call, content, position in answered:
            path = f"{self._path(position)}.output"
            message, others = to_tool_content(origin.id_of(call.item), content, self._dialect, path)
            self._add(message)
            shown.extend(others)
        if shown:  # after all outputs, because nothing may separate calls from outputs
            self._add({"role": "user", "content": shown})

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        if message["role"] not in ("system", "developer"):
            self._last_role = message["role"]

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
                self._add(message)
                message = {"role": "assistant"}
            message["tool_calls"] = [self._chat_call(call.item) for call in calls]
        self._add(message)

    def _chat_call(self, item: Item) -> dict[str, Any]:
        return origin.chat_call(item, self._names(item), _chat_arguments(arguments_of(item), self._dialect))

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
    json_limits.depth(parsed, MAX_NESTING)
    return parsed


def _joined(contents: list[Content]) -> Content:
    """Join contents to a string if all are strings, otherwise to a list of parts."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    lists = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [part for parts in lists for part in parts]
