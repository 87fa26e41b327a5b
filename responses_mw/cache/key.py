"""What makes two requests one question: the partition, the last user text, and the hash of both.

The partition is a hash of everything that shapes an answer, but for the last user text. It holds more than it must: what is in
it by mistake costs a hit, what is missing gives a wrong answer. Every member of ``CreateResponse`` is either named in
``NEUTRAL``, or part of it.

A request is not cacheable (its key is None) whose last turn is not the text of a user and nothing else, whose model could call
a tool (one that its history brings, too), or that has an image, a file, sound or a film anywhere: what is behind a URL changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from ..protocol.clienttools import BRINGS_TOOLS
from ..protocol.request import CreateResponse
from ..protocol.types import Item

VERSION = 3
"""Of what is hashed and kept. What another version keeps is never found."""

NEUTRAL = frozenset(
    {
        "items",  # hashed as the history that the model sees, previous responses included
        "previous_response_id",
        "conversation",
        "background",  # never cached
        "background_options",
        "metadata",
        "store",
        "stream",
        "stream_options",
        "prompt",  # what it stands for is in the rest
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "cache",
    }
)
"""Members of a request that its answer does not depend on."""

NEUTRAL_HEADERS = frozenset({"authorization", "traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority"})
"""Forwarded headers that an answer does not depend on; the credential is the owner's business."""

_TEXT_PARTS = frozenset({"input_text", "text", "output_text", "refusal", "reasoning_text", "summary_text"})
_OF_AN_ITEM_ALONE = frozenset({"id", "status"})
_APPROVAL = "mcp_approval_response"
"""The call that it lets pass runs before the model is asked."""


@dataclass(frozen=True, slots=True)
class Key:
    """Where an answer lies: whose it is, its ``partition`` and, within that, the ``text``; ``exact`` stands for all of it."""

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
    """The key of ``request``; None where it is not cacheable.

    ``items`` is all that the model is to see, the input last; ``model`` the upstream's name of it; ``headers`` are those that
    go on to the upstream, and ``deployment`` is what else tells one upstream from another.
    """
    if not _may_be_kept(request, items) or not items:
        return None
    *before, last = items
    text = _only_text(last)
    if text is None or not all(_is_text(item) for item in before):
        return None
    shape = {
        "version": VERSION,
        "owner": owner,
        "model": model,
        "deployment": deployment,
        "headers": {name: value for name, value in (headers or {}).items() if name.lower() not in NEUTRAL_HEADERS},
        "request": {name: _plain(request, name) for name in _COUNTING},
        "history": [_without_own(item) for item in before],
        "last": {**_without_own(last), "content": _without(last["content"][0], {"text"})},
    }
    partition = _hash(orjson.dumps(shape, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    return Key(owner, partition, text, _hash(partition.encode() + b"\0" + text.encode("utf-8", "surrogatepass")))


_COUNTING = tuple(field.name for field in fields(CreateResponse) if field.name not in NEUTRAL)


def text_of(request: CreateResponse) -> str | None:
    """The text by which a request is compared, as far as it tells by itself: without what it stands on."""
    return _only_text(request.items[-1]) if request.items and _may_be_kept(request, request.items) else None


def _may_be_kept(request: CreateResponse, items: Sequence[Item]) -> bool:
    types = {item["type"] for item in items}
    has_tools = bool(request.tools or types & BRINGS_TOOLS)
    could_run = (has_tools and request.tool_choice != "none") or _APPROVAL in types
    return not (request.background or could_run or request.wants_logprobs)


def _only_text(item: Item) -> str | None:
    """The text of a user's message that is nothing else."""
    if item.get("type") != "message" or item.get("role") != "user" or len(item["content"]) != 1:
        return None
    part = item["content"][0]
    text = part.get("text")
    return text if part["type"] in ("input_text", "text") and isinstance(text, str) and text.strip() else None


def _is_text(item: Item) -> bool:
    if item["type"] == "item_reference":
        return False  # it was not resolved: what it stands for is not known
    lists = [value for value in (item.get("content"), item.get("output"), item.get("summary")) if isinstance(value, list)]
    return all(part.get("type") in _TEXT_PARTS for parts in lists for part in parts)


def _plain(request: CreateResponse, name: str) -> Any:
    value = getattr(request, name)
    if name == "extra":
        return {member: _in_order(given) for member, given in value.items() if member not in NEUTRAL}
    return sorted(value) if isinstance(value, frozenset) else _in_order(value)


def _in_order(value: Any) -> Any:
    """A value whose order counts: what a schema names first, a constrained model writes first."""
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else value


def _without_own(item: Item) -> Item:
    """An item without what tells it from another that says the same."""
    return _without(item, _OF_AN_ITEM_ALONE)


def _without(value: Mapping[str, Any], names: frozenset[str] | set[str]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if name not in names}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:40]
