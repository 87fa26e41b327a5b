"""The guard, which decides whether the answer to one text may be reused for a similar text.

Similar embeddings show that two texts have the same topic, but not that they ask the same question. The guard compares words:

- These must be the same in both texts: the kind of question, names, numbers, units, dates, negation, symbols, quoted strings,
  literals (such as paths, identifiers and 3.5), and function words (conjunctions, prepositions, pronouns and comparatives).
- The words that are in both texts must have the same order.
- A strict guard (the default) also compares all other words. Spelling, synonyms, plurals and ways of asking may differ.
- Some texts match only themselves: code, scripts other than Latin, characters such as "²", and texts without a content word.

A wrong refusal costs a call to the upstream, but a wrong hit gives a wrong answer. When in doubt, the guard refuses.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from . import lexicon
from .lexicon import EDGES, Word, article, literals, spelled, tokens, unframed, without_commas

_LIKE_CODE = re.compile(r"[{}\[\]<>=|\\^~`;]|\n\s|\w\(|//|/\*")
_PLAIN = str.maketrans(
    {"’": "'", "‘": "'", "`": "'", "“": '"', "”": '"', "„": '"', "–": "-", "—": "-", "−": "-", "\u00a0": " "}
)
_LOST_BY_NFKC = ("<super>", "<sub>", "<fraction>", "<circle>", "<square>")
"""Decompositions that change the meaning: 10² would become 102."""

Hashes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The properties of a text that the guard compares, as salted hashes of words.

    `whole` is the hash of the whole text, normalized. If `plain` is false, the text matches only itself, and the guard compares
    only `whole`.
    """

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
    careful: bool = False  # whether the text seems to use capitals correctly, based on its first letter and the word "I"
    proper: Hashes = ()  # capitalized words within a sentence
    bare: Hashes = ()  # singulars without an article: mass nouns, names and verbs
    plurals: Hashes = ()
    definite: Hashes = ()  # words after "the"
    indefinite: Hashes = ()  # words after "a"
    forms: Hashes = ()  # words as written, to be compared with the other text's names
    content: Hashes = ()
    words: Hashes = ()  # all words that are compared, in the order of the text


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
"""The meaning of each result of `difference`, in the order of comparison."""

_EQUAL = tuple(RULES)[1:-3]  # the rules between `script` and `names`, whose lists must be equal in two texts
_LISTS = tuple(field.name for field in fields(Signature) if field.default == ())
_ORDERED = frozenset({"numbers", "quoted", "literals", "words", "kind"})
_CONTENT = ("content", "numbers", "units", "dates", "quoted", "literals")
"""Lists of words that have a meaning without context. A text with none of these words is not `plain`."""


def difference(one: Signature, other: Signature, *, strict: bool = True) -> str | None:
    """Return the name of the first rule in `RULES` by which the texts differ, or None if they match.

    If `strict` is false, the rule `words` is not applied.
    """
    if not (one.plain and other.plain):
        return None if one.whole == other.whole else "script"
    for name in _EQUAL:
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
    if not set(one.names) <= set(other.forms):
        return True
    return one.careful and other.careful and not set(one.proper) <= set(other.names)


def _number_matters(one: Signature, other: Signature) -> bool:
    # A plural differs from a singular without an article (damage and damages, http and https), and "the" from "a".
    return not (set(one.plurals).isdisjoint(other.bare) and set(one.definite).isdisjoint(other.indefinite))


def signature(text: str, *, salt: str = "") -> Signature:
    """Return the signature of `text`. Only signatures with the same `salt` are comparable."""
    digest = _digest(salt)
    letters = set() if text.isascii() else set(text)
    if _LIKE_CODE.search(text) or any(unicodedata.decomposition(letter).startswith(_LOST_BY_NFKC) for letter in letters):
        return Signature(digest(text.strip()), plain=False)
    if letters:
        text = unicodedata.normalize("NFKC", text).translate(_PLAIN)
    text = " ".join(text.split())
    bare = text.strip(EDGES + " ")
    # The question mark counts if nothing else shows that the text is a question. All capitals but the first count too.
    is_marked = text.endswith("?") and not any(word in text.lower() for word in lexicon.INTERROGATIVES_WITHIN)
    whole = digest(bare[:1].lower() + bare[1:] + "?" * is_marked)
    if letters and not all(map(_is_latin, text)):
        return Signature(whole, plain=False)
    reading = _Reading(text)
    if not any(reading.lists[name] for name in _CONTENT):
        return Signature(whole, plain=False)
    hashes = {
        name: tuple(map(digest, values if name in _ORDERED else sorted(values))) if values else ()
        for name, values in reading.lists.items()
    }
    return Signature(whole, plain=True, careful=reading.careful, **hashes)


def _digest(salt: str) -> Callable[[str], str]:
    key = hashlib.sha256(salt.encode()).digest()
    return lambda word: hashlib.blake2b(word.encode("utf-8", "surrogatepass"), key=key, digest_size=6).hexdigest()


def _is_latin(letter: str) -> bool:
    return letter < "\u0250" or not letter.isalpha() or unicodedata.name(letter, "").startswith("LATIN")


# -- reading -------------------------------------------------------------------------------------------------------------------

_QUOTED = re.compile(r"\"[^\"]+\"|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_PERCENT = re.compile(r"(?<=\d) ?%(?=\s+[^\W\d]{2}|[\s?.!,;:)]*$)")
_LOWER_I = re.compile(r"\bi\b")
_ARTICLES = {"the": "definite", "a": "indefinite", "an": "indefinite"}
_REACH = 4  # maximum distance between a determiner and its noun, as in "a very big red car"


class _Reading:
    """The words of a text, sorted into classes.

    In an English text, the way of asking is removed, and plurals and synonyms are replaced with one form. Words are not
    replaced in a text about words (spell, translate, a programming language) or in another language.

    `lists` maps each class to its words. The class `words` contains all words that are compared, in order.
    """

    def __init__(self, text: str) -> None:
        self.lists: dict[str, list[str]] = {name: [] for name in _LISTS}
        self.careful = text[:1].isupper() and not _LOWER_I.search(text)
        text = _PERCENT.sub(" percent", text)
        self.lists["quoted"] = _QUOTED.findall(text)
        self.lists["literals"] = literals(text)
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
            before = words[place - 1].text if place else ""
            self._classify(word, after_number=before.startswith("#") or before in lexicon.NUMBERS)

    def _classify(self, word: Word, *, after_number: bool) -> None:
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
        """Add a content word to `content`, `words` and `forms`, and to the lists for plurals and capitals."""
        lists = self.lists
        form = stem = _cased(word, spelled(word.text) if self._closely else word.text)
        if self._closely:
            singular = form if form in lexicon.WRITTEN else _singular(form)
            stem = singular if singular in self._clashing else lexicon.SYNONYMS.get(singular, singular)
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


def _without_plain_commas(words: list[Word]) -> list[Word]:
    """Remove the commas without a meaning: those at an edge, after a number or before a conjunction."""
    commas = [place for place, word in enumerate(words) if word.text == ","]
    plain = {
        place
        for place in commas
        if place in (0, len(words) - 1) or words[place - 1].text.startswith("#") or words[place + 1].text in lexicon.JOINS
    }
    return [word for place, word in enumerate(words) if place not in plain]


# -- classes of words ----------------------------------------------------------------------------------------------------------


_KNOWN = {
    **{text: ("dates", date) for text, date in lexicon.DATES.items()},
    **{text: ("negations", text) for text in lexicon.NEGATIONS},
    **{text: ("numbers", f"#{number}.") for text, number in lexicon.ORDINALS.items()},
    **{text: ("numbers", "#" + number) for text, number in lexicon.NUMBERS.items()},
}
_BINDING = {**{text: text for text in lexicon.CRITICAL | lexicon.DIRECTIONS}, **dict.fromkeys(lexicon.BE, "be")}


def _kind_of(word: Word, *, after_number: bool) -> tuple[str, str] | None:
    """Return the name of the word's list and the word's normalized form, or None for a content word."""
    text = word.text
    if text.startswith("#"):
        return "numbers", text
    if text.startswith("letter "):
        return "literals", text
    if text in _KNOWN and (text != "am" or after_number):
        name, noted = _KNOWN[text]
        return name, _cased(word, noted)
    if (unit := _unit(word, after_number=after_number)) is not None:
        return "units", "unit " + unit
    if text in _BINDING:
        return "critical", _cased(word, _BINDING[text])
    return None if text[0].isalpha() else ("symbols", text)


def _unit(word: Word, *, after_number: bool) -> str | None:
    """Return the name of the unit, or None if `word` is no unit. A letter is a unit only after a number, and M is not m."""
    if len(word.text) == 1 and not after_number:
        return None
    unit = lexicon.UNITS.get(word.text) or lexicon.UNITS.get(_singular(word.text))
    return unit + "^" if unit and word.case and len(word.text) <= 3 else unit


def _cased(word: Word, noted: str) -> str:
    """Mark `noted` as capitalized if capitals distinguish two words (Turkey and turkey, G and g)."""
    if len(word.text) == 1:
        return noted + "^" if word.case else noted
    return noted + word.case if word.text in lexicon.CASED else noted


def _with_letters(words: list[Word]) -> list[Word]:
    """Mark "a" and "I" as letters unless they are a plain article or pronoun (vitamin A, a few, World War I).

    Ignore the case of a letter that enumerates (vitamin D, plan B).
    """

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
    """Return the words whose synonym is also in the text, such as delete and remove. These words keep their form."""
    singulars = {_singular(word.text) for word in words} & lexicon.SYNONYMS.keys()
    uses = Counter(lexicon.SYNONYMS[singular] for singular in singulars)
    return frozenset(singular for singular in singulars if uses[lexicon.SYNONYMS[singular]] > 1)


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
