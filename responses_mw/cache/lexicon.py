"""The words that the guard knows, read from ``words.txt``, and how it splits a text into words.

A missing word only costs hits: an unknown word must be in both texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

Group = list[str]


def _sections() -> dict[str, list[Group]]:
    """Return the groups of words of each section."""
    sections: dict[str, list[Group]] = {}
    groups: list[Group] = []
    for line in (files("responses_mw.cache") / "words.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            groups = sections.setdefault(line.strip("[]"), [])
        elif not line.startswith("#"):
            groups += [group.split() for group in line.split(";") if group.strip()]
    return sections


_SECTIONS = _sections()


def _set(section: str) -> frozenset[str]:
    return frozenset(word for group in _SECTIONS[section] for word in group)


def _to_first(section: str) -> dict[str, str]:
    return {word: group[0] for group in _SECTIONS[section] for word in group}


def _numbers(section: str) -> dict[str, str]:
    """Return the number of each word: a group starts with the number of its first word, and counts up from there."""
    numbers: dict[str, str] = {}
    for first, *words in _SECTIONS[section]:
        numbers |= {word: first if place == 0 else str(int(first) + place) for place, word in enumerate(words)}
    return numbers


def _phrases(section: str) -> frozenset[tuple[str, ...]]:
    return frozenset(map(tuple, _SECTIONS[section]))


NUMBERS = _numbers("numbers")
ORDINALS = _numbers("ordinals")
UNITS = _to_first("units")
DATES = _to_first("dates")
NEGATIONS = _set("negations")
CRITICAL = _set("critical")
DIRECTIONS = _set("directions")
EMPTY = _set("empty")
BE = _set("be")
POLAR = _set("polar")
FRAMES = _phrases("frames")
WAYS = _phrases("ways")
OF_ONESELF = _set("of-oneself")
REQUESTS = _phrases("requests")
TASKS = _set("tasks")
DEEDS = _set("deeds")
POINTING = _set("pointing")
INTERROGATIVES = _set("interrogatives")
INTERROGATIVES_WITHIN = _set("interrogatives-within")
TELLINGS = _phrases("tellings")
KNOWN = _set("known")
WONDERS = _phrases("wonders")
ASKS = _set("asks")
PLACES = _phrases("places")
FINDINGS = _set("findings")
PERSONS = _set("persons")
MEANS = _phrases("means")
DEFINES = _phrases("defines")
TELLS = _phrases("tells")
ENDINGS = sorted(_phrases("endings"), key=len, reverse=True)
JOINS = _set("joins")
WITH_AN_ARTICLE = _set("with-an-article")
ENGLISH = _set("english")
FOREIGN = _set("foreign")
ABOUT_WORDS = _set("about-words")
SETTINGS = _set("settings")
CONVERSIONS = _set("conversions")
DETERMINERS = _set("determiners")
LETTERED = _set("lettered")
WRITTEN = _set("written")
CASED = _set("cased")
PLURALS_APART = _set("plurals-apart")
SPELLINGS = _to_first("spellings")
DOUBLED = _set("doubled")
SYNONYMS = _to_first("synonyms")
CONTRACTIONS = {first: rest for first, *rest in _SECTIONS["contractions"]}
SUFFIXES = {first: rest[0] for first, *rest in _SECTIONS["suffixes"]}
TAKES_IS = _set("takes-is")
ELISIONS = _set("elisions")

# -- tokens ------------------------------------------------------------------------------------------------------------------

EDGES = ".,;:?!'\"()«»…¿¡"

_TOKEN = re.compile(
    r"(?P<number>(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)*))(?P<ordinal>st|nd|rd|th)?"
    r"|(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*[+#]*)|(?P<symbol>[^\w\s])"
)
_LITERAL = re.compile(r"(?<!\S)--?[^\W\d_]|[@_/\\#$%&*+]|\w[.:]\w|[a-z][A-Z]|[A-Z]{2}|[^\W\d]\d|\d[^\W\d]")
_DOTTED = re.compile(r"(\.[^\W\d_].*)")
"""A word that starts with a dot: .net is not a net."""
_PUNCTUATION = frozenset(".,;:?!'\"()-«»…¿¡")
_SIGNIFICANT = re.compile(r"[()]|(?<=\d)['\"!]|(?<=\b\w)!|(?<![^\W\d_])-(?=\s*\d)|(?<=[^\W\d_])-(?!\w)|(?<=\w),")
"""Punctuation that changes the meaning: 6' and 6", 5!, n!, - 5, O-, (2 + 3) * 4, and a comma within a sentence."""
_SENTENCE_ENDS = frozenset(".?!:")
_THOUSANDS = re.compile(r"#-?\d{1,3}(,\d{3})+(\.\d+)?\.?")
_DOUBLED = re.compile(r"(\w+l)l(ed|ing|ers?)")
_BRITISH = (
    (re.compile(r"(?<=\w\w)our(?=(?:s|ed|ing|ites?|ful|less|able)?$)"), "or"),
    (re.compile(r"(?<=\w\w\w)is(?=(?:e[sd]?|ing|ers?|ations?)$)"), "iz"),
    (re.compile(r"(?<=ly)s(?=(?:e[sd]?|ing|ers?)$)"), "z"),
)
"""A result that is not a word does no harm, because it is only compared."""


class Word(NamedTuple):
    """A lower-case word, a number (``#`` and its digits), or a symbol.

    ``case`` is ``^`` for a capitalized word, and ``?`` for one that begins a sentence.
    """

    text: str
    case: str = ""


def tokens(text: str) -> list[Word]:
    """Return the words, numbers and significant symbols of ``text``."""
    words: list[Word] = []
    begins = True
    for match in _TOKEN.finditer(text):
        number, ordinal, word, symbol = match.groups()
        if word:
            words.extend(_words(word, "?" if begins else "^"))
            begins = False
        elif number:
            words.append(Word(f"#{number}." if ordinal else f"#{number}"))
            begins = False
        else:
            if symbol not in _PUNCTUATION or _SIGNIFICANT.match(text, match.start()):
                words.append(Word(symbol))
            begins = symbol in _SENTENCE_ENDS
    return words


def literals(text: str) -> Iterator[str]:
    """Yield paths, identifiers, options, addresses and abbreviations, which must match exactly.

    Names with more than one spelling (iPhone, iphone) are not among them.
    """
    for chunk in text.split():
        dotted = _DOTTED.match(chunk)
        bare = dotted[1].rstrip(EDGES) if dotted else chunk.strip(EDGES)
        if dotted or (_LITERAL.search(bare) and bare.lower().removesuffix("'s") not in WRITTEN):
            yield bare


def without_commas(number: str) -> str:
    """Remove the thousands separators of an English number."""
    return number.replace(",", "") if _THOUSANDS.fullmatch(number) else number


def spelled(text: str) -> str:
    """Return one spelling of an English word that has several (colour, color)."""
    known = SPELLINGS.get(text)
    if known is not None:
        return known
    if len(text) > 4:
        doubled = _DOUBLED.fullmatch(text)
        if doubled and doubled[1] in DOUBLED:
            return doubled[1] + doubled[2]
        for pattern, american in _BRITISH:
            text = pattern.sub(american, text)
    return text


def _words(text: str, case: str) -> list[Word]:
    """Split a word: expand contractions, separate French elisions and hyphenated words. ``case`` marks a capital."""
    lower = text.casefold() if "ß" not in text else text.lower()
    if lower in CONTRACTIONS:
        return [Word(word) for word in CONTRACTIONS[lower]]
    case = case if text[0].isupper() and lower != "i" and lower not in WRITTEN else ""
    if lower.isalpha():
        return [Word(lower, case)]
    if "'" in lower:
        return _split_apostrophe(lower, case)
    if "-" in lower and lower not in SPELLINGS:
        return [Word(part, case) for part in lower.split("-")]
    return [Word(lower, case)]


def _split_apostrophe(lower: str, case: str) -> list[Word]:
    """Split a word at its apostrophe, and expand it."""
    stem, _, suffix = lower.rpartition("'")
    if lower.endswith("n't") and lower != "n't":
        return [Word(lower[:-3]), Word("not")]
    if suffix == "s":
        return [Word(stem), Word("is")] if stem in TAKES_IS else [Word(stem, case), Word("'s")]
    if "'" + suffix in SUFFIXES:
        return [Word(stem), Word(SUFFIXES["'" + suffix])]
    if stem in ELISIONS:
        return [Word("ne" if stem == "n" else stem), Word(suffix, case)]
    return [Word(lower, case)]
