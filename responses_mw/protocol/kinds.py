"""The kinds of text that a model streams, as a table: what differs between them is a cell, not a branch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .types import Item, Part


@dataclass(frozen=True, slots=True)
class TextKind:
    """How one kind of text stands in an item and in events (OpenAI reference, "Streaming events")."""

    item: str
    """Type of the item that holds it; ``prefix`` begins the item's id."""
    prefix: str
    parts: str
    """The item's member that lists the parts; ``index`` is what events call a place in it."""
    index: str
    part: str
    """Type of the part; ``text`` is the member with the text itself."""
    text: str
    events: str
    """``response.<events>.delta`` and ``.done``; ``response.<part_events>.added`` and ``.done``."""
    part_events: str
    delta_extra: bytes = b""
    """JSON that every delta has after its text."""

    def new_item(self) -> Item:
        if self.item == "message":
            return {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        # A reasoning item that has only a summary has no content: null would break the specification's own schema.
        return {"type": "reasoning", "status": "in_progress", "summary": [], self.parts: []}

    def new_part(self) -> Part:
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if self.part == "output_text" else {}
        return {"type": self.part, self.text: "", **extra}


OUTPUT_TEXT = TextKind(
    item="message", prefix="msg", parts="content", index="content_index", part="output_text", text="text",
    events="output_text", part_events="content_part", delta_extra=b',"logprobs":[]',
)  # fmt: skip
REFUSAL = TextKind(
    item="message", prefix="msg", parts="content", index="content_index", part="refusal", text="refusal",
    events="refusal", part_events="content_part",
)  # fmt: skip
REASONING_TEXT = TextKind(
    item="reasoning", prefix="rs", parts="content", index="content_index", part="reasoning_text", text="text",
    events="reasoning_text", part_events="content_part",
)  # fmt: skip
OPEN_REASONING_TEXT = replace(REASONING_TEXT, events="reasoning")
"""As the Open Responses specification names the events of the same text."""
SUMMARY_TEXT = TextKind(
    item="reasoning", prefix="rs", parts="summary", index="summary_index", part="summary_text", text="text",
    events="reasoning_summary_text", part_events="reasoning_summary_part",
)  # fmt: skip
