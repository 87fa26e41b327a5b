"""Stream the text of items: split off reasoning, take out citation markers, and select log probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ..citation_markers import MarkerFilter, Shown
from ..citations import MAX_CITATIONS, Citation, Sources, visible_citations
from ..parts import reasoning_text
from ..request.create import MAX_TOP_LOGPROBS
from ..sse import split_delta
from ..types import Item
from .events import OUTPUT_TEXT, Emitter, EventTarget, emit_part_done

UNLIKELY = -9999.0
"""The log probability of a token that cannot occur (OpenAI reference). Servers send null or minus infinity."""
# A delta may have log probabilities for this many tokens more than its text has bytes. Special tokens have no text.
_MAX_EMPTY_TOKENS = 100


class OpenText:
    """The last part of an item, whose text is being streamed. `place` holds the ids and indices for its events."""

    __slots__ = ("_emitter", "_frame", "item", "kind", "part", "place", "template", "utf8")

    def __init__(self, kind: EventTarget, item: Item, output_index: int, emitter: Emitter) -> None:
        parts = item[kind.holder]
        self.kind = kind
        self.item = item
        self.part = parts[-1]
        self.place = {"item_id": item["id"], "output_index": output_index, kind.index: len(parts) - 1}
        self.utf8 = bytearray(self.part[kind.member].encode())  # a list of short strings takes seven times the memory
        logprobs: dict[str, Any] = {"logprobs": []} if kind is OUTPUT_TEXT else {}
        self.template = {"type": f"{kind.stem}.delta", **self.place, "delta": "", **logprobs, "sequence_number": 0}
        self._emitter = emitter
        self._frame: tuple[bytes, bytes] | None = None

    def add(self, text: str, logprobs: Any = None) -> None:
        """Add a piece of text and emit it as a delta. `logprobs` are the chat chunk's log probabilities, if requested."""
        utf8 = text.encode()
        self.utf8 += utf8
        if logprobs and self.kind is OUTPUT_TEXT:
            tokens = [
                {**_token(entry), "top_logprobs": [_token(top) for top in _entries(entry, "top_logprobs")[:MAX_TOP_LOGPROBS]]}
                for entry in _entries(logprobs)[: len(utf8) + _MAX_EMPTY_TOKENS]
            ]
            self.part["logprobs"] += tokens
            self._emitter.emit("response.output_text.delta", **self.place, delta=text, logprobs=tokens)
        else:
            self._emitter.delta(self.template, text)

    def frame(self, text: str, number: int) -> bytes:
        """Add a piece of text that JSON does not escape. Return its delta as a server-sent event with this `number`."""
        if not self._frame:
            self._frame = split_delta(self.template)
        before, after = self._frame
        utf8 = text.encode()
        self.utf8 += utf8
        return b"%b%b%b%d}\n\n" % (before, utf8, after, number)

    def put(self) -> None:
        """Write the text streamed so far to the part."""
        self.part[self.kind.member] = self.utf8.decode()

    def drop_held(self) -> None:
        """Drop the text that is held back, because another answer continues the text that has been emitted."""

    def finish(self, given: Sequence[Citation] = ()) -> None:
        """Complete the text, annotate the citations that the upstream has `given`, and emit the events that end the part."""
        self.put()
        for citation in given:
            self._cite(_placed(citation, len(self.part["text"])))
        emit_part_done(self._emitter, self.kind, self.place, self.part)

    def _cite(self, citation: Citation) -> None:
        annotations = self.part["annotations"]
        members = {"annotation_index": len(annotations), "annotation": citation}
        annotations.append(citation)
        self._emitter.emit("response.output_text.annotation.added", **self.place, **members)


class CitingText(OpenText):
    """An output text that may cite `sources`. Citation markers are removed, and become annotations at once."""

    __slots__ = ("_filter", "_sources")

    def __init__(self, kind: EventTarget, item: Item, output_index: int, emitter: Emitter, sources: Sources) -> None:
        super().__init__(kind, item, output_index, emitter)
        self._sources = sources
        self.drop_held()

    def passes(self, text: str) -> bool:
        """Return whether a piece of text can be emitted unchanged. If so, the caller must emit it, otherwise call `add`."""
        return self._filter.passes(text)

    def add(self, text: str, logprobs: Any = None) -> None:
        self._show(self._filter.feed(text, _ends_of_tokens(text, logprobs)))

    def drop_held(self) -> None:
        self._filter = MarkerFilter(self._sources, self.utf8.decode())

    def finish(self, given: Sequence[Citation] = ()) -> None:
        self._show(self._filter.feed("", is_last=True))
        links = {one.get("start_index") for one in self.part["annotations"]}
        left = MAX_CITATIONS - len(self.part["annotations"])
        for citation in islice(visible_citations(self.utf8.decode(), self._sources), max(left, 0)):
            if not links & {citation.get("start_index", -1), citation.get("start_index", 0) - 1}:
                self._cite(citation)
        super().finish(given)

    def _show(self, shown: Shown) -> None:
        if shown.text:
            super().add(shown.text, {"content": shown.tokens} if shown.tokens else None)
        for citation in shown.citations:
            self._cite(citation)


def _placed(citation: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a citation with its positions. Without valid ones, it marks the end of the text, which has this `length`."""
    is_placed = citation.get("end_index", length + 1) <= length
    return citation if is_placed else {**citation, "start_index": length, "end_index": length}


class ThinkingSplitter:
    """Separates reasoning from the answer at tags such as `<think>`, for servers that send both as one text (TGI)."""

    __slots__ = ("_held", "_read", "_tags", "_thinking", "_tokens")

    def __init__(self, tag: str) -> None:
        self._tags = (f"<{tag}>", f"</{tag}>")
        self._thinking = False
        self._held = ""  # text that may begin a tag
        self._read = 0  # number of characters before the text that is held back
        self._tokens: deque[tuple[int, Any]] = deque()  # ends of tokens, with the tokens' log probabilities

    def feed(self, text: str, logprobs: Any = None) -> list[tuple[bool, str, Any]]:
        """Split the next piece of text. Return triples of (is reasoning, text, log probabilities), without the tags."""
        self._note(text, logprobs)
        whole, begin, pieces = self._held + text, 0, []
        while (end := whole.find(tag := self._tags[self._thinking], begin)) >= 0:
            pieces.append(self._piece(whole[begin:end], begin))
            self._thinking = not self._thinking
            begin = end + len(tag)
        rest = whole[begin:]
        # The longest end of the text that may begin a tag.
        kept = next((length for length in range(min(len(rest), len(tag) - 1), 0, -1) if rest.endswith(tag[:length])), 0)
        pieces.append(self._piece(rest[: len(rest) - kept], begin))
        self._held = rest[len(rest) - kept :]
        self._read += len(whole) - kept
        return [piece for piece in pieces if piece[1]]

    def flush(self) -> list[tuple[bool, str, Any]]:
        """Return the text that is still held back at the end of the answer. It looked like the beginning of a tag."""
        return [self._piece(self._held, 0)] if self._held else []

    def _note(self, text: str, logprobs: Any) -> None:
        start = self._read + len(self._held)
        self._tokens += [(start + end, entry) for end, entry in _ends_of_tokens(text, logprobs)]

    def _piece(self, text: str, offset: int) -> tuple[bool, str, Any]:
        """Return a triple for `feed`. It has the log probabilities of the tokens that end in `text`, or None for reasoning."""
        start = self._read + offset
        content = []
        while self._tokens and self._tokens[0][0] <= start + len(text):
            end, entry = self._tokens.popleft()
            if end > start:
                content.append(entry)
        return self._thinking, text, {"content": content} if content and not self._thinking else None


def logprobs_of(content: Any, logprobs: Any, *, after: Any) -> Any:
    """Return the `logprobs` of the tokens of `content`. `after` is the reasoning before the content, or None.

    For an answer that is not streamed, vLLM also reports the tokens of reasoning and calls, and the token that ends the answer.
    These are removed.
    If the tokens do not contain `content`, the result is None if there is reasoning, otherwise `logprobs` unchanged.
    """
    if not isinstance(content, str):
        return logprobs
    entries = _entries(logprobs)
    tokens = [bytes(_token(entry)["bytes"]) for entry in entries]
    whole, text = b"".join(tokens), content.encode(errors="replace")
    reasoning = after.encode(errors="replace") if isinstance(after, str) else b""
    at = whole.find(reasoning)
    start = whole.find(text, at + len(reasoning)) if at >= 0 else whole.rfind(text)
    if start < 0:  # the server changed the text
        return None if reasoning else logprobs
    kept, end = [], 0
    for entry, token in zip(entries, tokens, strict=True):
        begin, end = end, end + len(token)
        if begin < start + len(text) and end > start:
            kept.append(entry)
    return {"content": kept}


def hide_logprobs(items: list[Item]) -> None:
    """Remove the log probabilities of reasoning tokens from the messages in `items`, in place.

    vLLM includes these log probabilities in answers that are not streamed.
    """
    thoughts = "\n".join(filter(None, (reasoning_text(item) for item in items if item["type"] == "reasoning")))
    for item in items:
        parts = item.get("content") if item["type"] == "message" else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(part.get("logprobs"), list):
                kept = logprobs_of(part.get("text"), {"content": part["logprobs"]}, after=thoughts)
                part["logprobs"] = kept["content"] if kept else []


def _entries(holder: Any, name: str = "content") -> list[dict[str, Any]]:
    """Return the objects in the list `holder[name]`, or an empty list if `holder` is malformed."""
    listed = holder.get(name) if isinstance(holder, dict) else None
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _ends_of_tokens(text: str, logprobs: Any) -> list[tuple[int, Any]]:
    """Return the tokens of a text in its log probabilities, with the ends of the tokens in the text."""
    ends, end = [], 0
    for entry in _entries(logprobs):
        token = entry.get("token")
        end = min(end + (len(token) if isinstance(token, str) else 0), len(text))
        ends.append((end, entry))
    return ends


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    token, logprob, data = entry.get("token"), entry.get("logprob"), entry.get("bytes")
    token = token if isinstance(token, str) else ""
    # TGI sends no bytes.
    if not (isinstance(data, list) and all(type(byte) is int and 0 <= byte < 256 for byte in data)):
        data = list(token.encode(errors="replace"))
    return {"token": token, "logprob": logprob if isinstance(logprob, int | float) else UNLIKELY, "bytes": data}
