"""The guard: decides whether the answer to one text may be reused for a similar one.

Similar embeddings say that two texts have the same topic, not that they ask the same: a number, a negation or swapped names
hardly change a vector.

1. Numbers, units, dates, negation, quoted strings, literals (paths, identifiers, addresses), names, and words that connect and
   compare must be the same in both texts, and the words in both must have the same order.
2. A strict guard (the default) requires all other words to be the same too, except for spelling, synonyms, plurals and ways of
   asking: the vector finds candidates, but does not decide. A ``loose`` guard leaves these words to the vector.
3. A text in a script other than Latin, one that looks like code, and one without any content word match only themselves.
4. A wrong refusal costs a call to the upstream, a wrong hit gives a wrong answer: in doubt the guard refuses.

The guard compares ``Signature``s, which contain salted hashes of words. The text itself is not stored.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from . import lexicon
from .lexicon import EDGES
from .reading import KINDS, Reading

_LIKE_CODE = re.compile(r"[{}\[\]<>=|\\^~`;]|\n\s|\w\(|//|/\*")
_PLAIN = str.maketrans(
    {"’": "'", "‘": "'", "`": "'", "“": '"', "”": '"', "„": '"', "–": "-", "—": "-", "−": "-", "\u00a0": " "}
)
_CHANGES_MEANING = ("<super>", "<sub>", "<fraction>", "<circle>", "<square>")

Digest = Callable[[str], str]
Hashes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The properties of a text that the guard compares, as hashes. If a text is not ``plain``, only ``whole`` is compared."""

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
    """Whether the text uses capitals correctly, as far as its first letter and "I" show."""
    proper: Hashes = ()
    """Capitalized words within a sentence."""
    bare: Hashes = ()
    """Singulars without an article: mass nouns, names and verbs."""
    plurals: Hashes = ()
    definite: Hashes = ()
    """Words after "the". ``indefinite`` has words after "a"."""
    indefinite: Hashes = ()
    forms: Hashes = ()
    """Words as written, to be compared with the other text's names."""
    content: Hashes = ()
    words: Hashes = ()
    """All words that are compared, in the order of the text."""

    @classmethod
    def of(cls, members: dict[str, Any]) -> Signature:
        """Restore a signature from JSON. Raises ``KeyError`` or ``TypeError`` if it is invalid."""
        lists = {field.name: tuple(members[field.name]) for field in fields(cls) if field.name not in _SCALARS}
        return cls(whole=str(members["whole"]), plain=members["plain"] is True, careful=members["careful"] is True, **lists)


RULES = {
    "script": "code, scripts other than Latin, and texts without a content word match only themselves",
    "kind": "they are different kinds of questions",
    "negations": "one has a negation",
    "numbers": "the numbers differ",
    "units": "the units differ",
    "dates": "the dates differ",
    "quoted": "the quoted texts differ",
    "literals": "paths, identifiers or addresses differ",
    "critical": "words that connect or compare differ",
    "symbols": "the symbols differ",
    "articles": "an article changes the meaning",
    "names": "the names differ",
    "words": "other words differ (cache.guard: loose leaves these to the similarity)",
    "order": "the words are in a different order",
}
"""The meaning of each result of ``difference``, in the order of comparison."""

_SCALARS = frozenset({"whole", "plain", "careful"})


def difference(one: Signature, other: Signature, *, strict: bool = True) -> str | None:
    """Return the first of the ``RULES`` by which the two texts differ; None if one answer serves both."""
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
    """Return whether a name of ``one`` is missing in ``other``, or not capitalized there although others are."""
    if not set(one.names) <= set(other.forms):
        return True
    return one.careful and other.careful and not set(one.proper) <= set(other.names)


def _number_matters(one: Signature, other: Signature) -> bool:
    """Return whether the number or the article of a word makes a difference.

    It does if ``one`` has the plural of a word without an article in ``other`` (damage and damages, http and https), or
    "the" where ``other`` has "a".
    """
    return not (set(one.plurals).isdisjoint(other.bare) and set(one.definite).isdisjoint(other.indefinite))


def signature(text: str, *, salt: str = "") -> Signature:
    """Return the signature of ``text``. Signatures are comparable only under the same ``salt``."""
    digest = _digest(salt)
    ascii_only = text.isascii()
    plain_text = " ".join((text if ascii_only else unicodedata.normalize("NFKC", text).translate(_PLAIN)).split())
    if _LIKE_CODE.search(text) or not (ascii_only or all(map(_keeps_meaning, text))):
        return Signature(digest(text.strip()), plain=False)
    whole = digest(_uncapitalized(plain_text.strip(EDGES + " ")) + _question_mark(plain_text))
    if not (plain_text.isascii() or all(map(_is_latin, plain_text))):
        return Signature(whole, plain=False)
    reading = Reading(plain_text)
    if not reading.has_content:
        return Signature(whole, plain=False)
    hashes = {
        name: tuple(map(digest, values if name in _ORDERED else sorted(values))) if values else ()
        for name, values in reading.lists.items()
    }
    return Signature(whole, plain=True, careful=reading.careful, **hashes)


def _digest(salt: str) -> Digest:
    """Return the function that hashes a word under ``salt``."""
    key = hashlib.sha256(salt.encode()).digest()
    return lambda word: hashlib.blake2b(word.encode("utf-8", "surrogatepass"), key=key, digest_size=6).hexdigest()


_ORDERED = frozenset({"numbers", "quoted", "literals", "words", "kind"})


def _uncapitalized(text: str) -> str:
    """Return ``text`` with a lower-case first letter; other capitals may change the meaning."""
    return text[:1].lower() + text[1:]


def _question_mark(text: str) -> str:
    """Return the question mark if only it shows that the text is a question; otherwise an empty string."""
    return "?" if text.endswith("?") and not any(word in text.lower() for word in lexicon.INTERROGATIVES_WITHIN) else ""


def _keeps_meaning(letter: str) -> bool:
    """Return whether NFKC preserves the meaning of ``letter``: 10² is not 102."""
    return not unicodedata.decomposition(letter).startswith(_CHANGES_MEANING)


def _is_latin(letter: str) -> bool:
    return letter < "\u0250" or not letter.isalpha() or unicodedata.name(letter, "").startswith("LATIN")
