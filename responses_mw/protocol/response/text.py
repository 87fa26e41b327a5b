"""The kinds of text that a model streams, as a table: what differs between them is a cell, not a branch.

A part of text that is being streamed, and the item round it.

Reasoning that a model writes into its text, ``<think>...</think>``: told apart as it streams.

Some servers have no parser for it (TGI, vLLM without ``--reasoning-parser``). The tag may be cut over any number of chunks, so
what could still become a tag is held back until it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..types import Item, Part
from .citations import Source, citations
from .events import DeltaTemplate, Emitter
from .logprobs import from_chat as logprobs_from_chat


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


class OpenText:
    """The open item of an assembler, where it is a text. ``place`` is where its events say that it stands."""

    __slots__ = ("_emitter", "_logprobs", "item", "kind", "part", "pieces", "place", "template")

    def __init__(self, kind: TextKind, item: Item, output_index: int, emitter: Emitter) -> None:
        """Adds a part of that ``kind`` to the ``item``."""
        self.kind = kind
        self.item = item
        self.place: dict[str, Any] = {"item_id": item["id"], "output_index": output_index, kind.index: len(item[kind.parts])}
        self.part = kind.new_part()
        self.pieces: list[str] = []
        self.template = DeltaTemplate(f"response.{kind.events}.delta", self.place, kind.delta_extra)
        self._emitter = emitter
        self._logprobs: list[dict[str, Any]] = []
        item[kind.parts].append(self.part)
        emitter.emit(f"response.{kind.part_events}.added", **self.place, part=self.part)

    def add(self, text: str, logprobs: Any = None) -> None:
        """One delta; ``logprobs`` are the chat chunk's, where they are wanted."""
        self.pieces.append(text)
        if logprobs and self.kind is OUTPUT_TEXT:
            tokens = logprobs_from_chat(logprobs)
            self._logprobs.extend(tokens)
            self._emitter.emit("response.output_text.delta", **self.place, delta=text, logprobs=tokens)
        else:
            self._emitter.delta(self.template, text)

    def put(self) -> None:
        """Writes what was streamed so far into the part."""
        self.part[self.kind.text] = "".join(self.pieces)
        if "logprobs" in self.part:
            self.part["logprobs"] = self._logprobs

    def finish(self, sources: Sequence[Source]) -> None:
        """The text is all there; ``sources`` are what it may cite."""
        self.put()
        part, kind = self.part, self.kind
        if kind is OUTPUT_TEXT:
            part["annotations"] = citations(part["text"], sources)
            for index, annotation in enumerate(part["annotations"]):
                members = {"annotation_index": index, "annotation": annotation}
                self._emitter.emit("response.output_text.annotation.added", **self.place, **members)
        text = {key: part[key] for key in (kind.text, "logprobs") if key in part}
        self._emitter.emit(f"response.{kind.events}.done", **self.place, **text)
        self._emitter.emit(f"response.{kind.part_events}.done", **self.place, part=part)


class ThinkingSplitter:
    """Text in, as it comes; pieces of reasoning and of answer out."""

    __slots__ = ("_held", "_tags", "_thinking")

    def __init__(self, tag: str) -> None:
        self._tags = (f"<{tag}>", f"</{tag}>")
        self._thinking = False
        self._held = ""

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """Pairs of (is it reasoning, piece), without the tags."""
        pieces: list[tuple[bool, str]] = []
        whole, begin = self._held + text, 0
        while (end := whole.find(tag := self._tags[self._thinking], begin)) >= 0:
            self._add(pieces, whole[begin:end])
            self._thinking = not self._thinking
            begin = end + len(tag)
        rest = whole[begin:]
        kept = _overlap(rest, tag)
        self._held = rest[len(rest) - kept :]
        self._add(pieces, rest[: len(rest) - kept])
        return pieces

    def flush(self) -> list[tuple[bool, str]]:
        """What was held back and became no tag."""
        pieces: list[tuple[bool, str]] = []
        self._add(pieces, self._held)
        self._held = ""
        return pieces

    def _add(self, pieces: list[tuple[bool, str]], piece: str) -> None:
        if piece:
            pieces.append((self._thinking, piece))


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` are a beginning of ``tag``."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
