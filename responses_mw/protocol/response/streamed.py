"""Reconcile a finished item with its streamed form. What the client has already received is not changed afterwards."""

from __future__ import annotations

from typing import Any

from ..types import Item, Part
from .events import CALL_TEXTS, PARTS, TEXTS

_IDENTITY = ("call_id", "name", "namespace", "server_label", "role")


def reconcile(streamed: Item, finished: Item) -> Item:
    """Return the item `finished`, with the values of `streamed` where they contradict each other.

    `streamed` is the item as it was added, with the texts of its deltas. An item of another type is replaced with `streamed`.
    """
    if finished["type"] != streamed["type"]:
        return {**streamed, "status": finished.get("status", "completed")}
    kept = {name: streamed[name] for name in _IDENTITY if streamed.get(name)}
    text = CALL_TEXTS.get(streamed["type"])
    if text and streamed.get(text.member):
        kept[text.member] = streamed[text.member]
    for name in PARTS:
        if isinstance(streamed.get(name), list) and isinstance(finished.get(name) or [], list) and streamed[name]:
            kept[name] = _parts(streamed[name], finished.get(name) or [])
    return finished | kept


def _parts(streamed: list[Any], finished: list[Any]) -> list[Any]:
    pairs = zip(streamed, finished, strict=False)
    return [*(reconcile_part(one, other) for one, other in pairs), *streamed[len(finished) :], *finished[len(streamed) :]]


def reconcile_part(streamed: Any, finished: Any) -> Any:
    """Return the part `finished`, with the text of `streamed`. A part of another type is replaced with `streamed`."""
    if not isinstance(streamed, dict):
        return finished
    if not isinstance(finished, dict) or finished.get("type") != streamed.get("type"):
        return streamed
    member = text_member(streamed)
    return {**finished, member: streamed[member]} if member and streamed.get(member) else finished


def text_member(part: Part) -> str | None:
    """Return the name of the member that has the text of a part, or None if the part has none."""
    kind = part.get("type")
    target = TEXTS.get(kind) if isinstance(kind, str) else None
    return target.member if target else None
