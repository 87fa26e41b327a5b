"""May the answer to one text be given to another that is near to it? A vector tells that two texts are about the same, not that
they ask the same: a number, a negation, two names in the other order hardly move it.

1. Two texts go together only if numbers, units, dates, negation, quoted strings, literals (paths, identifiers, addresses),
   names, and the words that bind and compare are the same, and what they share stands in the same order.
2. The guard is strict by default: all other words have to be the same too, up to a spelling, a synonym, a plural and the
   ways to ask. The vector then finds what to compare; it does not decide. ``loose`` leaves these words to the vector.
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
from typing import Any

from . import lexicon
from .reading import KINDS, Reading
from .tokens import EDGES

_LIKE_CODE = re.compile(r"[{}\[\]<>=|\\^~`;]|\n\s|\w\(|//|/\*")
_PLAIN = str.maketrans(
    {"’": "'", "‘": "'", "`": "'", "“": '"', "”": '"', "„": '"', "–": "-", "—": "-", "−": "-", "\u00a0": " "}
)
_OF_ANOTHER_SENSE = ("<super>", "<sub>", "<fraction>", "<circle>", "<square>")

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
    articles: Hashes = ()
    names: Hashes = ()
    careful: bool = False
    """Whether it is written with capitals where they belong."""
    proper: Hashes = ()
    """Names within a sentence."""
    bare: Hashes = ()
    """Singulars without an article: a mass, a name, or a verb."""
    plurals: Hashes = ()
    definite: Hashes = ()
    """Words after "the", and after "a"."""
    indefinite: Hashes = ()
    forms: Hashes = ()
    """Words as they stand in the text, for the other's names."""
    content: Hashes = ()
    words: Hashes = ()
    """All that counts, in the text's order."""

    @classmethod
    def of(cls, members: dict[str, Any]) -> Signature:
        """The signature whose members were written as JSON. Raises ``KeyError`` and ``TypeError`` for what is none."""
        lists = {field.name: tuple(members[field.name]) for field in fields(cls) if field.name not in _NO_LISTS}
        return cls(whole=str(members["whole"]), plain=members["plain"] is True, careful=members["careful"] is True, **lists)


_NO_LISTS = frozenset({"whole", "plain", "careful"})


def difference(one: Signature, other: Signature, *, strict: bool = True) -> str | None:
    """The first reason why the two texts do not go together; None if they do."""
    if not (one.plain and other.plain):
        return None if one.whole == other.whole else "script"
    for name in KINDS:
        if getattr(one, name) != getattr(other, name):
            return name
    if _names_differ(one, other) or _names_differ(other, one):
        return "names"
    if strict and (set(one.content) != set(other.content) or _number_matters(one, other) or _number_matters(other, one)):
        return "words"
    shared = set(one.words) & set(other.words)
    if [word for word in one.words if word in shared] != [word for word in other.words if word in shared]:
        return "order"
    return None


def _names_differ(one: Signature, other: Signature) -> bool:
    """Whether a name of ``one`` is missing in ``other``, or is no name there although its writer knows capitals."""
    if not set(one.names) <= set(other.forms):
        return True
    return one.careful and other.careful and not set(one.proper) <= set(other.names)


def _number_matters(one: Signature, other: Signature) -> bool:
    """Whether ``one`` has the plural of a word that stands without an article in ``other``, which is another word then (damage
    and damages, http and https), or speaks of "the" one where ``other`` speaks of any."""
    return not (set(one.plurals).isdisjoint(other.bare) and set(one.definite).isdisjoint(other.indefinite))


def signature(text: str, *, salt: str = "") -> Signature:
    """The signature of ``text``; signatures compare only under the same ``salt``."""
    digest = _digest(salt)
    ascii_only = text.isascii()
    plain_text = " ".join((text if ascii_only else unicodedata.normalize("NFKC", text).translate(_PLAIN)).split())
    if _LIKE_CODE.search(text) or not (ascii_only or all(map(_keeps_its_sense, text))):
        return Signature(digest(text.strip()), plain=False)
    whole = digest(_uncapitalized(plain_text.strip(EDGES + " ")) + _mark_that_counts(plain_text))
    if not (plain_text.isascii() or all(map(_is_latin, plain_text))):
        return Signature(whole, plain=False)
    reading = Reading(plain_text)
    if not reading.tells_something:
        return Signature(whole, plain=False)
    hashes = {
        name: tuple(map(digest, values if name in _ORDERED else sorted(values))) if values else ()
        for name, values in reading.lists.items()
    }
    return Signature(whole, plain=True, careful=reading.careful, **hashes)


def _digest(salt: str) -> Digest:
    """The hash of a word under ``salt``, made once for each word: one is in several lists."""
    keyed = hashlib.blake2b(key=hashlib.sha256(salt.encode()).digest(), digest_size=6)
    made: dict[str, str] = {}

    def digest(word: str) -> str:
        known = made.get(word)
        if known is None:
            own = keyed.copy()
            own.update(word.encode("utf-8", "surrogatepass"))
            known = made[word] = own.hexdigest()
        return known

    return digest


_ORDERED = frozenset({"numbers", "quoted", "literals", "words", "kind"})


def _uncapitalized(text: str) -> str:
    """``text`` with a small first letter; further capitals may make other words."""
    return text[:1].lower() + text[1:]


def _mark_that_counts(text: str) -> str:
    """The question mark of a text that nothing else makes a question."""
    return "?" if text.endswith("?") and not any(word in text.lower() for word in lexicon.INTERROGATIVES_WITHIN) else ""


def _keeps_its_sense(letter: str) -> bool:
    """Whether NFKC leaves what ``letter`` means: 10² is not 102."""
    return not unicodedata.decomposition(letter).startswith(_OF_ANOTHER_SENSE)


def _is_latin(letter: str) -> bool:
    return letter < "\u0250" or not letter.isalpha() or unicodedata.name(letter, "").startswith("LATIN")
