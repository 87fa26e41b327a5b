"""The normal form of a question: requests whose questions have the same normal form get the same cached answer.

Typographic apostrophes and dashes, white space, full stops or exclamation marks at the end, and the case of the first letter
make no difference. Question marks at the end make none in a text that begins with a question word. They may turn any other
sentence into a question.

A text that contains code, a quotation, a colon or a line break may be about its own form ("Repeat: Hello!"). It is *verbatim*
and has no other form than itself, without white space around it.
"""

from __future__ import annotations

import re
import unicodedata

_VERBATIM = re.compile(r"[{}\[\]<>=|\\^~`;\"“”„«»\n]|:(?!\d)|\w\(|//|/\*|(?<!\w)['‘]")
_PLAIN = str.maketrans({"’": "'", "‘": "'", "–": "-", "—": "-", "−": "-", "\u00a0": " ", "。": ".", "！": "!", "？": "?"})
_END = re.compile(r"(?:(?<=\w)[.…]+|(?<=[^\W\d]{2})!+|\s*(?<!\?)\?+)$")  # after a number or a letter, "!" may be a factorial
_QUESTION = re.compile(r"(?:who|whose|what|when|where|which|why|how)\b", re.IGNORECASE)
_HYPHEN = re.compile(r"(?<=[^\W\d])-(?=[^\W\d])")


def is_verbatim(text: str) -> bool:
    return _VERBATIM.search(text.strip()) is not None


def normalize(text: str) -> str:
    """Return the normal form of `text`."""
    if is_verbatim(text):
        return text.strip()
    text = " ".join(unicodedata.normalize("NFC", text).translate(_PLAIN).split())
    bare = _END.sub("", text).rstrip()
    is_marked = text.endswith("?") and not _QUESTION.match(bare)
    return _with_small_initial(bare) + "?" * is_marked


def _with_small_initial(text: str) -> str:
    """Return `text` with a small first letter, unless the word has other capitals, as abbreviations have."""
    initial, *rest = text.split(" ", 1)
    return " ".join([initial[:1].lower() + initial[1:], *rest]) if initial[1:] == initial[1:].lower() else text


def same_words(one: str, other: str) -> bool:
    """Return whether two texts have the same words in the same order. Hyphens between words make no difference."""
    if is_verbatim(one) or is_verbatim(other):
        return normalize(one) == normalize(other)
    return _HYPHEN.sub(" ", normalize(one)) == _HYPHEN.sub(" ", normalize(other))
