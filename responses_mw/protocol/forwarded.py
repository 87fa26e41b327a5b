"""From a request to the body of another ``/v1/responses``, for an upstream that speaks the Responses API itself.

The history is ours: the upstream gets all the items and stores none. What names something that only we have (the previous
response, the conversation, a background run, metadata) stays here; the rest goes as the caller said it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .request import CreateResponse
from .types import Item

_FORWARDED = (
    "enable_response_messages",
    "frequency_penalty",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)
_UNSET: dict[str, Any] = {
    "enable_response_messages": False,
    "reasoning": {},
    "text": {},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


def to_responses(request: CreateResponse, items: Sequence[Item], *, model: str) -> dict[str, Any]:
    """The body for one run. ``items`` is all that the model is to see, each with its id; ``model`` is the upstream's name."""
    body: dict[str, Any] = {
        **request.extra,
        "model": model,
        "input": [_sent(item) for item in items if _says_something(item)],
        "store": False,
    }
    for name in _FORWARDED:
        value = getattr(request, name)
        if value is not None and value != _UNSET.get(name):
            body[name] = value
    if request.include:
        body["include"] = sorted(request.include)
    if request.stream:
        body["stream"] = True
        if "include_obfuscation" in request.stream_options:  # include_usage is Chat Completions' own
            body["stream_options"] = {"include_obfuscation": request.stream_options["include_obfuscation"]}
    return body


def _says_something(item: Item) -> bool:
    """A reasoning item without its text is a reference to what the upstream would have stored: it refuses one."""
    return item["type"] != "reasoning" or bool(item.get("content") or item.get("encrypted_content"))


def _sent(item: Item) -> Item:
    """``item`` with its id where the upstream's checks may want one. Sealed reasoning must not have another than it was sealed
    with (OpenAI: "Encrypted content item_id did not match the target item id"); without one it is taken. A summary of ours that
    has been opened is the user's message."""
    if item["type"] == "compaction" and "content" in item:
        return {"type": "message", "role": "user", "content": item["content"]}
    is_callers = item["type"] == "message" and item["role"] != "assistant"
    if is_callers or item.get("encrypted_content"):
        return {name: value for name, value in item.items() if name != "id"}
    return item
