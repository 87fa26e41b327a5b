"""A text as the guard reads it: its words in order, each under what it is.

English is read closely: what a question is asked with is left out, a plural and a few synonyms are one word. A text in another
language, or one about words themselves (spell, translate, a programming language), is read word by word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import lexicon

KINDS = ("kind", "negations", "numbers", "units", "dates", "quoted", "literals", "critical", "symbols")
"""The lists of a reading that two texts must share, in the order in which they are compared."""

_QUOTED = re.compile(r"\"[^\"]+\"|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_TOKEN = re.compile(
    r"(?P<number>(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)*))(?P<ordinal>st|nd|rd|th)?"
    r"|(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*[+#]*)|(?P<symbol>[^\w\s])"
)
_LITERAL = re.compile(r"[@_/\\#$%&*+]|\w[.:]\w|[a-z][A-Z]|[A-Z]{2}|[^\W\d]\d|\d[^\W\d]")
_PUNCTUATION = frozenset(".,;:?!'\"()-«»…¿¡")
_COUNTS = re.compile(r"[()]|(?<=\d)['\"!]|(?<![^\W\d_])-(?=\s*\d)|(?<=[^\W\d_])-(?!\w)|(?<=\w),")
"""Punctuation that changes what is asked: 6' and 6", 5!, - 5, O-, (2 + 3) * 4, and a comma within a sentence."""
_SENTENCE_ENDS = frozenset(".?!:")
EDGES = ".,;:?!'\"()«»…¿¡"


@dataclass(frozen=True, slots=True)
class Word:
    """A word in lower case, a number (``#`` and its digits), or a symbol. ``case`` is ``^`` where it has a capital, and ``?``
    where it has one and begins a sentence."""

    text: str
    case: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """Phrases that a question may begin with, and that are left out; only where a word of ``before`` follows, and none of
    ``unless``. What is left is a question of that ``kind``."""

    phrases: frozenset[tuple[str, ...]]
    kind: str = ""
    before: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()

    def length(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` are such a phrase; 0 for none."""
        for length in range(min(len(texts), _LONGEST), 0, -1):
            after = texts[length] if length < len(texts) else ""
            follows = (not self.before or after in self.before) and after not in self.unless
            if follows and tuple(texts[:length]) in self.phrases:
                return length
        return 0


_LONGEST = 6
"""So many words the longest of these phrases has."""
_FRAMES = (
    Frame(lexicon.WAYS, "how", unless=lexicon.OF_ONESELF),
    Frame(lexicon.REQUESTS, before=lexicon.TASKS),
    Frame(lexicon.WONDERS, before=lexicon.ASKS),
    Frame(lexicon.DEFINES, "define"),
    Frame(lexicon.TELLS, "tell"),
    Frame(lexicon.TELLINGS, unless=lexicon.THINGS),
    Frame(lexicon.FRAMES),
)


class Reading:
    """One text, taken apart: ``lists`` of what it holds, ``words`` of all that counts in the text's order, ``forms`` of its
    words as they stand there."""

    def __init__(self, text: str) -> None:
        self.lists: dict[str, list[str]] = {name: [] for name in (*KINDS, "names", "content", "words", "forms")}
        self.lists["quoted"] = _QUOTED.findall(text)
        chunks = [chunk.strip(EDGES) for chunk in text.split()]
        self.lists["literals"] = [chunk for chunk in chunks if _LITERAL.search(chunk)]
        words = _tokens(text)
        texts = {word.text for word in words}
        english = not texts.isdisjoint(lexicon.ENGLISH) and texts.isdisjoint(lexicon.FOREIGN) and "¿" not in text
        self._closely = english and texts.isdisjoint(lexicon.ABOUT_WORDS)
        kind, words = _unframed(words) if english else ("", words)
        self.lists["kind"] = [kind]
        words = _with_letters(_with_commas_that_count(words))
        self._clashing = _clashing(words)
        for place, word in enumerate(words):
            self._sort_in(word, after_number=place > 0 and _counts(words[place - 1].text))

    @property
    def tells_something(self) -> bool:
        """Whether there is more in it than words that point elsewhere."""
        return any(self.lists[name] for name in ("content", "numbers", "units", "dates", "quoted", "literals"))

    def _sort_in(self, word: Word, *, after_number: bool) -> None:
        """Notes a word under what it is."""
        kind = _kind_of(word, after_number=after_number)
        if kind is not None:
            name, noted = kind
            self.lists[name].append(noted)
            self.lists["words"].append(noted)
        elif not (self._closely and word.text in lexicon.EMPTY):
            form = _cased(word, word.text)
            stem = self._stem(form)
            self.lists["content"].append(stem)
            self.lists["words"].append(stem)
            self.lists["forms"].append(form)
            if word.case:
                self.lists["names"].append(form)

    def _stem(self, text: str) -> str:
        if not self._closely:
            return text
        singular = _singular(text)
        return singular if singular in self._clashing else _synonym(singular)


# -- from a text to words ----------------------------------------------------------------------------------------------------


def _tokens(text: str) -> list[Word]:
    words: list[Word] = []
    begins = True
    for match in _TOKEN.finditer(text):
        number, symbol = match["number"], match["symbol"]
        if number:
            words.append(Word("#" + _number(number) + ("." if match["ordinal"] else "")))
        elif not symbol:
            words.extend(_words(match["word"], "?" if begins else "^"))
        elif symbol not in _PUNCTUATION or _COUNTS.match(text, match.start()):
            words.append(Word(symbol))
        begins = symbol in _SENTENCE_ENDS
    return words


def _number(text: str) -> str:
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def _words(text: str, case: str) -> list[Word]:
    """The words that one stands for: contractions are written out, and French elisions taken apart. ``case`` is that of a
    capital here."""
    lower = text.casefold() if "ß" not in text else text.lower()
    case = case if text[0].isupper() and lower != "i" else ""
    if lower in lexicon.CONTRACTIONS:
        return [Word(word) for word in lexicon.CONTRACTIONS[lower]]
    stem, apostrophe, suffix = lower.rpartition("'")
    if not apostrophe:
        return [Word(part, case) for part in lower.split("-")]
    if lower.endswith("n't") and lower != "n't":
        return [Word(lower[:-3]), Word("not")]
    if suffix == "s":
        return [Word(stem), Word("is")] if stem in lexicon.TAKES_IS else [Word(stem, case), Word("'s")]
    if "'" + suffix in lexicon.SUFFIXES:
        return [Word(stem), Word(lexicon.SUFFIXES["'" + suffix])]
    if stem in lexicon.ELISIONS:
        return [Word("ne" if stem == "n" else stem), Word(suffix, case)]
    return [Word(lower, case)]


# -- what a question is asked with -------------------------------------------------------------------------------------------


def _unframed(words: list[Word]) -> tuple[str, list[Word]]:
    """The kind of question that ``words`` ask, and the words without what they are asked with."""
    texts = [word.text for word in words]
    end = len(texts) - _ends(texts)
    begin, kind = 0, ""
    while begin < end:
        frame, length = _begins(texts[begin:end])
        if not length:
            break
        begin += length
        kind = frame.kind or kind
        if kind == "how":
            break
    rest = words[begin:end] or words
    if not kind:
        kind = "yes or no" if rest[0].text in lexicon.POLAR else ""
    if kind == "tell" and not any(word.text in lexicon.CRITICAL or word.text in lexicon.DIRECTIONS for word in rest):
        kind = ""  # "explain entropy" asks what it is; "describe the capital of Peru" does not ask which city it is
    return kind, rest


def _begins(texts: list[str]) -> tuple[Frame, int]:
    """The frame with which ``texts`` begin, and how long it is: 0 for none. A comma belongs to what stands before it."""
    for frame in _FRAMES:
        length = frame.length(texts)
        if length:
            return frame, length + (texts[length : length + 1] == [","])
    return _FRAMES[-1], 0


def _ends(texts: list[str]) -> int:
    """How many of ``texts`` are thanks at the end."""
    ends = next((len(phrase) for phrase in lexicon.ENDINGS if tuple(texts[-len(phrase) :]) == phrase), 0)
    return ends + (bool(ends) and texts[-ends - 1 : -ends] == [","])


def _with_commas_that_count(words: list[Word]) -> list[Word]:
    """``words`` without the commas that tell nothing: at an edge, after a number, or before what joins two parts."""

    def counts(place: int) -> bool:
        inside = 0 < place < len(words) - 1
        return inside and not words[place - 1].text.startswith("#") and words[place + 1].text not in lexicon.JOINS

    return [word for place, word in enumerate(words) if word.text != "," or counts(place)]


# -- what a word is ----------------------------------------------------------------------------------------------------------


_KNOWN = {
    **{text: ("dates", date) for text, date in lexicon.DATES.items()},
    **{text: ("negations", text) for text in lexicon.NEGATIONS},
    **{text: ("numbers", f"#{number}.") for text, number in lexicon.ORDINALS.items()},
    **{text: ("numbers", "#" + number) for text, number in lexicon.NUMBERS.items()},
}
_BINDING = {**{text: text for text in lexicon.CRITICAL | lexicon.DIRECTIONS}, **dict.fromkeys(lexicon.BE, "be")}


def _kind_of(word: Word, *, after_number: bool) -> tuple[str, str] | None:
    """The list in which a word that has a meaning of its own for the guard is noted, and as what."""
    text = word.text
    if text.startswith("#"):
        return "numbers", text
    if text.startswith("letter "):
        return "literals", text
    if text in _KNOWN:
        name, noted = _KNOWN[text]
        return name, _cased(word, noted)
    unit = _unit(word, after_number=after_number)
    if unit is not None:
        return "units", "unit " + unit
    if text in _BINDING:
        return "critical", _cased(word, _BINDING[text])
    return None if text[0].isalpha() else ("symbols", text)


def _counts(text: str) -> bool:
    return text.startswith("#") or text in lexicon.NUMBERS


def _unit(word: Word, *, after_number: bool) -> str | None:
    """What a unit is called; a single letter is one only after a number, and M is not m."""
    if len(word.text) == 1 and not after_number:
        return None
    unit = lexicon.UNITS.get(word.text) or lexicon.UNITS.get(_singular(word.text))
    return unit + "^" if unit and word.case and len(word.text) <= 3 else unit


def _cased(word: Word, noted: str) -> str:
    """``noted``, with its capital where that makes it another word (Turkey and turkey)."""
    return noted + word.case if word.text in lexicon.CASED else noted


def _with_letters(words: list[Word]) -> list[Word]:
    """``words``, in which each "a" that is no article and each "I" that is no pronoun (vitamin A, a few, World War I) is a
    letter."""
    return [Word("letter " + word.text) if _is_letter(words, place) else word for place, word in enumerate(words)]


def _is_letter(words: list[Word], place: int) -> bool:
    word, last = words[place], place == len(words) - 1
    if word.text == "a":
        return last or (bool(word.case) and place > 0) or words[place + 1].text in lexicon.WITH_AN_ARTICLE
    if word.text != "i" or place == 0:
        return False
    before = words[place - 1]
    known = before.text in lexicon.POLAR or before.text in lexicon.EMPTY or _kind_of(before, after_number=False) is not None
    return last or (bool(before.case) and not known)


def _clashing(words: Sequence[Word]) -> frozenset[str]:
    """Words of which the text has a synonym too: there they are not the same (What is the difference of delete and remove?)."""
    by_stem: dict[str, set[str]] = {}
    for singular in {_singular(word.text) for word in words}:
        by_stem.setdefault(_synonym(singular), set()).add(singular)
    return frozenset(word for group in by_stem.values() if len(group) > 1 for word in group)


def _synonym(text: str) -> str:
    return lexicon.SYNONYMS.get(text, text)


def _singular(text: str) -> str:
    singular = text
    if len(text) > 4 and text.endswith("ies"):
        singular = text[:-3] + "y"
    elif len(text) > 4 and text.endswith(("sses", "shes", "ches", "xes", "zes")):
        singular = text[:-2]
    elif len(text) > 3 and text.endswith("s") and not text.endswith(("ss", "us", "is", "ics")):
        singular = text[:-1]
    return text if singular in lexicon.PLURALS_APART else singular
