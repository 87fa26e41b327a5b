"""From a kept answer to the chunks that a run feeds to its assembler: ids, events and document come as from an upstream."""

from __future__ import annotations

from typing import Any

from ..protocol.types import Chunk, Document
from .record import Entry

MARK = "cache"
"""The member of a usage that tells that its tokens were counted when the answer was first made, and cost nothing now."""


def replay(entry: Entry) -> list[Chunk]:
    """One turn: a chunk for each text, and one that ends it."""
    deltas = [{kind: text} for kind, text in entry.texts]
    chunks: list[Chunk] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end: Chunk = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    if entry.usage is not None:
        end["usage"] = _as_chat(entry.usage)
    return [*chunks, end]


def mark(document: Document, kind: str) -> None:
    """Marks the usage of a document that was told again, with the ``kind`` of the hit. To be called after the turn's end."""
    if document["usage"] is not None:
        document["usage"] = {**document["usage"], MARK: kind}


def unmarked(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if usage is None else {name: value for name, value in usage.items() if name != MARK}


def _as_chat(usage: dict[str, Any]) -> dict[str, Any]:
    """A usage of the Responses API in the form of Chat Completions."""
    of_input = usage["input_tokens_details"]
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": {
            "cached_tokens": of_input["cached_tokens"],
            "cache_write_tokens": of_input.get("cache_write_tokens", 0),
        },
        "completion_tokens_details": {"reasoning_tokens": usage["output_tokens_details"]["reasoning_tokens"]},
    }
