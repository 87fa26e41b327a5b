"""From items to chat messages.

1. Adjacent items of the assistant's side (reasoning, text, calls) are one chat message: that is how the chat form says it.
2. The outputs of calls follow the message with the calls, in the calls' order, wherever they stood among the items; images
   in them follow all of them, in a user's message: a tool's message holds text. A call
   that was cut (``incomplete``) and has no output was never executed: it is left out. Any other call without an output, and
   any output without a call, is OpenAI's 400.
3. A call that was carried out here has its result in its item, which ends the message: the next item came after it was known.
4. A call that waits for an approval says nothing, and once it is approved its ``mcp_call`` does; the model is told of one that
   was declined.
5. Reasoning goes back to the model within the current tool loop only, that is after the last user message, unless
   ``reasoning.context`` is ``all_turns``; and only where the dialect has a place for it.
6. System and developer messages stay where they are, unless the dialect needs them first.
7. A summary in place of earlier items is a user's message, and one with the user's message that follows: some chat templates
   refuse two of them in a row.

To give another type of item to the model, add a line to ``_Fold.STEPS``, and what it says to ``callitems``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from ...errors import BadRequest
from ..request import checks
from ..types import Item, Message, Part
from .call_items import MAX_NESTING, NOT_APPROVED, arguments_of, has_output, output_of
from .client_tools import found, history_name
from .dialects import Dialect
from .parts import Content, to_chat_content, to_tool_content
from .reasoning import text_of
from .tool_calls import parse_arguments

Names = Callable[[Item], str]
"""The name of the function that an item calls."""
Results = Mapping[str, str | list[Part]]
"""What the model sees of calls that were carried out here, by their items' ids, instead of what the items show."""


def to_messages(
    items: Sequence[Item],
    dialect: Dialect,
    *,
    instructions: str | None = None,
    all_reasoning: bool = False,
    offset: int = 0,
    names: Names | None = None,
    results: Results | None = None,
) -> list[Message]:
    """The chat messages that say what ``items`` say. Error paths count from ``offset``, where the own input begins."""
    fold = _Fold(items, dialect, all_reasoning, offset, names or history_name, results or {})
    if instructions is not None:
        fold.messages.append({"role": "system", "content": instructions})
    for position, item in enumerate(items):
        fold.take(item, position)
    fold.close()
    fold.refuse_stray_outputs()
    return _hoisted(fold.messages) if dialect.hoist_system else fold.messages


@dataclass(frozen=True, slots=True)
class _Called:
    """A call, and what it came to where its item tells that."""

    item: Item
    position: int
    call_id: str
    content: str | list[Part] | None = None


class _Fold:
    """Items go in one by one; ``messages`` grows."""

    def __init__(
        self, items: Sequence[Item], dialect: Dialect, all_reasoning: bool, offset: int, names: Names, results: Results
    ) -> None:
        self.messages: list[Message] = []
        self._dialect = dialect
        self._offset = offset
        self._names = names
        self._results = results
        users = (position for position, item in enumerate(items) if item.get("role") == "user")
        self._reasoning_from = 0 if all_reasoning else max(users, default=0)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Called] = []
        self._open_call_ids: set[str] = set()
        # Some models number their calls anew in each turn: the n-th call with an id goes with the n-th output.
        self._outputs: defaultdict[str, deque[tuple[int, Item]]] = defaultdict(deque)
        self._declined: dict[str, Item] = {}
        self._summary: Message | None = None
        for position, item in enumerate(items):
            if item["type"] == "mcp_approval_response" and not item["approve"]:
                self._declined[item["approval_request_id"]] = item
            elif self.STEPS.get(item["type"]) is _Fold.output:
                self._outputs[item["call_id"]].append((position, item))

    def take(self, item: Item, position: int) -> None:
        """The next item. One that was stored where more types are known cannot be said to the model."""
        step = self.STEPS.get(item["type"])
        if step is None:
            checks.unsupported(self.path(position), f"items of type '{item['type']}' in a history are not known here.")
        step(self, item, position)

    def path(self, position: int) -> str:
        return f"input[{position - self._offset}]" if position >= self._offset else "input"

    # -- one step for each type of item ------------------------------------------------------------------------------

    def message(self, item: Item, position: int) -> None:
        if item["role"] == "assistant":
            self._texts.extend(part.get("text") or part.get("refusal") or "" for part in item["content"])
            return
        self.close()
        role = "system" if item["role"] == "developer" and not self._dialect.developer_role else item["role"]
        content = to_chat_content(item["content"], self._dialect, f"{self.path(position)}.content", flat=role != "user")
        if role == "user" and self.messages and self.messages[-1] is self._summary:
            content = _joined([self.messages.pop()["content"], content])
        self.messages.append({"role": role, "content": content})

    def compaction(self, item: Item, position: int) -> None:
        """One that has been opened; another says nothing."""
        if "content" not in item:
            return
        self.close()
        self._summary = {"role": "user", "content": to_chat_content(item["content"], self._dialect, self.path(position))}
        self.messages.append(self._summary)

    def reasoning(self, item: Item, position: int) -> None:
        if position >= self._reasoning_from and self._dialect.reasoning_field:
            text = text_of(item)
            if text:
                self._reasoning.append(text)

    def call(self, item: Item, position: int) -> None:
        self._calls.append(_Called(item, position, item["call_id"]))
        self._open_call_ids.add(item["call_id"])

    def output(self, item: Item, _position: int) -> None:
        if item["call_id"] in self._open_call_ids:
            self.close()

    def served_call(self, item: Item, position: int) -> None:
        if item["id"] in self._results:
            self._add_served(item, position, self._results[item["id"]])
        elif has_output(item):
            self._add_served(item, position, output_of(item))

    def approval_request(self, item: Item, position: int) -> None:
        if item["id"] in self._declined:
            reason = self._declined[item["id"]].get("reason")
            self._add_served(item, position, f"{NOT_APPROVED} Reason: {reason}" if reason else NOT_APPROVED)

    def nothing(self, _item: Item, _position: int) -> None:
        """It says nothing to the model by itself."""

    STEPS: ClassVar[dict[str, Callable[[_Fold, Item, int], None]]] = {
        "message": message,
        "reasoning": reasoning,
        "compaction": compaction,
        "compaction_trigger": nothing,
        "function_call": call,
        "custom_tool_call": call,
        "tool_search_call": call,
        "local_shell_call": call,
        "shell_call": call,
        "apply_patch_call": call,
        "function_call_output": output,
        "custom_tool_call_output": output,
        "tool_search_output": output,
        "local_shell_call_output": output,
        "shell_call_output": output,
        "apply_patch_call_output": output,
        "mcp_call": served_call,
        "code_interpreter_call": served_call,
        "web_search_call": served_call,
        "mcp_approval_request": approval_request,
        "mcp_approval_response": nothing,
        "mcp_list_tools": nothing,
        "additional_tools": nothing,
    }

    # -- the assistant's message, and the outputs of its calls -------------------------------------------------------

    def _add_served(self, item: Item, position: int, content: str | list[Part]) -> None:
        self._calls.append(_Called(item, position, item["id"], content))  # closed at once: no output can name it
        self.close()

    def close(self) -> None:
        """Ends the assistant's message that is being gathered, and gives its calls their outputs."""
        waited = [(call, self._output_for(call)) for call in self._calls]
        answered = [(call, *output) for call, output in waited if output is not None]
        texts, reasoning = self._texts, self._reasoning
        self._texts, self._reasoning, self._calls = [], [], []
        self._open_call_ids.clear()
        if texts or answered:
            self._add_assistant("\n".join(texts), "\n".join(reasoning), [call for call, *_ in answered])
        shown: list[dict[str, Any]] = []
        for call, content, position in answered:
            message, others = to_tool_content(call.call_id, content, self._dialect, f"{self.path(position)}.output")
            self.messages.append(message)
            shown.extend(others)
        if shown:  # after all the outputs: nothing may stand between them and their calls
            self.messages.append({"role": "user", "content": shown})

    def _output_for(self, call: _Called) -> tuple[str | list[Part], int] | None:
        """What the model is to read of the call's output, and where that stands; None for a call that was never executed."""
        if call.content is not None:
            return call.content, call.position
        waiting = self._outputs[call.call_id]
        if waiting:
            position, item = waiting.popleft()
            return found(item["tools"], self._names) if item["type"] == "tool_search_output" else output_of(item), position
        if call.item.get("status") != "incomplete":
            message = f"No tool output found for {_words(call.item)} {call.call_id}."
            raise BadRequest(message, param=self.path(call.position), code="missing_tool_output")
        return None

    def _add_assistant(self, text: str, reasoning: str, calls: list[_Called]) -> None:
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

    def _chat_call(self, call: _Called) -> dict[str, Any]:
        function = {"name": self._names(call.item), "arguments": _chat_arguments(arguments_of(call.item), self._dialect)}
        return {"id": call.call_id, "type": "function", "function": function}

    def refuse_stray_outputs(self) -> None:
        for call_id, left in self._outputs.items():
            if left:
                position, item = left[0]
                message = f"No tool call found for {_words(item)} with call_id {call_id}."
                raise BadRequest(message, param=self.path(position), code="missing_tool_call")


def _words(item: Item) -> str:
    return str(item["type"]).replace("_", " ")


def _chat_arguments(arguments: str, dialect: Dialect) -> Any:
    if not dialect.parse_arguments:
        return arguments
    parsed = parse_arguments(arguments)
    if parsed is None:  # the model wrote no JSON, and the client says so in the output: the model is to see both
        parsed = {"malformed_arguments": arguments}
        arguments = orjson.dumps(parsed).decode()
    if not dialect.object_arguments:
        return arguments
    checks.depth(parsed, MAX_NESTING)
    return parsed


def _hoisted(messages: list[Message]) -> list[Message]:
    system = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": _joined(system)}, *rest] if system else rest


def _joined(contents: list[Content]) -> Content:
    """One content of several: a text where all of them are, else the parts of all (a system message with an image)."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if isinstance(content, str))
    lists = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [part for parts in lists for part in parts]
