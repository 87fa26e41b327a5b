"""A part of text that is being streamed, and the item round it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .citations import Source, citations
from .events import DeltaTemplate, Emitter
from .kinds import OUTPUT_TEXT, TextKind
from .logprobs import from_chat as logprobs_from_chat
from .types import Item


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
