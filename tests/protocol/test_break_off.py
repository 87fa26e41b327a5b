"""An answer that breaks off anywhere, and goes on with another: the laws of events hold across the seam."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from responses_mw.errors import UpstreamError
from responses_mw.protocol.response.assembler import Assembler
from responses_mw.protocol.response.events import Event
from responses_mw.protocol.response.replay import MAX_CHANCE, MIN_REPEATED, LogReplay, Phase, Seam, Takeover, repeats_itself
from responses_mw.protocol.sse import encode
from tests.protocol import manners
from tests.protocol.manners import MANNERS, Answer, Manner, render
from tests.protocol.runs import CountedIds, assembler, said
from tests.support.replay import check

PART = {"prompt_tokens": 4, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}}


def shown(assembling: Assembler) -> str:
    items = assembling.response["output"][assembling.turn_begins_at :]
    return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])


def finished(assembling: Assembler, events: list[Event]) -> dict[str, Any]:
    events += assembling.end_turn()
    assembling.conclude(1_700_000_001)
    return check(events + assembling.terminal())


def go_on(assembling: Assembler, manner: Manner, answer: Answer, cut: manners.Cut, *, as_reasoning: bool) -> list[Event]:
    """What an upstream would send after the break: the rest of the text, or the whole answer."""
    before = shown(assembling)
    if not before:
        return [event for one in render(manner, answer, cut) for event in assembling.feed(one)]
    assert answer.text.startswith(before)
    assembling.join(before, is_trimmed=False, usage=PART)
    rest = Answer(text=answer.text[len(before) :], refusal=answer.refusal, calls=answer.calls)
    if as_reasoning and not (rest.calls or rest.refusal):
        rest = Answer(reasoning=rest.text)
    return [event for one in render(manner, rest, cut) for event in assembling.feed(one)]


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_any_answer_cut_anywhere_keeps_the_laws_and_says_everything_once(manner: Manner, data: st.DataObject) -> None:
    answer = data.draw(manners.answers)
    chunks = render(manner, answer, data.draw(manners.cuts()))
    assembling = assembler()
    events = assembling.start()
    for one in chunks[: data.draw(st.integers(0, len(chunks)))]:
        events += assembling.feed(one)
    if assembling.ended:
        return
    phase = assembling.phase
    if phase is Phase.FIXED:
        assembling.fail("server_error", "The upstream closed the connection before its answer was complete.")
        check(events + assembling.terminal())
        return
    events += assembling.break_off()
    as_reasoning = data.draw(st.booleans()) and bool(manner.reasoning)
    events += go_on(assembling, manner, answer, data.draw(manners.cuts()), as_reasoning=as_reasoning)
    response = finished(assembling, events)
    kept = [said(item) for item in response["output"] if item["type"] != "reasoning" or item["status"] == "completed"]
    texts = "".join(text for one in kept if isinstance(one, list) for _, text in one)
    assert texts.strip() == (answer.text + (answer.refusal if manner.refusals else "")).strip()
    assert [one[0] for one in kept if isinstance(one, tuple) and one[0] != "reasoning"] == [
        call.name for call in answer.calls[: manner.most_calls]
    ]
    if phase is Phase.TEXT and response["usage"]:
        assert response["usage"]["input_tokens"] == PART["prompt_tokens"]
        assert response["usage"]["total_tokens"] == 4 + 3 + 5


@given(before=st.text(min_size=1), after=st.text(), data=st.data())
def test_a_seam_loses_and_invents_nothing(before: str, after: str, data: st.DataObject) -> None:
    pieces = data.draw(manners.cuts())(after)
    seam = Seam(before, is_trimmed=False)
    told: list[str] = []
    passed = None
    for piece in pieces:
        if passed is None:
            passed = seam.feed(piece, None)
            told += [text for text, _ in passed or ()]
        else:
            told.append(piece)
    if passed is None:
        told += [text for text, _ in seam.flush()]
    begun = before.lstrip()
    repeats = len(begun) >= MIN_REPEATED and after.lstrip().startswith(begun) and not repeats_itself(begun)
    assert "".join(told) == (after.lstrip().removeprefix(before.lstrip()) if repeats else after)


@given(piece=st.text(min_size=1), times=st.integers(2, 40), data=st.data())
def test_a_text_of_repetitions_goes_on_without_loss(piece: str, times: int, data: st.DataObject) -> None:
    whole = piece * times
    place = data.draw(st.integers(2 * len(piece), len(whole)))
    seam = Seam(whole[:place], is_trimmed=False)
    told = seam.feed(whole[place:], None)
    assert "".join(text for text, _ in (seam.flush() if told is None else told)) == whole[place:]


@pytest.mark.parametrize(
    ("text", "expected"), [("", False), ("a", False), ("aa", True), ("ab ab a", True), ("ab ab b", False), ("abcdabc", False)]
)
def test_what_repeats_itself(text: str, expected: bool) -> None:
    assert repeats_itself(text) is expected


@given(before=st.text(min_size=MIN_REPEATED).filter(lambda text: len(text.lstrip()) >= MIN_REPEATED))
def test_a_repetition_is_dropped_however_it_is_cut(before: str) -> None:
    assume(not repeats_itself(before.lstrip()))
    seam = Seam(before, is_trimmed=False)
    passed = None
    for place, letter in enumerate(before):
        passed = seam.feed(letter, None)
        if passed is not None:
            assert before[place + 1 :] == ""
    assert passed == []


def test_a_second_answer_is_refused_once_it_differs() -> None:
    before = "".join(map(str, range(100)))
    seam = Seam(before, is_trimmed=False)
    assert seam.feed(before[: MAX_CHANCE + 1], None) is None
    with pytest.raises(UpstreamError, match="started a new answer"):
        seam.feed("y", None)


@pytest.mark.parametrize(
    ("before", "pieces", "after"),
    [("one ", [" two"], "two"), ("one \n", [" ", "\ntwo"], "two"), ("one \n", [" two"], "two"), ("one", [" two"], " two")],
)
def test_white_space_that_a_template_removed_comes_once(before: str, pieces: list[str], after: str) -> None:
    seam, told = Seam(before, is_trimmed=True), []
    passed = None
    for piece in pieces:
        passed = seam.feed(piece, None) if passed is None else [(piece, None)]
        told += [text for text, _ in passed or ()]
    assert "".join(told) == after


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_a_run_that_another_worker_takes_over_anywhere_keeps_the_laws(manner: Manner, data: st.DataObject) -> None:
    answer = data.draw(manners.answers)
    chunks = render(manner, answer, data.draw(manners.cuts()))
    lost = assembler()
    events = lost.start()
    for one in chunks[: data.draw(st.integers(0, len(chunks)))]:
        events += lost.feed(one)
    is_ended = lost.ended
    if is_ended:
        events += lost.end_turn()
    log = LogReplay()
    log.read(encode(events))
    takeover = Takeover(log)
    if not takeover.can_go_on:
        assert lost.phase is Phase.FIXED or answer.calls or answer.refusal
        return
    other = assembler(ids=CountedIds(len(takeover.items)))
    events += other.take_over(takeover, len(events))
    if takeover.is_over:
        assert is_ended
        other.conclude(1_700_000_001)
        response = check(events + other.terminal())
    else:
        events += go_on(other, manner, answer, data.draw(manners.cuts()), as_reasoning=False)
        response = finished(other, events)
    kept = [said(item) for item in response["output"] if item["type"] != "reasoning" or item["status"] == "completed"]
    texts = "".join(text for one in kept if isinstance(one, list) for _, text in one)
    assert texts.strip() == (answer.text + (answer.refusal if manner.refusals else "")).strip()


@pytest.mark.parametrize(
    "message", [{}, {"content": None}, {"content": 5}, {"content": "Hello"}, {"content": ["Hello"]}, {"content": [{}]}]
)
def test_a_message_whose_content_is_malformed_is_not_continued(message: dict[str, Any]) -> None:
    """As in the log of a response from an upstream's own Responses API."""
    log = LogReplay()
    log.take({"type": "response.output_item.added", "item": {"id": "msg_0", "type": "message", **message}})
    assert Takeover(log).phase is Phase.FIXED
