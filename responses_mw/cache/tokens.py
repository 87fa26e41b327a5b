"""A text as tokens: words in lower case with what their capitals tell, numbers, symbols, and literals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from . import lexicon

EDGES = ".,;:?!'\"()«»…¿¡"

_TOKEN = re.compile(
    r"(?P<number>(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)*))(?P<ordinal>st|nd|rd|th)?"
    r"|(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*[+#]*)|(?P<symbol>[^\w\s])"
)
_LITERAL = re.compile(r"(?<!\S)--?[^\W\d_]|[@_/\\#$%&*+]|\w[.:]\w|[a-z][A-Z]|[A-Z]{2}|[^\W\d]\d|\d[^\W\d]")
_MAY_BE_LITERAL = re.compile(r"[^\w\s,?!'\"]|_|\d|[A-Z](?<=\w[A-Z])")
"""Without one of these in a text, there is no literal in it."""
_DOTTED = re.compile(r"(\.[^\W\d_].*)")
"""A word after a dot: .net is not a net."""
_PUNCTUATION = frozenset(".,;:?!'\"()-«»…¿¡")
_COUNTS = re.compile(r"[()]|(?<=\d)['\"!]|(?<=\b\w)!|(?<![^\W\d_])-(?=\s*\d)|(?<=[^\W\d_])-(?!\w)|(?<=\w),")
"""Punctuation that changes what is asked: 6' and 6", 5!, n!, - 5, O-, (2 + 3) * 4, and a comma within a sentence."""
_SENTENCE_ENDS = frozenset(".?!:")
_THOUSANDS = re.compile(r"#-?\d{1,3}(,\d{3})+(\.\d+)?\.?")
_DOUBLED = re.compile(r"(\w+l)l(ed|ing|ers?)")
_BRITISH = (
    (re.compile(r"(?<=\w\w)our(?=(?:s|ed|ing|ites?|ful|less|able)?$)"), "or"),
    (re.compile(r"(?<=\w\w\w)is(?=(?:e[sd]?|ing|ers?|ations?)$)"), "iz"),
    (re.compile(r"(?<=ly)s(?=(?:e[sd]?|ing|ers?)$)"), "z"),
)
"""Where the word that is made is none, it harms nobody: it is compared only."""


class Word(NamedTuple):
    """A word in lower case, a number (``#`` and its digits), or a symbol. ``case`` is ``^`` where it has a capital, and ``?``
    where it has one and begins a sentence."""

    text: str
    case: str = ""


def tokens(text: str) -> list[Word]:
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
            if symbol not in _PUNCTUATION or _COUNTS.match(text, match.start()):
                words.append(Word(symbol))
            begins = symbol in _SENTENCE_ENDS
    return words


def literals(text: str) -> Iterator[str]:
    """Paths, identifiers, options, addresses, abbreviations: what has to be the same to the letter. Not the names that are
    written in more ways than one (iPhone, iphone)."""
    if not _MAY_BE_LITERAL.search(text):
        return
    for chunk in text.split():
        dotted = _DOTTED.match(chunk)
        bare = dotted[1].rstrip(EDGES) if dotted else chunk.strip(EDGES)
        if dotted or (_LITERAL.search(bare) and bare.lower().removesuffix("'s") not in lexicon.WRITTEN):
            yield bare


def without_commas(number: str) -> str:
    """A number as English writes it: there a comma parts thousands."""
    return number.replace(",", "") if _THOUSANDS.fullmatch(number) else number


def spelled(text: str) -> str:
    """The one spelling of an English word that has more (colour, color)."""
    known = lexicon.SPELLINGS.get(text)
    if known is not None:
        return known
    if len(text) > 4:
        doubled = _DOUBLED.fullmatch(text) if "ll" in text else None
        if doubled and doubled[1] in lexicon.DOUBLED:
            return doubled[1] + doubled[2]
        if "our" in text or "is" in text or "lys" in text:
            for pattern, american in _BRITISH:
                text = pattern.sub(american, text)
    return text


def _words(text: str, case: str) -> list[Word]:
    """The words that one stands for: contractions are written out, and French elisions taken apart. ``case`` is that of a
    capital here."""
    lower = text.casefold() if "ß" not in text else text.lower()
    if lower in lexicon.CONTRACTIONS:
        return [Word(word) for word in lexicon.CONTRACTIONS[lower]]
    case = case if text[0].isupper() and lower != "i" and lower not in lexicon.WRITTEN else ""
    if lower.isalpha():
        return [Word(lower, case)]
    if "'" in lower:
        return _apart(lower, case)
    if "-" in lower and lower not in lexicon.SPELLINGS:
        return [Word(part, case) for part in lower.split("-")]
    return [Word(lower, case)]


def _apart(lower: str, case: str) -> list[Word]:
    """What a word with an apostrophe stands for."""
    stem, _, suffix = lower.rpartition("'")
    if lower.endswith("n't") and lower != "n't":
        return [Word(lower[:-3]), Word("not")]
    if suffix == "s":
        return [Word(stem), Word("is")] if stem in lexicon.TAKES_IS else [Word(stem, case), Word("'s")]
    if "'" + suffix in lexicon.SUFFIXES:
        return [Word(stem), Word(lexicon.SUFFIXES["'" + suffix])]
    if stem in lexicon.ELISIONS:
        return [Word("ne" if stem == "n" else stem), Word(suffix, case)]
    return [Word(lower, case)]
