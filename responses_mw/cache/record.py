"""What is kept of an answer, and how it is laid down.

An entry is the answer's texts, its usage, and the signature of its question for the guard. It is neither the question nor the
instructions: these are in Redis as hashes only. The texts have a form in which an answer can be told again exactly; a document
that has anything else in it is not kept.

    C<json>       as it is
    S<envelope>   sealed (``secret_keys``), for the purpose of this very entry of this owner
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson

from ..protocol.types import Document
from ..sealing import Sealer, Unsealable
from .guard import Signature
from .key import VERSION, Key

Text = tuple[str, str]
"""A kind (``reasoning`` or ``content``) and the text."""

_PARTS = {"output_text": "content", "reasoning_text": "reasoning", "summary_text": "reasoning"}
_ITEMS = {"message": ("content",), "reasoning": ("content", "summary")}
_COME_AGAIN = {
    "message": frozenset({"id", "type", "status", "role", "content"}),
    "reasoning": frozenset({"id", "type", "status", "content", "summary", "encrypted_content"}),
    "part": frozenset({"type", "text"}),
}
"""The members that an assembler gives back."""


class Unreadable(ValueError):
    """A kept entry that cannot be read here: damaged, sealed by another key, or in another form."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A kept answer: its ``texts`` in order, its ``usage`` as counted, and for how many seconds it is kept."""

    texts: tuple[Text, ...]
    usage: dict[str, Any] | None
    ttl: int
    signature: Signature | None = None


def texts_of(document: Document, *, summary: bool | None = None) -> tuple[Text, ...] | None:
    """The texts of a finished answer, as an assembler takes them in; None where it is not kept: it failed, was cut or refused,
    called a tool, or has anything in it that would not come again in the same form.

    ``summary`` is for an answer that no assembler of ours made: whether reasoning would come again as a summary.
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
    if lists is None or _has_more(item, item["type"]) or item.get("status") not in (None, "completed"):
        return None
    parts = [part for name in lists for part in item.get(name) or ()]
    if len(parts) != 1 or _has_more(parts[0], "part"):
        return None
    (part,) = parts
    kind = _PARTS.get(part["type"])
    if kind == "reasoning" and summary is not None:
        is_summary = part["type"] == "summary_text"
        if is_summary != summary or item.get("encrypted_content"):  # sealed by others, it is nothing that we could make
            return None
    return (kind, part["text"]) if kind else None


def _has_more(value: dict[str, Any], kind: str) -> bool:
    """Whether there is anything in it that would be lost."""
    return any(member for name, member in value.items() if name not in _COME_AGAIN[kind])


def pack(entry: Entry, key: Key, sealer: Sealer) -> bytes:
    """The stored form of ``entry``, sealed where the sealer's keys are shared by all replicas."""
    data = orjson.dumps({"v": VERSION, "owner": key.owner, "key": key.exact, **asdict(entry)})
    if sealer.is_shared:
        return b"S" + sealer.seal(data, purpose=_purpose(key.exact), owner=key.owner).encode()
    return b"C" + data


def unpack(blob: bytes, owner: str, exact: str, sealer: Sealer, *, signed: bool = True) -> Entry:
    """The entry of ``owner`` under ``exact``, with its signature if that is wanted (``signed``). Raises ``Unreadable`` also for
    one that was made for another place."""
    try:
        data = orjson.loads(_opened(blob, owner, exact, sealer))
        if (data["v"], data["owner"], data["key"]) != (VERSION, owner, exact):
            raise Unreadable("it belongs elsewhere, or to another version")
        signature = Signature.of(data["signature"]) if signed and data["signature"] else None
        texts = tuple((str(kind), str(text)) for kind, text in data["texts"])
        return Entry(texts, data["usage"], int(data["ttl"]), signature)
    except (Unsealable, ValueError, LookupError, TypeError) as error:
        raise Unreadable(str(error)) from error


def _opened(blob: bytes, owner: str, exact: str, sealer: Sealer) -> bytes:
    if blob[:1] == b"S":
        return sealer.open(blob[1:].decode(), purpose=_purpose(exact), owner=owner)
    if blob[:1] != b"C" or sealer.is_shared:  # with keys, what is not sealed is not ours
        raise Unreadable("it is in no form that is read here")
    return blob[1:]


def _purpose(exact: str) -> str:
    return f"cache {exact}"
