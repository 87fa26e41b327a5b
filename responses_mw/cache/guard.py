"""May the answer to one text be given to another that is near to it? A vector tells that two texts are about the same, not that
they ask the same: a number, a negation, two names in the other order hardly move it.

1. Two texts go together only if numbers, units, dates, negation, quoted strings, literals (paths, identifiers, addresses),
   names, and the words that bind and compare are the same, and what they share stands in the same order.
2. The guard is strict by default: all other words have to be the same too, up to a plural, a synonym and the ways to ask. The
   vector then finds what to compare; it does not decide. ``loose`` leaves these words to the vector.
3. A text in another script than Latin, or that looks like code, or that has no word with a meaning of its own, goes only
   with one that is the same.
4. A wrong refusal costs an answer of the upstream, a wrong hit gives a wrong answer: in doubt it refuses.

What it has to know of a text is its ``Signature``: hashes of words, salted. The text is not kept.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from .reading import EDGES, KINDS, Reading

_LIKE_CODE = re.compile(r"[{}\[\]<>=|\\^~`;]|\n\s|\w\(|//|/\*")
_PLAIN = str.maketrans(
    {"’": "'", "‘": "'", "`": "'", "“": '"', "”": '"', "„": '"', "–": "-", "—": "-", "−": "-", "\u00a0": " "}
)
_OF_ANOTHER_SENSE = ("<super>", "<sub>", "<fraction>", "<circle>", "<square>")
"""Letters that NFKC would make plain ones of: 10² is not 102."""

Digest = Callable[[str], str]
Hashes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What the guard compares of a text, as hashes. ``plain`` tells that it may be compared word by word."""

    whole: str
    plain: bool
    kind: Hashes = ()
    numbers: Hashes = ()
    units: Hashes = ()
    dates: Hashes = ()
    negations: Hashes = ()
    quoted: Hashes = ()
    literals: Hashes = ()
    critical: Hashes = ()
    symbols: Hashes = ()
    names: Hashes = ()
    forms: Hashes = ()
    """Words as they stand in the text, for the other's names."""
    content: Hashes = ()
    words: Hashes = ()
    """All that counts, in the text's order."""

    @classmethod
    def of(cls, members: dict[str, Any]) -> Signature:
        """The signature whose members were written as JSON. Raises ``KeyError`` and ``TypeError`` for what is none."""
        lists = {field.name: tuple(members[field.name]) for field in fields(cls) if field.name not in ("whole", "plain")}
        return cls(str(members["whole"]), members["plain"] is True, **lists)


def difference(one: Signature, other: Signature, *, strict: bool = True) -> str | None:
    """The first reason why the two texts do not go together; None if they do."""
    if not (one.plain and other.plain):
        return None if one.whole == other.whole else "script"
    for name in KINDS:
        if getattr(one, name) != getattr(other, name):
            return name
    if not set(one.names) <= set(other.forms) or not set(other.names) <= set(one.forms):
        return "names"
    if strict and set(one.content) != set(other.content):
        return "words"
    shared = set(one.words) & set(other.words)
    if [word for word in one.words if word in shared] != [word for word in other.words if word in shared]:
        return "order"
    return None


def signature(text: str, *, salt: str = "") -> Signature:
    """The signature of ``text``; signatures compare only under the same ``salt``."""
    key = hashlib.sha256(salt.encode()).digest()

    @cache  # a word is in several lists
    def digest(word: str) -> str:
        return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), key=key, digest_size=6).hexdigest()

    plain_text = " ".join(unicodedata.normalize("NFKC", text).translate(_PLAIN).split())
    if _LIKE_CODE.search(text) or any(unicodedata.decomposition(one).startswith(_OF_ANOTHER_SENSE) for one in text):
        return Signature(digest(text.strip()), plain=False)
    whole = digest(_uncapitalized(plain_text.strip(EDGES + " ")))
    if not all(_is_latin(letter) for letter in plain_text):
        return Signature(whole, plain=False)
    reading = Reading(plain_text)
    if not reading.tells_something:
        return Signature(whole, plain=False)
    lists = {name: values if name in _ORDERED else sorted(values) for name, values in reading.lists.items()}
    return Signature(whole, plain=True, **{name: tuple(map(digest, values)) for name, values in lists.items()})


_ORDERED = frozenset({"numbers", "quoted", "literals", "words", "kind"})


def _uncapitalized(text: str) -> str:
    """``text`` with a small first letter; further capitals may make other words."""
    return text[:1].lower() + text[1:]


def _is_latin(letter: str) -> bool:
    return letter < "\u0250" or not letter.isalpha() or unicodedata.name(letter, "").startswith("LATIN")
