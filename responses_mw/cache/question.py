"""Remove the way of asking from an English question.

"How do I", "how can I" and "how to" ask the same; so do "which time zone is" and "what time zone is". The removed words
determine the ``kind`` of the question, which must be the same in both texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import lexicon
from .lexicon import Word

Phrase = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """Phrases at the beginning of a question that are removed; the rest is a question of this ``kind``.

    The next word must be in ``before`` and not in ``unless``, and the word after it in ``then``. An empty set is ignored.
    """

    phrases: frozenset[Phrase]
    kind: str = ""
    before: frozenset[str] = frozenset()
    then: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()
    firsts: frozenset[str] = field(init=False)
    lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "firsts", frozenset(phrase[0] for phrase in self.phrases))
        object.__setattr__(self, "lengths", tuple(sorted({len(phrase) for phrase in self.phrases}, reverse=True)))

    def length(self, texts: Sequence[str]) -> int:
        """Return the number of words of the phrase with which ``texts`` begin; 0 if there is none."""
        for length in self.lengths:
            begins = length <= len(texts) and tuple(texts[:length]) in self.phrases
            if begins and self._fits(texts[length : length + 2]):
                return length
        return 0

    def _fits(self, texts: Sequence[str]) -> bool:
        after, next_but_one = (*texts, "", "")[:2]
        follows = (not self.before or after in self.before) and after not in self.unless
        return follows and (not self.then or next_but_one in self.then)


_FRAMES = (
    Frame(lexicon.WAYS, "how", unless=lexicon.OF_ONESELF),
    Frame(lexicon.PLACES, "where", before=lexicon.FINDINGS),
    Frame(lexicon.REQUESTS, before=lexicon.TASKS),
    Frame(lexicon.REQUESTS, before=lexicon.DEEDS, then=lexicon.POINTING),
    Frame(lexicon.WONDERS, before=lexicon.ASKS),
    Frame(lexicon.MEANS, "mean"),
    Frame(lexicon.DEFINES, "define"),
    Frame(lexicon.TELLS, "tell"),
    Frame(lexicon.TELLINGS, before=lexicon.ASKS | lexicon.KNOWN),
    Frame(lexicon.FRAMES),
)
_LAST = frozenset(phrase[-1] for phrase in lexicon.ENDINGS)
_VERBS = lexicon.POLAR | lexicon.BE
_BOUND = lexicon.CRITICAL | lexicon.DIRECTIONS | lexicon.POLAR | lexicon.BE


def unframed(words: list[Word], *, asked: bool) -> tuple[str, list[Word]]:
    """Return the kind of the question, and its words without phrases such as "how do I" and "please tell me".

    ``asked``: whether the text ends with a question mark.
    """
    words = _normalized(words)
    texts = [word.text for word in words]
    end = len(texts) - _thanks(texts)
    begin, kind = 0, ""
    while begin < end and kind not in ("how", "how you", "where"):
        frame, length = _first_frame(texts[begin:end])
        if not length:
            break
        kind = frame.kind or kind
        if kind == "how" and _addresses_reader(texts[begin : begin + length], texts[begin + length : end]):
            kind = "how you"
        begin += length
    if not kind:
        kind, front, back = _kind_by_last_word(texts[begin:end])
        begin, end = begin + front, end - back
    rest = words[begin:end] or words
    if not kind:
        kind = "yes or no" if rest[0].text in lexicon.POLAR else ""
    if asked and not (kind or begin) and lexicon.ASKS.isdisjoint(texts) and not _VERBS.isdisjoint(texts):
        kind = "asked so"
    if kind == "tell" and _BOUND.isdisjoint(word.text for word in rest):
        kind = ""  # "explain entropy" is "what is entropy"; "describe the capital of Peru" is not "what is the capital ..."
    return kind, rest


def article(kind: str, words: Sequence[Word]) -> str:
    """Return the article of the one thing that a question asks for: ``the``, ``none``, or nothing for "a" and for plurals.

    It distinguishes *the time* from *time*, and *a light* from *light*.
    """
    if kind not in ("", "define", "mean") or len(words) > 3 or not _BOUND.isdisjoint(word.text for word in words):
        return ""
    if words[0].text == "the":
        return "the"
    return "" if words[0].text in ("a", "an") or words[-1].text.endswith("s") else "none"


def _first_frame(texts: list[str]) -> tuple[Frame, int]:
    """Return the frame with which ``texts`` begin and its length with a following comma; length 0 for none."""
    for frame in _FRAMES:
        length = frame.length(texts) if texts[0] in frame.firsts else 0
        if length:
            return frame, length + (texts[length : length + 1] == [","])
    return _FRAMES[-1], 0


def _addresses_reader(phrase: Sequence[str], rest: Sequence[str]) -> bool:
    """Return whether "you" in ``phrase`` is the model: How do you store my data? is not How do I store my data?"""
    return "you" in phrase and not lexicon.PERSONS.isdisjoint(rest)


def _kind_by_last_word(texts: Sequence[str]) -> tuple[str, int, int]:
    """Return the kind of a question by its last word (what does it mean, how much does it cost), and how many words to remove
    at its front and at its back."""
    if len(texts) > 3 and texts[0] == "what" and texts[1] in ("do", "does") and texts[-1] in ("mean", "cost"):
        return texts[-1], 2, 1
    if len(texts) > 4 and tuple(texts[:2]) == ("how", "much") and texts[2] in ("do", "does") and texts[-1] == "cost":
        return "cost", 3, 1
    return "", 0, 0


def _thanks(texts: list[str]) -> int:
    """Return how many words at the end are thanks."""
    if not texts or texts[-1] not in _LAST:
        return 0
    ends = next((len(phrase) for phrase in lexicon.ENDINGS if tuple(texts[-len(phrase) :]) == phrase), 0)
    return ends + (bool(ends) and texts[-ends - 1 : -ends] == [","])


# -- forms that ask the same -------------------------------------------------------------------------------------------------


def _normalized(words: list[Word]) -> list[Word]:
    """Replace equivalent forms by one of them."""
    texts = [word.text for word in words]
    if not lexicon.CONVERSIONS.isdisjoint(texts):
        words = [Word("to") if word.text == "into" else word for word in words]
    if texts[:2] == ["how", "many"]:
        words = _with_be(words, texts)
    if "which" in texts:
        words = [Word("what") if _is_what(texts, place) else word for place, word in enumerate(words)]
    if "there" in texts and texts[0] in ("how", "which", "what"):
        words = [word for place, word in enumerate(words) if not _is_filler(texts, place)]
    return _with_setting_last(words)


def _is_what(texts: Sequence[str], place: int) -> bool:
    """Return whether "which" at ``place`` means "what": before a noun and its verb (which time zone is), or a superlative
    (which is the largest). Elsewhere it asks for a choice (which is right?)."""
    if texts[place] != "which":
        return False
    verb = next((n for n in range(place + 1, len(texts)) if texts[n] in _BOUND or not texts[n].isalpha()), 0)
    if 2 <= verb - place <= 3:
        return texts[verb] in lexicon.POLAR
    after = texts[place + 1 : place + 4]
    return len(after) == 3 and after[0] in ("is", "are") and after[1] == "the" and after[2].endswith("est")


def _is_filler(texts: Sequence[str], place: int) -> bool:
    """Return whether "there" at ``place`` has no meaning: how many planets are there in the solar system."""
    return texts[place] == "there" and place > 2 and texts[place - 1] in lexicon.BE and texts[place + 1 : place + 2] == ["in"]


def _with_be(words: list[Word], texts: Sequence[str]) -> list[Word]:
    """Add the missing verb to questions like "How many ounces in a pound"."""
    place = next((n for n in range(2, len(texts)) if texts[n] in _BOUND), 0)
    lacks = 3 <= place <= 4 and texts[place] == "in" and lexicon.POLAR.isdisjoint(texts)
    return [*words[:place], Word("are"), *words[place:]] if lacks else words


def _with_setting_last(words: list[Word]) -> list[Word]:
    """Move a language or a program at the front (in Python, how do I ...) to the end."""
    if len(words) < 5 or words[0].text != "in" or words[1].text not in lexicon.SETTINGS:
        return words
    rest = words[3:] if words[2].text == "," else words[2:]
    return [*rest, *words[:2]] if rest[0].text in lexicon.ASKS else words
