"""The cache key of a request: the partition, the last user text, and the hash of both.

The partition is a hash of everything that shapes an answer except the last user text. In doubt a field is included: a
superfluous field costs hits, a missing field causes wrong answers. Every field of ``CreateResponse`` is hashed unless it is in
``NEUTRAL``.

A request is cacheable only if its last turn is exactly one user text, the model cannot call a tool (including those that the
history brings), and there is no image, file, audio or video anywhere: the content behind a URL may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from ..protocol.request.create import CreateResponse
from ..protocol.request.tools import BRINGS_TOOLS
from ..protocol.types import Item

VERSION = 3
"""Version of hashes and records. Entries of other versions are never found."""

NEUTRAL = frozenset(
    {
        "items",  # hashed as the history that the model sees, including previous responses
        "previous_response_id",
        "conversation",
        "background",  # never cached
        "background_options",
        "enable_response_messages",  # never cached
        "metadata",
        "store",
        "stream",
        "stream_options",
        "prompt",  # already expanded into the other fields
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "size",
        "cache",
    }
)
"""Fields of a request that do not affect its answer."""

NEUTRAL_HEADERS = frozenset({"authorization", "traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority"})
"""Forwarded headers that do not affect an answer; the credential is represented by the owner."""

_TEXT_PARTS = frozenset({"input_text", "text", "output_text", "refusal", "reasoning_text", "summary_text"})
_ITEM_IDENTITY = frozenset({"id", "status"})
_APPROVAL = "mcp_approval_response"
"""The approved call runs before the model is called."""


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a request. ``exact`` is the hash of ``partition`` and ``text``."""

    owner: str
    partition: str
    text: str
    exact: str


def key_of(
    request: CreateResponse,
    items: Sequence[Item],
    *,
    owner: str,
    model: str,
    headers: Mapping[str, str] | None = None,
    deployment: str = "",
) -> Key | None:
    """Return the key of ``request``; None if it is not cacheable.

    ``items`` is everything that the model sees, with the input last; ``model`` is the upstream's name for the model;
    ``headers`` are the forwarded headers; ``deployment`` distinguishes upstreams.
    """
    if obstacle(request, items):
        return None
    *history, last = items
    text = _user_text(last)
    assert text is not None
    shape = {
        "version": VERSION,
        "owner": owner,
        "model": model,
        "deployment": deployment,
        "headers": {name: value for name, value in (headers or {}).items() if name.lower() not in NEUTRAL_HEADERS},
        "request": {name: _field(request, name) for name in _HASHED_FIELDS},
        "history": [_without(item, _ITEM_IDENTITY) for item in history],
        "last": {**_without(last, _ITEM_IDENTITY), "content": _without(last["content"][0], {"text"})},
    }
    partition = _hash(orjson.dumps(shape, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    return Key(owner, partition, text, _hash(partition.encode() + b"\0" + text.encode("utf-8", "surrogatepass")))


_HASHED_FIELDS = tuple(field.name for field in fields(CreateResponse) if field.name not in NEUTRAL)


def obstacle(request: CreateResponse, items: Sequence[Item]) -> str:
    """Return why ``request`` is not cacheable; empty if it is.

    The reason is ``background``, ``tools``, ``logprobs``, ``messages`` (vLLM's ``enable_response_messages``), ``input`` (the
    last turn is not one user text) or ``content`` (an earlier item is not only text).
    """
    types = {item["type"] for item in items}
    has_tools = bool(request.tools or types & BRINGS_TOOLS)
    obstacles = {
        "background": request.background,
        "tools": (has_tools and request.tool_choice != "none") or _APPROVAL in types,
        "logprobs": request.wants_logprobs,
        "messages": request.enable_response_messages,
        "input": not items or _user_text(items[-1]) is None,
    }
    content = "" if all(_has_only_text(item) for item in items[:-1]) else "content"
    return next((name for name, stands in obstacles.items() if stands), content)


def _user_text(item: Item) -> str | None:
    """Return the text of a user message that has one text part; None for any other item."""
    if item.get("type") != "message" or item.get("role") != "user" or len(item["content"]) != 1:
        return None
    part = item["content"][0]
    text = part.get("text")
    return text if part["type"] in ("input_text", "text") and isinstance(text, str) and text.strip() else None


def _has_only_text(item: Item) -> bool:
    if item["type"] == "item_reference":
        return False  # an unresolved reference
    lists = [value for value in (item.get("content"), item.get("output"), item.get("summary")) if isinstance(value, list)]
    return all(part.get("type") in _TEXT_PARTS for parts in lists for part in parts)


def _field(request: CreateResponse, name: str) -> Any:
    value = getattr(request, name)
    if name == "extra":
        return {member: _in_order(given) for member, given in value.items() if member not in NEUTRAL}
    return sorted(value) if isinstance(value, frozenset) else _in_order(value)


def _in_order(value: Any) -> Any:
    """Encode objects and arrays, to preserve the order of members: a constrained model writes them in the schema's order."""
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else value


def _without(value: Mapping[str, Any], names: frozenset[str] | set[str]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if name not in names}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:40]
