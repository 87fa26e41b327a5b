"""Number the results of searches, and find the citations of these results that stay in the model's text.

The model is asked to cite a result by its number in fullwidth brackets, such as `【1】`. `citation_markers` takes these markers
out of the text. Models also cite by links, URLs and numbers in square brackets. These stay in the text (`visible_citations`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Citation = dict[str, Any]
"""An annotation of a text: a `url_citation` or a `file_citation`."""

MAX_CITATIONS = 1000
"""Maximum number of citations of a text, or in a delta of the upstream. A link to a page is much longer than its marker."""
_CITED = re.compile(
    r"""
      (?P<code> ``` .*? (?: ``` | \Z ) | ` [^`\n]++ ` )
    | \[ [^\[\]\n]*+ \] \( <? (?P<link> https?:// (?> (?: [^\s()<>] | \( [^\s()<>]*+ \) )+ ) ) >? (?: [ ]++ "[^"\n]*+" )? \)
    | (?P<bare> https?:// [^\s<>"【】]++ )
    | \[ (?> (?: \^ | citation: )? ) (?P<numbers> \d{1,4} (?> (?: ,[ ]? \d{1,4} )* ) ) (?> (?: † [^\[\]\n]*+ | \^ )? ) \]
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_AFTER_URL = ".,;:!?'\"*_~`)]}|"
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Source:
    """A result of a search: a web page, which has a `url`, or an excerpt of a file, which has a `file_id`."""

    number: int
    title: str
    """The title of the page, or the name of the file."""
    url: str = ""
    file_id: str = ""

    def citation(self, start: int, end: int) -> Citation:
        """Return the annotation for a citation of this source at `text[start:end]`."""
        if self.file_id:
            return {"type": "file_citation", "index": end, "file_id": self.file_id, "filename": self.title}
        title = self.title or self.url
        return {"type": "url_citation", "url": self.url, "title": title, "start_index": start, "end_index": end}


class Sources:
    """The sources that the answers of a run may cite. Results are numbered across all searches of the history."""

    def __init__(self) -> None:
        self._by_number: dict[int, Source] = {}
        self._by_url: dict[str, Source] = {}
        self._by_file: dict[str, Source] = {}
        self._by_name: dict[str, Source] = {}
        self._sorted: list[str] | None = None  # names and ids of the files
        self._numbers: dict[tuple[str, ...], int] = {}
        self._last = 0

    def number(self, *key: str) -> int:
        """Return the number of the result with this `key`. A result without a key gets a new number each time."""
        if key and key in self._numbers:
            return self._numbers[key]
        self._last += 1
        if key:
            self._numbers[key] = self._last
        return self._last

    def restore(self, number: int, *key: str) -> None:
        """Record the number that a result in the history has. If a number occurs more than once, the last result has it."""
        self._last = max(self._last, number)
        if key:
            self._numbers[key] = number

    def add(self, source: Source) -> None:
        """Add a source, or replace the one with the same number."""
        self._by_number[source.number] = source
        if source.url:
            self._by_url.setdefault(_key(source.url), source)
        else:
            self._by_file.setdefault(source.file_id, source)
            self._by_name.setdefault(source.title, source)
            self._sorted = None

    def __iter__(self) -> Iterator[Source]:
        """Yield the sources in the order of their numbers."""
        return (self._by_number[number] for number in sorted(self._by_number))

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def get(self, number: int) -> Source | None:
        return self._by_number.get(number)

    def at(self, url: str) -> Source | None:
        """Return the page at `url`."""
        return self._by_url.get(_key(url))

    def named(self, name: str) -> Source | None:
        """Return the first excerpt of the file with this name or id. A file cannot take the id of another one as its name."""
        return (self._by_file.get(name) or self._by_name.get(name)) if name else None

    def may_name(self, text: str) -> bool:
        """Return whether the name or id of a file begins with `text`."""
        if self._sorted is None:
            self._sorted = sorted({*self._by_file, *self._by_name})
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


def visible_citations(text: str, sources: Sources) -> Iterator[Citation]:
    """Yield the citations that are part of an answer's text, in order and without overlaps.

    The citation is the whole link, the URL, `[3]`, or each number of `[1, 3]`. At each position of the text, the first of these
    rules that matches is used:

    1. Code within backticks or a fence is skipped, because an index such as `items[1]` is not a citation.
    2. A Markdown link to a source is a citation. Any other link to an http(s) URL is skipped as a whole, including its `[1]`.
    3. The bare URL of a source, without trailing punctuation, is a citation.
    4. `[3]`, `[1, 3]`, `[^3]`, `[citation:3]` and `[3†...]` are citations if a source has the number.
    """
    if sources:
        for match in _CITED.finditer(text):
            for source, start, end in _cited(match, sources):
                if source is not None:
                    yield source.citation(start, end)


def _cited(match: re.Match[str], sources: Sources) -> Iterator[tuple[Source | None, int, int]]:
    """Yield the source, start and end of each citation in a match. The source is None if it is unknown."""
    kind, (start, end) = match.lastgroup or "", match.span()
    if kind == "link":
        yield sources.at(match["link"]), start, end
    elif kind == "bare":
        yield _bare(match["bare"], start, sources)
    elif kind == "numbers" and not match["numbers"].isdecimal():
        digits = _DIGITS.finditer(match.string, *match.span("numbers"))
        yield from ((sources.get(int(one[0])), *one.span()) for one in digits)
    elif kind == "numbers":
        yield sources.get(int(match["numbers"])), start, end


def _bare(url: str, start: int, sources: Sources) -> tuple[Source | None, int, int]:
    # Trailing punctuation may belong to the URL or to the sentence.
    shortest = len(url.rstrip(_AFTER_URL))
    for length in (*range(len(url), max(shortest, len(url) - 8) - 1, -1), shortest):
        if (source := sources.at(url[:length])) is not None:
            return source, start, start + length
    return None, start, start


def _key(url: str) -> str:
    """Normalize a URL for comparison, because models often change the scheme, `www.`, fragment and trailing slash."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a model may write an invalid URL
        return url
    path = parts.path.rstrip("/")
    return f"{parts.netloc.lower().removeprefix('www.')}{path}?{parts.query}"
