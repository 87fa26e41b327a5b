"""The stored form of an answer: its texts, its usage, and the signature of its question.

Neither the question nor the instructions are stored; the keys contain hashes of them. An answer is stored only if it can be
replayed exactly. A hit is replayed as chat chunks, so ids, events and document are made as for an answer of the upstream.

    C<json>       unencrypted
    S<envelope>   sealed with ``auth.secret_keys``, bound to this entry of this owner
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import TypeAdapter

from ..crypto import Sealer
from ..protocol.types import Chunk, Document
from .guard import Signature
from .key import VERSION

Text = tuple[str, str]
"""A kind (``reasoning`` or ``content``) and the text."""

MARK = "cache"
"""Member that marks the ``usage`` of a hit: its tokens were counted when the answer was computed."""
_PARTS = {"output_text": "content", "reasoning_text": "reasoning", "summary_text": "reasoning"}
_ITEMS = {"message": ("content",), "reasoning": ("content", "summary")}
_REPLAYED = {
    "message": frozenset({"id", "type", "status", "role", "content"}),
    "reasoning": frozenset({"id", "type", "status", "content", "summary", "encrypted_content"}),
    "part": frozenset({"type", "text"}),
}
"""The members that a replay restores."""


class UnreadableRecord(ValueError):
    """A stored record is damaged, sealed with another key, or in an unknown form."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached answer: its ``texts`` in order, its ``usage``, its lifetime (seconds), and its question's ``signature``.

    It is bound to an ``owner``, an exact ``key`` and a version.
    """

    owner: str
    key: str
    texts: tuple[Text, ...]
    usage: dict[str, Any] | None
    ttl: int
    signature: Signature | None = None
    v: int = VERSION


_ENTRY = TypeAdapter(Entry)

# -- from a document, and back -----------------------------------------------------------------------------------------------


def texts_of(document: Document, *, summary: bool | None = None) -> tuple[Text, ...] | None:
    """Return the texts of a finished answer; None if it is not cacheable.

    An answer is not cacheable if it failed, was cut off or refused, called a tool, or contains anything that a replay would
    lose. ``summary`` is None for Chat Completions upstreams. For an upstream with a Responses API, it says whether a replay
    turns reasoning into a summary.
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


def replay(entry: Entry) -> list[Chunk]:
    """Return the chunks of a turn: one for each text, and a last one with the usage."""
    chunks: list[Chunk] = [{"choices": [{"index": 0, "delta": {kind: text}}]} for kind, text in entry.texts]
    end: Chunk = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    if entry.usage is not None:
        end["usage"] = _chat_usage(entry.usage)
    return [*chunks, end]


def mark(document: Document, kind: str) -> None:
    """Mark the usage of a replayed document with the ``kind`` of the hit. Call this after the end of the turn."""
    if document["usage"] is not None:
        document["usage"] = {**document["usage"], MARK: kind}


def unmarked(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return ``usage`` without the mark of a hit."""
    return None if usage is None else {name: value for name, value in usage.items() if name != MARK}


def _chat_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert a usage of the Responses API to Chat Completions."""
    details = usage["input_tokens_details"]
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": {
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": details.get("cache_write_tokens", 0),
        },
        "completion_tokens_details": {"reasoning_tokens": usage["output_tokens_details"]["reasoning_tokens"]},
    }


# -- bytes -----------------------------------------------------------------------------------------------------------------


def pack(entry: Entry, sealer: Sealer) -> bytes:
    """Return the stored form of ``entry``, sealed if the sealer's keys are shared by all replicas."""
    data = orjson.dumps(entry)
    if sealer.is_shared:
        return b"S" + sealer.seal(data, purpose=_purpose(entry.key), owner=entry.owner).encode()
    return b"C" + data


def unpack(blob: bytes, owner: str, exact: str, sealer: Sealer) -> Entry:
    """Return the entry of ``owner`` under ``exact``.

    Raises ``UnreadableRecord``, including for a record that was stored under another key or owner.
    """
    try:
        entry = _ENTRY.validate_json(_opened(blob, owner, exact, sealer))
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error
    if (entry.v, entry.owner, entry.key) != (VERSION, owner, exact):
        raise UnreadableRecord("the record belongs to another entry or version")
    return entry


def _opened(blob: bytes, owner: str, exact: str, sealer: Sealer) -> bytes:
    if blob[:1] == b"S":
        return sealer.open(blob[1:].decode(), purpose=_purpose(exact), owner=owner)
    if blob[:1] != b"C" or sealer.is_shared:  # with secret_keys, an unencrypted record is not trusted
        raise UnreadableRecord("the record is in an unknown form")
    return blob[1:]


def _purpose(exact: str) -> str:
    return f"cache {exact}"
