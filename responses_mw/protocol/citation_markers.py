"""Take citation markers such as `【1】` out of an answer's text while it arrives.

The number in a marker is that of a search result. Models also write other forms, some of which they know from OpenAI's API:

`【1】【2】`, `【1, 2】`, `【1-3】`    several results
`【1†source】`, `【1†L3-L5】`      with a label
`【4:0†leave.pdf】`              a label that is the name of a file counts for more than the numbers
`【leave.pdf】`, `【file-abc】`     the name or the id of a file

All of these markers are taken out, whether or not there is such a result. Other texts in these brackets stay, such as headings
in Chinese and Japanese.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from .citations import MAX_CITATIONS, Citation, Source, Sources

_OPEN, _CLOSE, _LABEL = "【", "】", "†"
_NO_NAME = "source"  # this label is never the name of a file
_MAX_MARKER = 320
"""Maximum number of characters between the brackets. A file's name has at most 255."""
_MAX_RANGE = 50
_MAX_KNOWN = 1000  # texts in brackets that are remembered, in a piece
_MARKER = re.compile(rf"(?P<space>[ ]?){_OPEN}(?P<body>[^{_OPEN}{_CLOSE}\n]{{1,{_MAX_MARKER}}}){_CLOSE}")
_NUMBERS = re.compile(r"[\d :：,，、;；^–—-]{1,64}")
_NUMBER = re.compile(r"(?P<first>\d{1,4})(?:[:：]\d+)?(?:[ ]?[–—-][ ]?(?P<last>\d{1,4}))?")
_FILE_ID = re.compile(r"file[_-]\w{8,64}", re.ASCII)
_BEGINS_FILE_ID = re.compile(r"f(?:i(?:l(?:e(?:[_-]\w{0,64})?)?)?)?", re.ASCII)
_CLOSING = frozenset(".,;:!?)]}>\"'…”’»。,、;:!?)」』】")
_NOT_IN_HOSTS = re.compile(r"[^\w.:-]")
_SAFE_IN_LINK = "/:?#@!$&'*+,;=%~[]"


class Shown(NamedTuple):
    """The part of a text that is shown, and its citations."""

    text: str
    tokens: list[Any]
    """The log probabilities of the tokens that end in the shown text."""
    citations: list[Citation]


class MarkerFilter:
    """Removes the markers from one text. The result does not depend on how the text is split into pieces.

    A space before a marker is removed too, unless a word follows. The citation of a web page is shown as a link, as in OpenAI's
    answers. An end of the text that may become a marker is held back.
    """

    __slots__ = ("_cited", "_end", "_gap", "_held", "_here", "_left", "_length", "_pieces", "_sources", "_tokens")

    def __init__(self, sources: Sources, before: str = "") -> None:
        """`before` is the text that was shown earlier."""
        self._sources = sources
        self._length = len(before)  # of the text shown so far
        self._end = before[-1:]  # its last character
        self._gap = False  # whether a space preceded the marker that was removed last
        self._held = ""
        self._left = MAX_CITATIONS
        self._pieces: list[str] = []
        self._cited: list[Citation] = []
        self._here: set[str] = set()  # ids of the files that are cited at the end of the text shown so far
        self._tokens: list[tuple[int, Any]] = []  # the tokens that are held back, with their ends in `_held`

    def passes(self, text: str) -> bool:
        """Return whether the next piece can be shown unchanged, and count it in that case. Otherwise, call `feed`."""
        if self._held or self._gap or _OPEN in text or text[-1:] in ("", " "):
            return False
        self._length += len(text)
        self._end = text[-1]
        self._here.clear()
        return True

    def feed(self, text: str, tokens: Sequence[tuple[int, Any]] = (), *, is_last: bool = False) -> Shown:
        """Take the next piece, and return the text that can be shown. `tokens` are the ends of the tokens in `text`."""
        offset, text = len(self._held), self._held + text
        ends = [*self._tokens, *((offset + end, token) for end, token in tokens)]
        spans, begin = [], 0
        known = dict[str, bool]()  # whether a text in brackets is a marker; models repeat them, perhaps a million times
        for match in _MARKER.finditer(text):
            space, body = match.groups()
            is_marker = known.get(body)
            if is_marker is None:
                is_marker = known[body] = self._is_marker(body)
                if len(known) > _MAX_KNOWN:
                    known.clear()
            if is_marker:
                start = match.start()
                if start > begin:
                    self._show(text[begin:start])
                if ends:
                    spans.append((begin, start))
                self._cite(body, has_space=bool(space))
                begin = match.end()
        end = len(text) if is_last else begin + self._showable(text[begin:])
        self._show(text[begin:end])
        self._held = text[end:]
        self._tokens = [(at - end, token) for at, token in ends if at > end]
        spans.append((begin, end))
        return self._take(list(_ending_in(spans, ends)))

    def _take(self, tokens: list[Any]) -> Shown:
        shown = Shown("".join(self._pieces), tokens, self._cited)
        self._pieces, self._cited = [], []
        return shown

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._gap and not (text[0].isspace() or text[0] in _CLOSING):
            text = f" {text}"
        self._gap = False
        self._here.clear()
        self._pieces.append(text)
        self._length += len(text)
        self._end = text[-1]

    def _cite(self, body: str, *, has_space: bool) -> None:
        self._gap |= has_space
        if not self._left:
            return
        found = [*islice(dict.fromkeys(self._cited_by(body)), self._left)]
        self._left = max(0, self._left - max(1, len(found)))
        for source in found:
            if source.url:
                self._cite_page(source)
            elif source.file_id not in self._here:
                self._here.add(source.file_id)
                self._cited.append(source.citation(self._length, self._length))

    def _cite_page(self, source: Source) -> None:
        self._gap = bool(self._end and not self._end.isspace())
        link = _link(source)
        self._show(link)
        self._cited.append(source.citation(self._length - len(link), self._length))

    # -- markers ---------------------------------------------------------------------------------------------------------

    def _showable(self, text: str) -> int:
        """Return the length of the text before an end that may become a marker, with the space before it."""
        begin = text.rfind(_OPEN)
        if begin < 0 or not self._may_become_marker(text[begin + 1 :]):
            begin = len(text)
        return begin - text.endswith(" ", 0, begin)

    def _may_become_marker(self, body: str) -> bool:
        if len(body) > _MAX_MARKER or _CLOSE in body or "\n" in body:
            return False
        if self._sources.may_name(body):
            return True
        head, dagger, _ = body.partition(_LABEL)
        if dagger:
            return self._is_head(head)
        return bool(not head or _NUMBERS.fullmatch(head) or _BEGINS_FILE_ID.fullmatch(head))

    def _is_marker(self, body: str) -> bool:
        return self._sources.named(body) is not None or self._is_head(body.partition(_LABEL)[0])

    def _is_head(self, head: str) -> bool:
        has_number = _NUMBERS.fullmatch(head) and _NUMBER.search(head)
        return bool(has_number or _FILE_ID.fullmatch(head)) or self._sources.named(head) is not None

    def _cited_by(self, body: str) -> Iterator[Source]:
        """Yield the sources that a marker cites. A number always refers to a result, even if it is also the name of a file."""
        head, _, label = body.partition(_LABEL)
        numbered = [source for number in _numbers(head) if (source := self._sources.get(number)) is not None]
        named = self._sources.named(body) or self._sources.named(head)
        if named is not None and not numbered:
            yield named
            return
        labelled = self._sources.named(label.strip()) if label.strip() != _NO_NAME else None
        if labelled is not None and not any(source.title == labelled.title for source in numbered):
            numbered = [labelled]
        yield from numbered


def _ending_in(spans: Sequence[tuple[int, int]], ends: Sequence[tuple[int, Any]]) -> Iterator[Any]:
    """Yield the tokens that end within a span. Both are in the order of the text."""
    following = iter(spans)
    start, stop = next(following)
    for end, token in ends:
        while end > stop:
            start, stop = next(following, (end, end))
        if start < end:
            yield token


def _numbers(head: str) -> Iterator[int]:
    for match in _NUMBER.finditer(head) if _NUMBERS.fullmatch(head) else ():
        first = int(match["first"])
        last = int(match["last"] or first)
        yield from range(first, min(last, first + _MAX_RANGE) + 1) if last > first else (first,)


def _link(source: Source) -> str:
    """Return a Markdown link to a page, with the host as its text.

    Characters that could end the link, or a JSON string that contains it, are encoded.
    """
    try:
        host = urlsplit(source.url).hostname or ""
    except ValueError:  # not every provider checks the URLs that it returns
        host = ""
    shown = _NOT_IN_HOSTS.sub("", host.removeprefix("www.")) or "source"
    return f"([{shown}]({quote(source.url, safe=_SAFE_IN_LINK, errors='replace')}))"
