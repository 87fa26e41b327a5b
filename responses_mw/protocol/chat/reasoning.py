"""Reasoning that travels sealed: ``include: ["reasoning.encrypted_content"]`` (OpenAI reference, "Encrypted reasoning items").

A client that keeps no state with us gets a reasoning item's text as ``encrypted_content`` and sends it back in a later turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import BadRequest
from ..request.items import text_of
from ..types import Item

Unseal = Callable[[str], str | None]
"""The text of an envelope, or None where it is not one of ours."""


def unsealed(items: Sequence[Item], unseal: Unseal, *, offset: int = 0) -> list[Item]:
    """``items`` with the content of sealed reasoning put back. One that cannot be opened is an error only if it has no
    other text, and stands in the request's own input (from ``offset`` on): it may be another server's."""
    return [_unsealed(item, unseal, index - offset) for index, item in enumerate(items)]


def _unsealed(item: Item, unseal: Unseal, index: int) -> Item:
    if item["type"] != "reasoning" or "encrypted_content" not in item or item.get("content"):
        return item
    text = unseal(item["encrypted_content"])
    if text is not None:
        return {**item, "content": [{"type": "reasoning_text", "text": text}]}
    if index >= 0 and not text_of(item):
        where = f"input[{index}].encrypted_content"
        message = f"The encrypted content '{where}' could not be verified: it was not made by this server, or its key is gone."
        raise BadRequest(message, param=where, code="invalid_encrypted_content")
    return item
