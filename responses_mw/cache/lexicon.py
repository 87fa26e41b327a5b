"""The words that the guard knows, read from ``words.txt``.

A missing word only costs hits: an unknown word must be in both texts.
"""

from __future__ import annotations

from importlib.resources import files

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
