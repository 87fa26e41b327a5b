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
from typing import Any

from . import lexicon

_QUOTED = re.compile(r'"([^"]+)"|«([^»]+)»|(?<!\w)\'([^\']+)\'(?!\w)')
_TOKEN = re.compile(
    r"(?P<number>(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)*))(?P<ordinal>st|nd|rd|th)?"
    r"|(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*[+#]*)|(?P<symbol>[^\w\s])"
)
_LIKE_CODE = re.compile(r"[{}\[\]<>=|\\^~`;]|\n\s|\w\(|//|/\*")
_LITERAL = re.compile(r"[@_/\\#$%&*+]|\w[.:]\w|[a-z][A-Z]|[A-Z]{2}|[^\W\d]\d|\d[^\W\d]")
_PLAIN = str.maketrans(
    {"’": "'", "‘": "'", "`": "'", "“": '"', "”": '"', "„": '"', "–": "-", "—": "-", "−": "-", "\u00a0": " "}
)
_PUNCTUATION = frozenset(".,;:?!'\"()-«»…¿¡")
_EDGES = ".,;:?!'\"()«»…¿¡"

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
    content: Hashes = ()
    words: Hashes = ()
    """All that counts, in the text's order."""

    @classmethod
    def of(cls, members: dict[str, Any]) -> Signature:
        """The signature whose members were written as JSON. Raises ``KeyError`` and ``TypeError`` for what is none."""
        lists = {field.name: tuple(members[field.name]) for field in fields(cls) if field.name not in ("whole", "plain")}
        return cls(str(members["whole"]), members["plain"] is True, **lists)


_SAME = ("kind", "negations", "numbers", "units", "dates", "quoted", "literals", "critical", "symbols")


def difference(one: Signature, other: Signature, *, strict: bool = True) -> str | None:
    """The first reason why the two texts do not go together; None if they do."""
    if not (one.plain and other.plain):
        return None if one.whole == other.whole else "script"
    for name in _SAME:
        if getattr(one, name) != getattr(other, name):
            return name
    if not set(one.names) <= set(other.words) or not set(other.names) <= set(one.words):
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

    def digest(word: str) -> str:
        return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), key=key, digest_size=6).hexdigest()

    plain_text = " ".join(unicodedata.normalize("NFKC", text).translate(_PLAIN).split())
    if _LIKE_CODE.search(text):
        return Signature(digest(text.strip()), plain=False)
    whole = digest(plain_text.casefold().strip(_EDGES + " "))
    if not all(_is_latin(letter) for letter in plain_text):
        return Signature(whole, plain=False)
    reading = _Reading(plain_text)
    return reading.signature(whole, digest) if reading.tells_something else Signature(whole, plain=False)


def _is_latin(letter: str) -> bool:
    return letter < "\u0250" or not letter.isalpha() or unicodedata.name(letter, "").startswith("LATIN")


@dataclass(slots=True)
class _Word:
    """A word in lower case, and whether it had a capital."""

    text: str
    capital: bool = False


class _Reading:
    """One text, taken apart."""

    def __init__(self, text: str) -> None:
        self.lists: dict[str, list[str]] = {name: [] for name in (*_SAME, "names", "content", "words")}
        self.lists["quoted"] = [next(filter(None, match)) for match in _QUOTED.findall(text)]
        chunks = [chunk.strip(_EDGES) for chunk in text.split()]
        self.lists["literals"] = [chunk for chunk in chunks if _LITERAL.search(chunk)]
        words: list[_Word] = []
        for match in _TOKEN.finditer(text):
            self._take(match, words)
        for word in self._unframed(_with_letters(words)):
            self._sort_in(word)

    def signature(self, whole: str, digest: Digest) -> Signature:
        ordered = {"numbers", "quoted", "literals", "words", "kind"}
        lists = {name: values if name in ordered else sorted(values) for name, values in self.lists.items()}
        return Signature(whole, plain=True, **{name: tuple(map(digest, values)) for name, values in lists.items()})

    @property
    def tells_something(self) -> bool:
        """Whether there is more in it than words that point elsewhere."""
        return any(self.lists[name] for name in ("content", "numbers", "units", "dates", "quoted", "literals"))

    def _take(self, match: re.Match[str], words: list[_Word]) -> None:
        number, symbol = match["number"], match["symbol"]
        if number:
            words.append(_Word("#" + _number(number) + ("." if match["ordinal"] else "")))
        elif symbol:
            if symbol not in _PUNCTUATION:
                self.lists["symbols"].append(symbol)
        else:
            words.extend(_words(match["word"]))

    def _unframed(self, words: list[_Word]) -> list[_Word]:
        """``words`` without what they are asked with; what kind of question they ask is noted."""
        texts = [word.text for word in words]
        asks = ""
        begin = 0
        while length := _begins(texts[begin:], lexicon.WAYS) or _begins(texts[begin:], lexicon.FRAMES):
            asks = "how" if tuple(texts[begin : begin + length]) in lexicon.WAYS else asks
            begin += length
            if asks:
                break
        rest = words[begin:] or words
        self.lists["kind"] = [asks or ("yes or no" if rest and rest[0].text in lexicon.POLAR else "")]
        return rest

    def _sort_in(self, word: _Word) -> None:
        """Notes a word under what it is."""
        text = word.text
        kind = _kind_of(text)
        if kind is not None:
            name, noted = kind
            self.lists[name].append(noted)
            self.lists["words"].append(noted)
        elif text not in lexicon.EMPTY:
            stem = _stem(text)
            self.lists["content"].append(stem)
            self.lists["words"].append(stem)
            if word.capital:
                self.lists["names"].append(stem)


def _kind_of(text: str) -> tuple[str, str] | None:
    """The list in which a word that has a meaning of its own for the guard is noted, and as what."""
    unit = lexicon.UNITS.get(text) or lexicon.UNITS.get(_singular(text))
    if text.startswith("#"):
        return "numbers", text
    if text.startswith("letter "):
        return "literals", text
    if text in lexicon.NUMBERS:
        return "numbers", "#" + lexicon.NUMBERS[text]
    if text in lexicon.ORDINALS:
        return "numbers", "#" + lexicon.ORDINALS[text] + "."
    if text in lexicon.NEGATIONS:
        return "negations", text
    if text in lexicon.DATES:
        return "dates", lexicon.DATES[text]
    if unit is not None:
        return "units", "unit " + unit
    return ("critical", text) if text in lexicon.CRITICAL or text in lexicon.DIRECTIONS else None


def _with_letters(words: list[_Word]) -> list[_Word]:
    """``words``, in which each "a" that is no article and each "I" that is no pronoun (vitamin A, World War I) is a letter."""
    return [_Word("letter " + word.text) if _is_letter(words, place) else word for place, word in enumerate(words)]


def _is_letter(words: list[_Word], place: int) -> bool:
    word, last = words[place], place == len(words) - 1
    if word.text == "a":
        return last or (word.capital and place > 0)
    if word.text != "i" or place == 0:
        return False
    before = words[place - 1]
    known = before.text in lexicon.POLAR or before.text in lexicon.EMPTY or _kind_of(before.text) is not None
    return last or (before.capital and not known)


def _begins(texts: list[str], phrases: list[tuple[str, ...]]) -> int:
    """How long the phrase is with which ``texts`` begin; 0 for none."""
    return next((len(phrase) for phrase in phrases if tuple(texts[: len(phrase)]) == phrase), 0)


def _number(text: str) -> str:
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def _words(text: str) -> list[_Word]:
    """The words that one stands for: contractions are written out, and French elisions taken apart."""
    capital, lower = text[0].isupper(), text.casefold() if "ß" not in text else text.lower()
    if lower == "i":
        capital = False
    if lower in lexicon.CONTRACTIONS:
        return [_Word(word) for word in lexicon.CONTRACTIONS[lower]]
    stem, apostrophe, suffix = lower.rpartition("'")
    if not apostrophe:
        return [_Word(part, capital) for part in lower.split("-")]
    if lower.endswith("n't"):
        return [_Word(lower[:-3]), _Word("not")]
    if suffix == "s":
        return [_Word(stem), _Word("is")] if stem in lexicon.TAKES_IS else [_Word(stem, capital)]
    if "'" + suffix in lexicon.SUFFIXES:
        return [_Word(stem), _Word(lexicon.SUFFIXES["'" + suffix])]
    if stem in lexicon.ELISIONS:
        return [_Word("ne" if stem == "n" else stem), _Word(suffix, capital)]
    return [_Word(lower, capital)]


def _stem(text: str) -> str:
    singular = _singular(text)
    return lexicon.SYNONYMS.get(text) or lexicon.SYNONYMS.get(singular) or singular


def _singular(text: str) -> str:
    if len(text) > 4 and text.endswith("ies"):
        return text[:-3] + "y"
    if len(text) > 4 and text.endswith(("sses", "shes", "ches", "xes", "zes")):
        return text[:-2]
    if len(text) > 3 and text.endswith("s") and not text.endswith(("ss", "us", "is")):
        return text[:-1]
    return text
