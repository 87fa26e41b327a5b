"""The guard: cheap proof that the answer to one question cannot be reused for a similar one.

The guard knows no grammar and hardly any words. It finds differences that are visible in any language: numbers, quotations,
literals such as paths and identifiers, symbols, and negation. It only ever refuses. Texts that pass still differ in meaning as
often as not, and the judge or the same words must decide (see `normal.same_words`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from .normal import normalize

_CODE = re.compile(r"[{}\[\]<>=|\\^~`;]|\n\s|\w\(|//|/\*")
_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”|„[^“”]+[“”]|«[^»]+»|(?<!\w)['‘][^'’]+['’](?!\w)")
_QUOTES = "\"“”„«»'‘’"
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
# Words with a digit, an underscore, a slash, an at sign, a dot or a capital within, and options of commands.
_LITERAL = re.compile(r"(?<!\S)\S*(?:[_/\\@]|[^\W\d]\d|\d[^\W\d]|\w\.\w|[a-z][A-Z])\S*|(?<!\S)--?\w[\w-]*")
_ENDS = ".,;:!?)(…"
_SYMBOLS = frozenset("%‰°#@&§*_/+")
_SYMBOL_KINDS = frozenset({"Sc", "Sm"})  # of currencies and mathematics

_WORDS = (
    # English
    "no not never none nobody nothing nowhere neither nor without cannot cant dont doesnt didnt isnt arent wont except unless"
    # German
    " nicht kein keine keinen keinem keiner keines nie niemals niemand nichts ohne weder außer"
    # Spanish, Portuguese, Italian
    " sin nunca nadie nada ningún ninguna ni tampoco não nao sem nenhum nenhuma ninguém non senza mai nessuno nessuna niente"
    # French
    " ne pas sans jamais rien personne aucun aucune"
    # Dutch, Polish, Russian, Turkish
    " niet geen nooit zonder nie bez nigdy не нет ни без никогда değil yok hiç"
    # Arabic, Hindi
    " لا ليس لم لن بدون नहीं बिना मत"
)
_NEGATIONS = frozenset(_WORDS.split())
_NEGATION_PARTS = re.compile(r"n['’]t\b|[不没無无未非]|ない|なし|ません|않|없|안 |못 ")
"""Negations that are part of a word, or that stand in scripts without spaces between words."""

Facts: TypeAlias = Counter[str] | list[str]

RULES = {
    "code": "texts that look like code match only themselves",
    "numbers": "the numbers differ",
    "quoted": "the quotations differ",
    "literals": "paths, identifiers or addresses differ",
    "symbols": "the symbols differ",
    "negations": "one has another number of negations",
}
"""The meaning of each result of `difference`, in the order of comparison."""


def difference(one: str, other: str) -> str | None:
    """Return the name of the first rule in `RULES` by which the texts differ, or None if the guard finds no difference."""
    if (_CODE.search(one.strip()) or _CODE.search(other.strip())) and normalize(one) != normalize(other):
        return "code"
    one, other = unicodedata.normalize("NFC", one), unicodedata.normalize("NFC", other)
    return next((rule for rule, facts in _FACTS.items() if facts(one) != facts(other)), None)


def _numbers(text: str) -> Facts:
    """Return the numbers in order, with the digits of any script as ASCII. A fraction, power or CJK numeral is a number too."""
    found = [(match.start(), match[0]) for match in _NUMBER.finditer(text)]
    found += [(at, letter) for at, letter in enumerate(text) if not letter.isdecimal() and letter.isnumeric()]
    return ["".join(map(_ascii, number)) for _, number in sorted(found)]


def _ascii(letter: str) -> str:
    return str(unicodedata.decimal(letter)) if letter.isdecimal() else letter


def _quoted(text: str) -> Facts:
    return [quotation.strip(_QUOTES) for quotation in _QUOTED.findall(text)]


def _literals(text: str) -> Facts:
    return Counter(literal.strip(_ENDS + _QUOTES) for literal in _LITERAL.findall(text))


def _symbols(text: str) -> Facts:
    return Counter(letter for letter in text if letter in _SYMBOLS or unicodedata.category(letter) in _SYMBOL_KINDS)


def _negations(text: str) -> Facts:
    text = text.lower()
    words = sum(word in _NEGATIONS for word in re.findall(r"[^\W\d_]+", text))
    return Counter({"negation": words + len(_NEGATION_PARTS.findall(text))})


_FACTS: dict[str, Callable[[str], Facts]] = {
    "numbers": _numbers,
    "quoted": _quoted,
    "literals": _literals,
    "symbols": _symbols,
    "negations": _negations,
}
