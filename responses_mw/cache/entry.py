"""An entry of the cache: the key of its request, and the stored form of its answer.

The *partition* of a key is a hash of everything that affects an answer except the last user text. When in doubt, include a
field. A superfluous field only costs hits, but a missing field causes wrong answers.

A request is cacheable only if all of these are true:

- Its last item is a user message with exactly one text part, which is not blank.
- The model cannot call a tool, including tools that the history defines, and no item answers an MCP approval request.
- The history contains only text, because the content behind a URL may change.
- It does not ask for log probabilities or `enable_response_messages`. Background responses never reach the cache.

An answer is stored only if it consists of reasoning and plain text. In semantic mode, the text of the user message is stored
too, because the guard and the judge compare it. A record has one of two forms:

    C<json>       unencrypted
    S<envelope>   sealed with `auth.secret_keys`, and valid only for this entry and its owner
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson
from pydantic import TypeAdapter

from ..crypto import Sealer, is_envelope
from ..protocol.request.create import CreateResponse
from ..protocol.request.tools import BRINGS_TOOLS
from ..protocol.response.document import output_text, usage_of_responses
from ..protocol.types import Document, Item
from .normal import normalize

VERSION = 5  # version of hashes and records. Entries of other versions are never found

NEUTRAL = frozenset(
    {"items", "previous_response_id", "conversation"}  # hashed as the history that the model sees
    | {"background", "background_options", "enable_response_messages"}  # without effect in a cacheable request
    | {"prompt"}  # already expanded into the other fields
    | {"metadata", "store", "stream", "stream_options", "service_tier", "size", "cache"}
    | {"prompt_cache_options", "prompt_cache_retention"}
)
"""Fields of a request that are not hashed, because they do not affect the answer or are represented in another way."""

NEUTRAL_HEADERS = frozenset({"authorization", "traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority"})
"""Forwarded headers that do not affect an answer. The owner represents the credential."""

_TEXT_PARTS = frozenset({"input_text", "text", "output_text", "refusal", "reasoning_text", "summary_text"})
_ITEM_IDENTITY = frozenset({"id", "status"})


@dataclass(frozen=True, slots=True)
class Key:
    """The cache key of a request.

    `text` is the last user text. `partition` is a hash of everything else that affects the answer. `exact` is a hash of the
    partition and the normal form of the text.
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

    `items` are all items that the model sees: the history, then the input. `model` is the upstream's name for the model.
    `headers` are the forwarded headers. `deployment` identifies everything besides the request that affects the answer.
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
    return Key(owner, partition, text, _exact(partition, text))


def _exact(partition: str, text: str) -> str:
    return _hash(partition.encode() + b"\0" + normalize(text).encode("utf-8", "surrogatepass"))


_HASHED_FIELDS = tuple(field.name for field in fields(CreateResponse) if field.name not in NEUTRAL)


def _obstacle(request: CreateResponse, items: Sequence[Item]) -> str:
    """Return the reason why `request` is not cacheable, or an empty string if the request is cacheable."""
    types = {item["type"] for item in items}
    has_tools = bool(request.tools or types & BRINGS_TOOLS)
    obstacles = {
        # An approved call runs before the model is called.
        "tools": (has_tools and request.tool_choice != "none") or "mcp_approval_response" in types,
        "logprobs": request.wants_logprobs,
        "messages": request.enable_response_messages,
        "input": not items or _user_text(items[-1]) is None,
    }
    content = "" if all(_has_only_text(item) for item in items[:-1]) else "content"
    return next((name for name, is_present in obstacles.items() if is_present), content)


def _user_text(item: Item) -> str | None:
    """Return the text of a user message that consists of one text part, or None for a blank text or any other item."""
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
    # As a string, an object keeps the order of its members. A constrained model writes them in the order of the schema.
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else value


def _without(value: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if name not in names}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:40]


# -- records -----------------------------------------------------------------------------------------------------------------

_PARTS = {"message": {"content": "output_text"}, "reasoning": {"content": "reasoning_text", "summary": "summary_text"}}
"""For each type of item in an answer, its members that are lists of parts, and the type of these parts."""
_ROLES = {"message": "assistant", "reasoning": None}
_ITEM_MEMBERS = {kind: frozenset({"type", "status", "role", *lists}) for kind, lists in _PARTS.items()}
_PART_MEMBERS = frozenset({"type", "text"})


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached answer: `items` without ids. It is valid only for its `owner`, its exact `key` and its version `v`.

    `ttl` is in seconds. `usage` is None if the upstream reported none. `text` is None if the text was not embedded.
    """

    owner: str
    key: str
    items: list[Item]
    usage: dict[str, Any] | None
    ttl: int
    text: str | None = None
    v: int = VERSION

    def is_in(self, partition: str) -> bool:
        """Return whether the entry belongs to `partition`. It does not matter where in Redis it was found."""
        return self.text is not None and _exact(partition, self.text) == self.key

    @property
    def answer(self) -> str:
        """The text of the answer, without the reasoning."""
        return output_text({"output": self.items})


_ENTRY = TypeAdapter(Entry)


def items_of(document: Document) -> list[Item] | None:
    """Return the items of a finished response for an `Entry`, or None if the answer is not cacheable.

    A cacheable answer is complete, consists of reasoning and plain text, and ends with a message. Ids and the
    `encrypted_content` made by this server are removed.
    """
    if document["status"] != "completed" or document.get("error") or document.get("incomplete_details"):
        return None
    items = [_without(item, _renewed(item)) for item in document["output"]]
    return items if _is_answer(items) else None


def _renewed(item: Item) -> frozenset[str]:
    """Return the members that every response sets anew: the id, and `encrypted_content` if this server made it."""
    return frozenset({"id", "encrypted_content"} if is_envelope(item.get("encrypted_content") or "") else {"id"})


def _is_answer(items: Sequence[Item]) -> bool:
    return bool(items) and items[-1].get("type") == "message" and all(map(_is_plain, items))


def _is_plain(item: Item) -> bool:
    """Return whether an item is complete, and is reasoning or a message with only text. The item may be malformed."""
    kind = str(item.get("type"))
    if kind not in _PARTS or "id" in item or _has_others(item, _ITEM_MEMBERS[kind]):
        return False
    if item.get("role") != _ROLES[kind] or item.get("status") not in (None, "completed"):
        return False
    lists = {part_type: item.get(name) or [] for name, part_type in _PARTS[kind].items()}
    return any(lists.values()) and all(_are_plain(parts, part_type) for part_type, parts in lists.items())


def _are_plain(parts: Any, part_type: str) -> bool:
    return isinstance(parts, list) and all(
        isinstance(part, dict)
        and part.get("type") == part_type
        and isinstance(text := part.get("text"), str)
        and bool(text.strip())
        and not _has_others(part, _PART_MEMBERS)
        for part in parts
    )


def _has_others(value: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Return whether `value` has members besides `names` that are not empty."""
    return any(member for name, member in value.items() if name not in names)


def pack(entry: Entry, sealer: Sealer) -> bytes:
    """Encode `entry`, and seal it if all replicas share the sealer's keys."""
    data = orjson.dumps(entry)
    if sealer.is_shared:
        return b"S" + sealer.seal(data, purpose=f"cache {entry.key}", owner=entry.owner).encode()
    return b"C" + data


def unpack(blob: bytes, owner: str, exact: str, sealer: Sealer) -> Entry:
    """Decode the entry of `owner` with the exact key `exact`.

    Raises `ValueError` if the record is damaged, was written for another entry or version, or contains an answer that is not
    cacheable. If `sealer` has shared keys, the record must be sealed with one of them.
    """
    entry = _ENTRY.validate_json(_opened(blob, owner, exact, sealer))
    if (entry.v, entry.owner, entry.key) != (VERSION, owner, exact):
        raise ValueError("the record belongs to another entry or version")
    if not _is_answer(entry.items) or (entry.usage is not None and usage_of_responses(entry.usage) != entry.usage):
        raise ValueError("the record contains items that are never cached")
    return entry


def _opened(blob: bytes, owner: str, exact: str, sealer: Sealer) -> bytes:
    """Return the JSON of a record. Raises `ValueError` if the record cannot be opened, or its JSON is nested too deeply."""
    if blob[:1] == b"S":
        data = sealer.open(blob[1:].decode(), purpose=f"cache {exact}", owner=owner)
    elif blob[:1] == b"C" and not sealer.is_shared:  # with secret_keys, an unencrypted record is not trusted
        data = blob[1:]
    else:
        raise ValueError("the record is in an unknown form")
    try:
        return orjson.dumps(orjson.loads(data))
    except TypeError:
        raise ValueError("the record is nested too deeply") from None
