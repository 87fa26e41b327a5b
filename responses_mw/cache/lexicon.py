"""The guard's vocabulary, from `words.txt`, and functions that split texts into words and recognize equivalent questions.

A word that is missing from the vocabulary only costs hits, because a strict guard requires unknown words in both texts. Phrases
that only introduce a question ("how do I", "how to") are removed. They determine the `kind` of the question, which must be the
same in both texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple


def _read_sections() -> dict[str, list[list[str]]]:
    """Return the groups of words in each section of `words.txt`."""
    sections: dict[str, list[list[str]]] = {}
    groups: list[list[str]] = []
    for line in (files("responses_mw.cache") / "words.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            groups = sections.setdefault(line.strip("[]"), [])
        elif not line.startswith("#"):
            groups += [group.split() for group in line.split(";") if group.strip()]
    return sections


_SECTIONS = _read_sections()


def _set(section: str) -> frozenset[str]:
    return frozenset(word for group in _SECTIONS[section] for word in group)


def _to_first(section: str) -> dict[str, str]:
    return {word: group[0] for group in _SECTIONS[section] for word in group}


def _numbers(section: str) -> dict[str, str]:
    """Map words to numbers. A group begins with the number of its first word. Each further word means one more."""
    numbers: dict[str, str] = {}
    for first, *words in _SECTIONS[section]:
        numbers |= {word: first if place == 0 else str(int(first) + place) for place, word in enumerate(words)}
    return numbers


def phrases(section: str) -> list[str]:
    """Return the phrases in a section of `words.txt`, the longest first."""
    return sorted(map(" ".join, _SECTIONS[section]), key=len, reverse=True)


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
INTERROGATIVES = _set("interrogatives")
INTERROGATIVES_WITHIN = _set("interrogatives-within")
ASKS = _set("asks")
PERSONS = _set("persons")
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
_DOTTED = re.compile(r"(\.[^\W\d_].*)")  # a word that begins with a dot, because .net is not the word net
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
"""Replacements of British endings. A result that is not a word does no harm, because results are only compared."""


class Word(NamedTuple):
    """A lower-case word, a number (`#` and its digits), or a symbol.

    `case` is `?` for a capitalized word that begins a sentence, `^` for any other capitalized word, and otherwise empty.
    """

    text: str
    case: str = ""


def tokens(text: str) -> list[Word]:
    """Return the words, numbers and significant symbols of `text`."""
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


def literals(text: str) -> list[str]:
    """Return the words that must match exactly, such as paths, options, addresses, identifiers, abbreviations, 3.5 and 50%.

    Names and abbreviations that may be written without capitals (iPhone, NASA) are not included.
    """
    found = []
    for chunk in text.split():
        dotted = _DOTTED.match(chunk)
        bare = dotted[1].rstrip(EDGES) if dotted else chunk.strip(EDGES)
        if dotted or (_LITERAL.search(bare) and bare.lower().removesuffix("'s") not in WRITTEN):
            found.append(bare)
    return found


def without_commas(number: str) -> str:
    """Remove the thousands separators of an English number."""
    return number.replace(",", "") if _THOUSANDS.fullmatch(number) else number


def spelled(text: str) -> str:
    """Return the same form for all spellings of an English word (color for colour)."""
    if text in SPELLINGS or len(text) <= 4:
        return SPELLINGS.get(text, text)
    doubled = _DOUBLED.fullmatch(text)
    if doubled and doubled[1] in DOUBLED:
        return doubled[1] + doubled[2]
    for pattern, american in _BRITISH:
        text = pattern.sub(american, text)
    return text


def _words(text: str, case: str) -> list[Word]:
    """Expand a contraction, and split French elisions and hyphenated words. `case` is the mark of a capitalized word."""
    lower = text.casefold() if "ß" not in text else text.lower()
    if lower in CONTRACTIONS:
        return [Word(word) for word in CONTRACTIONS[lower]]
    case = case if text[0].isupper() and lower != "i" and lower not in WRITTEN else ""
    if "'" in lower:
        return _split_apostrophe(lower, case)
    if "-" in lower and lower not in SPELLINGS:
        return [Word(part, case) for part in lower.split("-")]
    return [Word(lower, case)]


def _split_apostrophe(lower: str, case: str) -> list[Word]:
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


# -- questions -----------------------------------------------------------------------------------------------------------------


def _one(*texts: str) -> str:
    """Return a pattern for one of `texts`. The patterns below apply to the words of a text, joined with spaces."""
    return f"(?:{'|'.join(map(re.escape, texts))})(?= |$)"


_VERBS = POLAR | BE
_BOUND = CRITICAL | DIRECTIONS | _VERBS
_FREE = f"(?!{_one(*_BOUND)})"  # before a word that is not bound
_FRAME = re.compile(
    "(?:"
    rf"(?P<how>{_one(*phrases('ways'))})(?! {_one(*_set('of-oneself'))})"
    rf"|(?P<where>{_one(*phrases('places'))})(?= {_one(*_set('findings'))})"
    rf"|{_one(*phrases('requests'))}(?= {_one(*_set('tasks'))}| {_one(*_set('deeds'))} {_one(*_set('pointing'))})"
    rf"|{_one(*phrases('wonders'))}(?= {_one(*ASKS)})"
    rf"|(?P<mean>{_one(*phrases('means'))})"
    rf"|(?P<define>{_one(*phrases('defines'))})"
    rf"|(?P<tell>{_one(*phrases('tells'))})"
    rf"|{_one(*phrases('tellings'))}(?= {_one(*ASKS, *_set('known'))})"
    rf"|{_one(*phrases('frames'))}"
    r")(?: ,(?= |$))?(?: |$)"
)
"""A phrase that is removed from the beginning of a question. The name of its group is the kind of the question."""
_ENDING = re.compile(rf"(?:(?:^| ),)?(?:^| ){_one(*phrases('endings'))}$")
_KIND_AT_THE_END = re.compile(r"(?:what|how much(?=.* cost$)) (?:do|does) (.+) (mean|cost)")
_EQUIVALENTS = (
    # Before a noun and its verb, and with a superlative, "which" means "what". Otherwise, it asks for a choice (which is it?).
    (re.compile(rf"(?:^| )(which)(?= (?:{_FREE}[^\W\d_]+ ){{1,2}}{_one(*POLAR)}| (?:is|are) the \S*est(?: |$))"), "what"),
    (re.compile(rf"^how many (?:{_FREE}\S+ ){{1,2}}(in)(?= |$)(?!.* {_one(*POLAR)})"), "are in"),
    (re.compile(rf"^(?:how|what|which)(?: \S+)+ {_one(*BE)} (there) in(?= |$)"), ""),
)
"""Patterns with a group that can be replaced with the given words without changing the meaning."""


def unframed(words: list[Word], *, asked: bool) -> tuple[str, list[Word]]:
    """Return the kind of a question, and its words. Phrases such as "how do I" and "please tell me" are removed.

    `asked` is whether the text ends with a question mark.
    """
    words = _normalized(words)
    texts = [word.text for word in words]
    line, begin, kind = _ENDING.sub("", " ".join(texts)), 0, ""
    while kind not in ("how", "how you", "where") and (frame := _FRAME.match(line)):
        phrase = frame[0].split()
        kind, begin, line = frame.lastgroup or kind, begin + len(phrase), line[frame.end() :]
        if kind == "how" and "you" in phrase and not PERSONS.isdisjoint(line.split()):
            kind = "how you"  # "you" is the model, as in "How do you store my data?"
    if not kind and (match := _KIND_AT_THE_END.fullmatch(line)):
        begin += line.count(" ", 0, match.start(1))
        line, kind = match.groups()
    rest = words[begin : begin + len(line.split())] or words
    if not kind:
        kind = "yes or no" if rest[0].text in POLAR else ""
    if asked and not (kind or begin) and ASKS.isdisjoint(texts) and not _VERBS.isdisjoint(texts):
        kind = "asked so"
    if kind == "tell" and _BOUND.isdisjoint(word.text for word in rest):
        kind = ""  # "explain entropy" is "what is entropy"; "describe the capital of Peru" is not "what is the capital ..."
    return kind, rest


def article(kind: str, words: Sequence[Word]) -> str:
    """Return "the" or "none" (no article) for a short question about one thing, or "" for any other question.

    The result is also "" for a question with "a" or "an", or about a plural. The cache compares the results of two questions,
    because an article can change the meaning: "time" is not "the time", and "light" is not "a light".
    """
    if kind not in ("", "define", "mean") or len(words) > 3 or not _BOUND.isdisjoint(word.text for word in words):
        return ""
    if words[0].text == "the":
        return "the"
    return "" if words[0].text in ("a", "an") or words[-1].text.endswith("s") else "none"


def _normalized(words: Sequence[Word]) -> list[Word]:
    """Replace equivalent forms of a question with one form."""
    words = list(words)
    if not CONVERSIONS.isdisjoint(word.text for word in words):
        words = [Word("to") if word.text == "into" else word for word in words]
    for pattern, texts in _EQUIVALENTS:
        line = " ".join(word.text for word in words)
        for match in pattern.finditer(line):
            place = line.count(" ", 0, match.start(1))
            words[place : place + 1] = map(Word, texts.split())
    if len(words) > 4 and words[0].text == "in" and words[1].text in SETTINGS:  # in Python, how do I ...
        rest = words[3:] if words[2].text == "," else words[2:]
        words = [*rest, *words[:2]] if rest[0].text in ASKS else words
    return words
