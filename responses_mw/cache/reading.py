"""Classify the words of a text for the guard.

English text is normalized: the way of asking is removed, plurals and a few synonyms become one word. A text in another
language, or one about words (spell, translate, a programming language), is read word by word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import lexicon
from .lexicon import Word, literals, spelled, tokens, without_commas
from .question import article, unframed

KINDS = ("kind", "negations", "numbers", "units", "dates", "quoted", "literals", "critical", "symbols", "articles")
"""The lists that must be equal in two texts, in the order of comparison."""

_QUOTED = re.compile(r"\"[^\"]+\"|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_PERCENT = re.compile(r"(?<=\d) ?%(?=\s+[^\W\d]{2}|[\s?.!,;:)]*$)")
_LOWER_I = re.compile(r"\bi\b")


class Reading:
    """The words of one text. ``lists`` has a list for each class; ``words`` in it has all words that are compared, in order."""

    def __init__(self, text: str) -> None:
        self.lists: dict[str, list[str]] = {name: [] for name in (*KINDS, *_OF_CONTENT, "words")}
        self.careful = text[:1].isupper() and not _LOWER_I.search(text)
        text = _PERCENT.sub(" percent", text)
        self.lists["quoted"] = _QUOTED.findall(text)
        self.lists["literals"] = list(literals(text))
        words = tokens(text)
        texts = {word.text for word in words}
        self._english = not texts.isdisjoint(lexicon.ENGLISH) and texts.isdisjoint(lexicon.FOREIGN) and "¿" not in text
        self._closely = self._english and texts.isdisjoint(lexicon.ABOUT_WORDS)
        asked = text.endswith("?")
        if self._english:
            kind, words = unframed(words, asked=asked)
        else:
            kind = "asked so" if asked and texts.isdisjoint(lexicon.INTERROGATIVES) else ""
        self.lists["kind"] = [kind]
        if self._closely:
            self.lists["articles"] = [article(kind, words)]
        words = _with_letters(_without_plain_commas(words))
        self._clashing = _clashing(words)
        self._determined = 0
        self._article: str | None = None
        for place, word in enumerate(words):
            self._classify(word, after_number=place > 0 and _is_number(words[place - 1].text))

    @property
    def has_content(self) -> bool:
        """Whether the text has content of its own, not only words that refer to a context."""
        return any(self.lists[name] for name in ("content", "numbers", "units", "dates", "quoted", "literals"))

    def _classify(self, word: Word, *, after_number: bool) -> None:
        """Add a word to the list of its class."""
        kind = _kind_of(word, after_number=after_number)
        self._determined = _REACH if word.text in lexicon.DETERMINERS else self._determined - 1
        if kind is not None:
            name, noted = kind
            if name == "critical" and self._determined < _REACH:
                self._determined = -1
            if name == "numbers" and self._english:
                noted = without_commas(noted)
            self.lists[name].append(noted)
            self.lists["words"].append(noted)
        elif not (self._closely and word.text in lexicon.EMPTY):
            self._add_content(word)
            if self._article is not None:
                self.lists[self._article].append(self.lists["content"][-1])
        self._article = _ARTICLES.get(word.text)

    def _add_content(self, word: Word) -> None:
        """Add a content word."""
        lists = self.lists
        form = _cased(word, spelled(word.text) if self._closely else word.text)
        stem = form
        if self._closely:
            singular = _singular(form) if form not in lexicon.WRITTEN else form
            stem = singular if singular in self._clashing else _synonym(singular)
            if singular != form:
                lists["plurals"].append(stem)
            elif self._determined < 0:
                lists["bare"].append(stem)
        lists["content"].append(stem)
        lists["words"].append(stem)
        lists["forms"].append(form)
        if word.case:
            lists["names"].append(form)
        if word.case == "^":
            lists["proper"].append(form)


_OF_CONTENT = ("names", "proper", "content", "bare", "plurals", "definite", "indefinite", "forms")
_ARTICLES = {"the": "definite", "a": "indefinite", "an": "indefinite"}
_REACH = 4
"""Maximum distance of a determiner from its noun: a very big red car."""


def _without_plain_commas(words: list[Word]) -> list[Word]:
    """Remove commas without a meaning: at an edge, after a number, or before a conjunction."""

    def is_significant(place: int) -> bool:
        inside = 0 < place < len(words) - 1
        return inside and not words[place - 1].text.startswith("#") and words[place + 1].text not in lexicon.JOINS

    return [word for place, word in enumerate(words) if word.text != "," or is_significant(place)]


# -- classes of words ----------------------------------------------------------------------------------------------------------


_KNOWN = {
    **{text: ("dates", date) for text, date in lexicon.DATES.items()},
    **{text: ("negations", text) for text in lexicon.NEGATIONS},
    **{text: ("numbers", f"#{number}.") for text, number in lexicon.ORDINALS.items()},
    **{text: ("numbers", "#" + number) for text, number in lexicon.NUMBERS.items()},
}
_BINDING = {**{text: text for text in lexicon.CRITICAL | lexicon.DIRECTIONS}, **dict.fromkeys(lexicon.BE, "be")}


def _kind_of(word: Word, *, after_number: bool) -> tuple[str, str] | None:
    """Return the list and the normalized form of a word that the guard compares by its class; None for a content word."""
    text = word.text
    if text.startswith("#"):
        return "numbers", text
    if text.startswith("letter "):
        return "literals", text
    if text in _KNOWN and (text != "am" or after_number):
        name, noted = _KNOWN[text]
        return name, _cased(word, noted)
    unit = _unit(word, after_number=after_number)
    if unit is not None:
        return "units", "unit " + unit
    if text in _BINDING:
        return "critical", _cased(word, _BINDING[text])
    return None if text[0].isalpha() else ("symbols", text)


def _is_number(text: str) -> bool:
    return text.startswith("#") or text in lexicon.NUMBERS


def _unit(word: Word, *, after_number: bool) -> str | None:
    """Return the name of a unit. A single letter is a unit only after a number, and M is not m."""
    if len(word.text) == 1 and not after_number:
        return None
    unit = lexicon.UNITS.get(word.text) or lexicon.UNITS.get(_singular(word.text))
    return unit + "^" if unit and word.case and len(word.text) <= 3 else unit


def _cased(word: Word, noted: str) -> str:
    """Mark ``noted`` as capitalized if that makes it another word (Turkey and turkey, G and g)."""
    if len(word.text) == 1:
        return noted + "^" if word.case else noted
    return noted + word.case if word.text in lexicon.CASED else noted


def _with_letters(words: list[Word]) -> list[Word]:
    """Mark each "a" that is not an article and each "I" that is not a pronoun as a letter (vitamin A, a few, World War I), and
    ignore the case of a letter that enumerates (vitamin D, plan B)."""

    def read(place: int, word: Word) -> Word:
        if _is_letter(words, place):
            return Word("letter " + word.text)
        return Word(word.text) if place and words[place - 1].text in lexicon.LETTERED else word

    return [read(place, word) if len(word.text) == 1 else word for place, word in enumerate(words)]


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
    """Return words whose synonym is in the text too: there, the two are different words (delete and remove)."""
    by_stem: dict[str, set[str]] = {}
    for word in words:
        singular = _singular(word.text)
        if singular in lexicon.SYNONYMS:
            by_stem.setdefault(lexicon.SYNONYMS[singular], set()).add(singular)
    return frozenset().union(*(group for group in by_stem.values() if len(group) > 1))


def _synonym(text: str) -> str:
    return lexicon.SYNONYMS.get(text, text)


def _singular(text: str) -> str:
    if not text.endswith("s"):
        return text
    singular = text
    if len(text) > 4 and text.endswith("ies"):
        singular = text[:-3] + "y"
    elif len(text) > 4 and text.endswith(("sses", "shes", "ches", "xes", "zes")):
        singular = text[:-2]
    elif len(text) > 3 and not text.endswith(("ss", "us", "is", "ics")):
        singular = text[:-1]
    return text if singular in lexicon.PLURALS_APART else singular
