"""Messages as the conventions write them into spans (OpenTelemetry, "gen_ai.input.messages"). Recorded by opt-in only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"})


def input_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Convert the messages of a chat request."""
    for message in messages:
        parts = _parts(message.get("content"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            parts.append(_tool_call(call.get("id"), function.get("name"), function.get("arguments")))
        if message.get("role") == "tool":
            parts = [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}]
        yield {"role": message.get("role"), "parts": parts}


def output_messages(items: Sequence[Mapping[str, Any]], finish_reason: str | None) -> Iterator[dict[str, Any]]:
    """Convert the items that a turn produced to one assistant message."""
    parts: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "message":
            parts += _parts(item.get("content"))
        elif item["type"] == "reasoning":
            parts += [{**part, "type": "reasoning"} for part in _parts(item.get("content") or item.get("summary"))]
        elif "arguments" in item or "input" in item:
            arguments = item.get("arguments", item.get("input"))
            parts.append(_tool_call(item.get("call_id") or item["id"], item.get("name"), arguments))
    yield {"role": "assistant", "parts": parts, "finish_reason": finish_reason}


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    return [_part(part) for part in content or ()]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a text; keep only the type of any other part."""
    kind = part.get("type")
    if kind not in _TEXTS:
        return {"type": kind}
    return {"type": "text", "content": part.get("text", part.get("refusal"))}


def _tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}
