"""Types of the JSON objects of the Responses and Chat Completions APIs, and of events.

The objects are plain dictionaries, because a proxy must pass on fields that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Item: TypeAlias = dict[str, Any]  # an input or output item of a response: a message, a reasoning item, a function call, ...
Part: TypeAlias = dict[str, Any]  # a content part of an item: `input_text`, `output_text`, `refusal`, `reasoning_text`, ...
Tool: TypeAlias = dict[str, Any]  # a tool definition of a request, in the flat form of the Responses API
Document: TypeAlias = dict[str, Any]  # a response object, as `GET /v1/responses/{id}` returns it
Message: TypeAlias = dict[str, Any]  # a chat message, as `/v1/chat/completions` accepts it
ChatRequest: TypeAlias = dict[str, Any]  # the body of a Chat Completions request
Chunk: TypeAlias = dict[str, Any]  # a `chat.completion.chunk`, a completion converted to one, or an event of a Responses API


@dataclass(slots=True)  # created for each token, in half the time of a named tuple
class Event:
    """An event in the stream of a response. The event and its data must not be changed after creation."""

    type: str
    data: dict[str, Any]  # all members, including `type` and `sequence_number`
