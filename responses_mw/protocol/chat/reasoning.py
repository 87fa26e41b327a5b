"""Encrypted reasoning: ``include: ["reasoning.encrypted_content"]`` (OpenAI reference, "Encrypted reasoning items").

A client that stores nothing here receives the text of a reasoning item as ``encrypted_content`` and sends it back later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import BadRequest
from ..request.items import text_of
from ..types import Item

Unseal = Callable[[str], str | None]
"""Open an envelope; None if it is not one of ours."""


def unsealed(items: Sequence[Item], unseal: Unseal, *, offset: int = 0) -> list[Item]:
    """Restore the content of encrypted reasoning items.

    One that cannot be opened may be another server's: it is an error only if it has no other text and is in the request's
    own input (from ``offset`` on).
    """
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
