"""An entry of the cache: the key of its request, and the stored form of its answer.

The *partition* of a key is a hash of everything that affects an answer except the last user text. When in doubt, include a
field: a superfluous field only costs hits, but a missing field causes wrong answers.

A request is cacheable only if all of these are true:

- Its last item is a user message with exactly one text part.
- The model cannot call a tool, including tools that the history defines.
- The request and its history contain only text, because the content behind a URL may change.

An answer is stored only if it can be replayed exactly, as chat chunks. The question is not stored. A record has one of two
forms:

    C<json>       unencrypted
    S<envelope>   sealed with `auth.secret_keys`, bound to this entry of this owner
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson
from pydantic import TypeAdapter

from ..crypto import Sealer
from ..protocol.request.create import CreateResponse
from ..protocol.request.tools import BRINGS_TOOLS
from ..protocol.types import Chunk, Document, Item
from .guard import Signature

VERSION = 3  # version of hashes and records. Entries of other versions are never found

NEUTRAL = frozenset(
    {"items", "previous_response_id", "conversation"}  # hashed as the history that the model sees
    | {"background", "background_options", "enable_response_messages"}  # requests with these fields are never cached
    | {"prompt"}  # already expanded into the other fields
    | {"metadata", "store", "stream", "stream_options", "service_tier", "size", "cache"}
    | {"prompt_cache_options", "prompt_cache_retention"}
)
"""Fields of a request that do not affect its answer."""

NEUTRAL_HEADERS = frozenset({"authorization", "traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority"})
"""Forwarded headers that do not affect an answer. The owner represents the credential."""

_TEXT_PARTS = frozenset({"input_text", "text", "output_text", "refusal", "reasoning_text", "summary_text"})
_ITEM_IDENTITY = frozenset({"id", "status"})


@dataclass(frozen=True, slots=True)
class Key:
    """The cache key of a request.

    `text` is the last user text. `partition` is a hash of everything else that affects the answer. `exact` is a hash of both.
    """

    owner: str
    partition: str
    text: str
    exact: str


@dataclass(frozen=True, slots=True)
class Uncacheable:
    """A request that is never cached. `reason` is `uncacheable:<cause>`."""

    reason: str

    @property
    def header(self) -> str:
        """Value of the `x-responses-cache` header."""
        return f"miss; reason={self.reason}"


def key_of(
    request: CreateResponse,
    items: Sequence[Item],
    *,
    owner: str,
    model: str,
    headers: Mapping[str, str] | None = None,
    deployment: str = "",
) -> Key | Uncacheable:
    """Return the key of `request`, or the reason why the request is not cacheable.

    `items` is everything that the model sees, with the input last. `model` is the upstream's name for the model. `headers` are
    the forwarded headers. `deployment` distinguishes upstreams.
    """
    if cause := _obstacle(request, items):
        return Uncacheable(f"uncacheable:{cause}")
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
        "last": {**_without(last, _ITEM_IDENTITY), "content": _without(last["content"][0], frozenset({"text"}))},
    }
    partition = _hash(orjson.dumps(shape, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    return Key(owner, partition, text, _hash(partition.encode() + b"\0" + text.encode("utf-8", "surrogatepass")))


_HASHED_FIELDS = tuple(field.name for field in fields(CreateResponse) if field.name not in NEUTRAL)


def _obstacle(request: CreateResponse, items: Sequence[Item]) -> str:
    """Return the reason why `request` is not cacheable, or an empty string if the request is cacheable."""
    types = {item["type"] for item in items}
    has_tools = bool(request.tools or types & BRINGS_TOOLS)
    obstacles = {
        "background": request.background,
        # An approved call runs before the model is called.
        "tools": (has_tools and request.tool_choice != "none") or "mcp_approval_response" in types,
        "logprobs": request.wants_logprobs,
        "messages": request.enable_response_messages,
        "input": not items or _user_text(items[-1]) is None,
    }
    content = "" if all(_has_only_text(item) for item in items[:-1]) else "content"
    return next((name for name, is_present in obstacles.items() if is_present), content)


def _user_text(item: Item) -> str | None:
    """Return the text of a user message that consists of one text part."""
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
    # Encoding preserves the order of members, because a constrained model writes them in the order of the schema.
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else value


def _without(value: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if name not in names}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:40]


# -- records -----------------------------------------------------------------------------------------------------------------

Text = tuple[str, str]  # a kind (`reasoning` or `content`) and the text

_PARTS = {"output_text": "content", "reasoning_text": "reasoning", "summary_text": "reasoning"}
_ITEMS = {"message": ("content",), "reasoning": ("content", "summary")}
_REPLAYED = {
    "message": frozenset({"id", "type", "status", "role", "content"}),
    "reasoning": frozenset({"id", "type", "status", "content", "summary", "encrypted_content"}),
    "part": frozenset({"type", "text"}),
}
"""The members that a replay restores."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached answer. It is valid only for its `owner`, its exact `key` and its version `v`. `ttl` is in seconds."""

    owner: str
    key: str
    texts: tuple[Text, ...]
    usage: dict[str, Any] | None
    ttl: int
    signature: Signature | None = None
    v: int = VERSION


_ENTRY = TypeAdapter(Entry)


def texts_of(document: Document, *, summary: bool | None = None) -> tuple[Text, ...] | None:
    """Return the texts of a finished answer, or None if the answer is not cacheable.

    An answer is not cacheable if it failed, is incomplete, is a refusal, has a tool call, or contains anything that a replay
    would lose. `summary` is whether a replayed answer shows reasoning as a summary, or None for a Chat Completions upstream.
    """
    if document["status"] != "completed" or document.get("error") or document.get("incomplete_details"):
        return None
    texts: list[Text] = []
    for item in document["output"]:
        text = _text_of(item, summary)
        if text is None or not text[1].strip() or (texts and texts[-1][0] == text[0]):
            return None
        texts.append(text)
    return tuple(texts) if texts and texts[-1][0] == "content" else None


def _text_of(item: dict[str, Any], summary: bool | None) -> Text | None:
    lists = _ITEMS.get(item["type"])
    if lists is None or _loses_members(item, item["type"]) or item.get("status") not in (None, "completed"):
        return None
    parts = [part for name in lists for part in item.get(name) or ()]
    if len(parts) != 1 or _loses_members(parts[0], "part"):
        return None
    (part,) = parts
    kind = _PARTS.get(part["type"])
    if kind == "reasoning" and summary is not None:
        is_summary = part["type"] == "summary_text"
        if is_summary != summary or item.get("encrypted_content"):  # a replay cannot restore what the upstream encrypted
            return None
    return (kind, part["text"]) if kind else None


def _loses_members(value: dict[str, Any], kind: str) -> bool:
    return any(member for name, member in value.items() if name not in _REPLAYED[kind])


def replay(texts: Sequence[Text]) -> list[Chunk]:
    """Return the chat chunks of an answer: one for each text, and one with the finish reason."""
    chunks: list[Chunk] = [{"choices": [{"index": 0, "delta": {kind: text}}]} for kind, text in texts]
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]


def pack(entry: Entry, sealer: Sealer) -> bytes:
    """Encode `entry`, and seal it if all replicas share the sealer's keys."""
    data = orjson.dumps(entry)
    if sealer.is_shared:
        return b"S" + sealer.seal(data, purpose=f"cache {entry.key}", owner=entry.owner).encode()
    return b"C" + data


def unpack(blob: bytes, owner: str, exact: str, sealer: Sealer) -> Entry:
    """Decode the entry of `owner` with the exact key `exact`.

    Raises `ValueError` if the record is damaged, was sealed with another key, or belongs to another entry or version.
    """
    if blob[:1] == b"S":
        data = sealer.open(blob[1:].decode(), purpose=f"cache {exact}", owner=owner)
    elif blob[:1] == b"C" and not sealer.is_shared:  # with secret_keys, an unencrypted record is not trusted
        data = blob[1:]
    else:
        raise ValueError("the record is in an unknown form")
    entry = _ENTRY.validate_json(data)
    if (entry.v, entry.owner, entry.key) != (VERSION, owner, exact):
        raise ValueError("the record belongs to another entry or version")
    return entry
