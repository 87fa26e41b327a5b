"""From items to chat messages.

1. Adjacent items of the assistant's side (reasoning, text, calls) are one chat message: that is how the chat form says it.
2. The outputs of calls follow the message with the calls, in the calls' order, wherever they stood among the items; images
   in them follow all of them, in a user's message: a tool's message holds text. A call
   that was cut (``incomplete``) and has no output was never executed: it is left out. Any other call without an output, and
   any output without a call, is OpenAI's 400.
3. Reasoning goes back to the model within the current tool loop only, that is after the last user message, unless
   ``reasoning.context`` is ``all_turns``; and only where the dialect has a place for it.
4. System and developer messages stay where they are, unless the dialect needs them first.

To give another type of item to the model, add a method and a line to ``_Fold.STEPS``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import orjson

from ..errors import BadRequest
from . import checks
from .dialects import Dialect
from .parts import Content, to_chat_content, to_tool_content
from .reasoning import text_of
from .toolcalls import parse_arguments
from .types import Item, Message

MAX_NESTING = 128
"""How deep the arguments of a call may be nested that are sent as an object: JSON encoders have an end."""


def to_messages(
    items: Sequence[Item],
    dialect: Dialect,
    *,
    instructions: str | None = None,
    all_reasoning: bool = False,
    offset: int = 0,
) -> list[Message]:
    """The chat messages that say what ``items`` say. Error paths count from ``offset``, where the own input begins."""
    fold = _Fold(items, dialect, all_reasoning=all_reasoning, offset=offset)
    if instructions is not None:
        fold.messages.append({"role": "system", "content": instructions})
    for position, item in enumerate(items):
        fold.STEPS[item["type"]](fold, item, position)
    fold.close()
    fold.refuse_stray_outputs()
    return _hoisted(fold.messages) if dialect.hoist_system else fold.messages


class _Fold:
    """Items go in one by one; ``messages`` grows."""

    def __init__(self, items: Sequence[Item], dialect: Dialect, *, all_reasoning: bool, offset: int) -> None:
        self.messages: list[Message] = []
        self._dialect = dialect
        self._offset = offset
        users = (position for position, item in enumerate(items) if item.get("role") == "user")
        self._reasoning_from = 0 if all_reasoning else max(users, default=0)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[int, Item]] = []
        # Some models number their calls anew in each turn: the n-th call with an id goes with the n-th output.
        self._outputs: defaultdict[str, deque[tuple[int, Item]]] = defaultdict(deque)
        for position, item in enumerate(items):
            if item["type"] == "function_call_output":
                self._outputs[item["call_id"]].append((position, item))

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
        self.messages.append({"role": role, "content": content})

    def reasoning(self, item: Item, position: int) -> None:
        if position >= self._reasoning_from and self._dialect.reasoning_field:
            text = text_of(item)
            if text:
                self._reasoning.append(text)

    def function_call(self, item: Item, position: int) -> None:
        self._calls.append((position, item))

    def function_call_output(self, item: Item, _position: int) -> None:
        if any(call["call_id"] == item["call_id"] for _, call in self._calls):
            self.close()

    STEPS: ClassVar[dict[str, Callable[[_Fold, Item, int], None]]] = {
        "message": message,
        "reasoning": reasoning,
        "function_call": function_call,
        "function_call_output": function_call_output,
    }

    # -- the assistant's message, and the outputs of its calls -------------------------------------------------------

    def close(self) -> None:
        """Ends the assistant's message that is being gathered, and gives its calls their outputs."""
        waited = [(call, self._output_of(call, position)) for position, call in self._calls]
        answered = [(call, output) for call, output in waited if output is not None]
        texts, reasoning = self._texts, self._reasoning
        self._texts, self._reasoning, self._calls = [], [], []
        if texts or answered:
            self._add_assistant("\n".join(texts), "\n".join(reasoning), [call for call, _ in answered])
        shown: list[dict[str, Any]] = []
        for _, (position, output) in answered:
            message, others = to_tool_content(output, self._dialect, f"{self.path(position)}.output")
            self.messages.append(message)
            shown.extend(others)
        if shown:  # after all the outputs: nothing may stand between them and their calls
            self.messages.append({"role": "user", "content": shown})

    def _output_of(self, call: Item, position: int) -> tuple[int, Item] | None:
        waiting = self._outputs[call["call_id"]]
        if waiting:
            return waiting.popleft()
        if call.get("status") != "incomplete":
            message = f"No tool output found for function call {call['call_id']}."
            raise BadRequest(message, param=self.path(position), code="missing_tool_output")
        return None

    def _add_assistant(self, text: str, reasoning: str, calls: list[Item]) -> None:
        message: Message = {"role": "assistant"}
        if text or not calls:
            message["content"] = text
        if reasoning and self._dialect.reasoning_field:
            message[self._dialect.reasoning_field] = reasoning
        if calls:
            if text and not self._dialect.content_with_calls:
                self.messages.append(message)
                message = {"role": "assistant"}
            message["tool_calls"] = [_chat_call(call, self._dialect) for call in calls]
        self.messages.append(message)

    def refuse_stray_outputs(self) -> None:
        for call_id, left in self._outputs.items():
            if left:
                message = f"No tool call found for function call output with call_id {call_id}."
                raise BadRequest(message, param=self.path(left[0][0]), code="missing_tool_call")


def _chat_call(call: Item, dialect: Dialect) -> dict[str, Any]:
    arguments: Any = call["arguments"] or "{}"
    if dialect.parse_arguments:
        parsed = parse_arguments(arguments)
        if parsed is None:  # the model wrote no JSON, and the client says so in the output: the model is to see both
            parsed = {"malformed_arguments": arguments}
            arguments = orjson.dumps(parsed).decode()
        if dialect.object_arguments:
            checks.depth(parsed, MAX_NESTING)
            arguments = parsed
    return {"id": call["call_id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}


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
