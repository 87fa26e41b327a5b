"""The outer shape of chat chunks, and of whole completions brought into it."""

from __future__ import annotations

from typing import Any

from .checks import malformed
from .types import Chunk


def choices_of(chunk: Chunk) -> list[dict[str, Any]]:
    """The ``choices``, which may be absent or null. Raises ``UpstreamError`` where they are no list of objects."""
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        malformed("choices")
    for choice in choices:
        if not isinstance(choice, dict):
            malformed("choices")
    return choices


def text_of_parts(parts: list[Any]) -> str:
    """The text of a content that is a list of parts (Mistral's own API)."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def as_chunk(completion: dict[str, Any]) -> Chunk:
    """A whole ``chat.completion`` as the one chunk of a stream, so that there is one path for both."""
    return {**completion, "choices": [{**choice, "delta": _delta(choice)} for choice in choices_of(completion)]}


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    if not isinstance(message, dict):
        malformed("message")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        malformed("tool_calls")
    return {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}
