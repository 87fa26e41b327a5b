"""The seam between an interrupted message and the answer that should continue it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import UpstreamError, UpstreamStartedOver
from responses_mw.protocol.response.seam import Seam
from tests.protocol import manners

PROMPT = 50
"""Tokens of the prompt before the message. Each character of the message is a token."""
REPETITIVE = st.text("ab \n", min_size=1, max_size=12)
PIECE = st.one_of(REPETITIVE, st.text(min_size=1, max_size=9))


@st.composite
def repetitive(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a text that often repeats itself, cut into two parts."""
    pieces = draw(st.lists(PIECE, min_size=1, max_size=3))
    text = "".join(draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=8)))
    cut = draw(st.integers(0, len(text)))
    return text[:cut], text[cut:]


def run(seam: Seam, pieces: list[tuple[str, int]], prompt: int, *, counts_each_chunk: bool) -> str:
    """Return the text that passes the seam. Each piece is a text with the tokens that were generated up to its end."""
    told, is_passed = "", False
    for text, count in pieces:
        if is_passed:
            told += text
            continue
        seam.report({"prompt_tokens": prompt, "completion_tokens": count} if counts_each_chunk else None)
        passed = seam.feed(text, None)
        is_passed = passed is not None
        told += "".join(one.text for one in passed or ())
    seam.report({"prompt_tokens": prompt, "completion_tokens": pieces[-1][1] if pieces else 0})
    if held := seam.uncounted:
        seam.count_held(len(held))
    return told if is_passed else told + "".join(one.text for one in seam.decide(is_final=True) or ())


def counted(pieces: list[str], free: int = 0) -> list[tuple[str, int]]:
    """Add to each piece the tokens generated so far. The first `free` characters were not generated."""
    total, shown = -free, []
    for piece in pieces:
        total += len(piece)
        shown.append((piece, max(total, 0)))
    return shown


@given(text=repetitive(), each=st.booleans(), data=st.data())
def test_a_continuation_proved_by_the_usage_is_kept_whatever_it_repeats(
    text: tuple[str, str], each: bool, data: st.DataObject
) -> None:
    before, after = text
    seam = Seam(before, is_trimmed=False, prompt_tokens=PROMPT + len(before), tokens=len(before))
    pieces = counted(data.draw(manners.cuts())(after))
    assert run(seam, pieces, PROMPT + len(before), counts_each_chunk=each) == after


@given(text=repetitive(), each=st.booleans(), data=st.data())
def test_a_message_sent_again_before_any_token_is_generated_is_dropped(
    text: tuple[str, str], each: bool, data: st.DataObject
) -> None:
    before, after = text
    seam = Seam(before, is_trimmed=False, prompt_tokens=PROMPT + len(before), tokens=len(before))
    pieces = counted([*filter(None, [before]), *data.draw(manners.cuts())(after)], len(before))
    told = run(seam, pieces, PROMPT + len(before), counts_each_chunk=each)
    assert told == (after if before.strip() else before + after)


@given(text=repetitive(), each=st.booleans(), data=st.data())
def test_a_new_answer_with_the_same_text_adds_only_the_rest(text: tuple[str, str], each: bool, data: st.DataObject) -> None:
    before, after = text
    whole = before + after
    seam = Seam(before, is_trimmed=False, prompt_tokens=PROMPT + len(before), tokens=len(before))
    pieces = counted(data.draw(manners.cuts())(whole))
    told = run(seam, pieces, PROMPT + len(before) + 3, counts_each_chunk=each)
    assert told == (after if before.strip() else whole)


@given(text=repetitive(), each=st.booleans(), data=st.data())
def test_white_space_that_the_template_trims_appears_once(text: tuple[str, str], each: bool, data: st.DataObject) -> None:
    before, after = text
    shown = before.rstrip()
    rest = (before + after)[len(shown) :]
    seam = Seam(before, is_trimmed=shown != before, prompt_tokens=PROMPT + len(shown), tokens=len(shown))
    pieces = counted(data.draw(manners.cuts())(rest))
    assert run(seam, pieces, PROMPT + len(shown), counts_each_chunk=each) == after


@pytest.mark.parametrize("answer", ["Two", "One tw", "One, two"], ids=["other", "cut", "similar"])
def test_a_new_answer_with_another_text_is_refused(answer: str) -> None:
    seam = Seam("One two", is_trimmed=False, prompt_tokens=9, tokens=2)
    with pytest.raises(UpstreamStartedOver):
        run(seam, [(answer, 2)], 8, counts_each_chunk=True)


def test_a_new_answer_noticed_after_its_text_has_passed_is_an_error() -> None:
    seam = Seam("One two", is_trimmed=False, prompt_tokens=9, tokens=2)
    with pytest.raises(UpstreamError, match="started a new answer") as caught:
        run(seam, [("Three", 1)], 8, counts_each_chunk=False)
    assert not isinstance(caught.value, UpstreamStartedOver), "the client has seen the new answer"


def test_the_first_usage_of_an_answer_does_not_count_the_text_that_follows() -> None:
    """Some servers report the prompt at the start and the rest at the end."""
    before = "Row, row, row your boat. "
    seam = Seam(before, is_trimmed=False, prompt_tokens=9, tokens=len(before))
    seam.report({"prompt_tokens": 9, "completion_tokens": 0})
    seam.report(None)
    assert seam.feed(before, None) is None
    seam.report({"prompt_tokens": 9, "completion_tokens": len(before)})
    assert [passed.text for passed in seam.decide() or ()] == [before]


@pytest.mark.parametrize(
    "usage", [{}, {"prompt_tokens": 0}, {"prompt_tokens": None}, {"prompt_tokens": "9"}, {"prompt_tokens": True}]
)
def test_an_invalid_count_proves_nothing(usage: dict[str, Any]) -> None:
    seam = Seam("One two", is_trimmed=False, prompt_tokens=9, tokens=2)
    seam.report(usage)
    assert seam.continues is None


@pytest.mark.parametrize(("prompt", "expected"), [(9, ["Hm. ", "Yes."]), (8, ["es."])])
def test_reasoning_before_the_usage_is_text_of_a_continuation_but_not_of_a_new_answer(prompt: int, expected: list[str]) -> None:
    seam = Seam("Y", is_trimmed=False, prompt_tokens=9, tokens=1)
    assert seam.feed("Hm. ", None, is_reasoning=True) is None
    assert seam.feed("Yes.", None) is None
    seam.report({"prompt_tokens": prompt, "completion_tokens": 8})
    assert [passed.text for passed in seam.decide(is_final=True) or ()] == expected
