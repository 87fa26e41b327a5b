"""Answers that are interrupted anywhere and continued by another answer. The laws of events hold across the seam."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from responses_mw.errors import UpstreamError
from responses_mw.protocol.response.assembler import Assembler
from responses_mw.protocol.response.replay import LogReplay, Phase, Takeover
from responses_mw.protocol.response.seam import MAX_CHANCE, MIN_REPEATED, Passed, Seam, repeats_itself
from responses_mw.protocol.sse import encode
from responses_mw.protocol.types import Event
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
    """Return the chunks that an upstream would send after the interruption: the rest of the text, or the whole answer."""
    before = shown(assembling)
    if not before:
        return [event for one in render(manner, answer, cut) for event in assembling.feed(one)]
    assert answer.text.startswith(before)
    assembling.join(Seam(before, is_trimmed=False), PART)
    rest = Answer(text=answer.text[len(before) :], refusal=answer.refusal, calls=answer.calls)
    if as_reasoning and not (rest.calls or rest.refusal):
        rest = Answer(reasoning=rest.text)
    return [event for one in render(manner, rest, cut) for event in assembling.feed(one)]


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_an_answer_interrupted_anywhere_obeys_the_laws_and_repeats_nothing(manner: Manner, data: st.DataObject) -> None:
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
    cut = data.draw(manners.cuts())
    try:
        events += go_on(assembling, manner, answer, cut, as_reasoning=as_reasoning)
        response = finished(assembling, events)
    except UpstreamError as error:  # calls in this answer would appear as text
        assert (as_reasoning, error.message) == (True, "The upstream continued its interrupted answer as reasoning.")
        return
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
def test_a_seam_neither_loses_nor_adds_text(before: str, after: str, data: st.DataObject) -> None:
    pieces = data.draw(manners.cuts())(after)
    seam = Seam(before, is_trimmed=False)
    told: list[str] = []
    passed = None
    for piece in pieces:
        if passed is None:
            passed = seam.feed(piece, None)
            told += [text for text, *_ in passed or ()]
        else:
            told.append(piece)
    if passed is None:
        told += [text for text, *_ in seam.decide(is_final=True) or ()]
    begun = before.lstrip()
    repeats = len(begun.rstrip()) >= MIN_REPEATED and after.lstrip().startswith(begun)
    repeats = repeats and not (repeats_itself(before.strip()) or repeats_itself(before))
    assert "".join(told) == (after.lstrip().removeprefix(before.lstrip()) if repeats else after)


@given(piece=st.text(min_size=1), times=st.integers(2, 40), data=st.data())
def test_a_repetitive_text_is_continued_without_loss(piece: str, times: int, data: st.DataObject) -> None:
    whole = piece * times
    place = data.draw(st.integers(2 * len(piece), len(whole)))
    seam = Seam(whole[:place], is_trimmed=False)
    told = seam.feed(whole[place:], None)
    assert "".join(text for text, *_ in (seam.decide(is_final=True) or () if told is None else told)) == whole[place:]


@pytest.mark.parametrize(
    ("text", "expected"), [("", False), ("a", False), ("aa", True), ("ab ab a", True), ("ab ab b", False), ("abcdabc", False)]
)
def test_repetitive_texts_are_recognized(text: str, expected: bool) -> None:
    assert repeats_itself(text) is expected


@given(before=st.text(min_size=MIN_REPEATED).filter(lambda text: len(text.strip()) >= MIN_REPEATED))
def test_a_repetition_is_dropped_however_chunks_are_split(before: str) -> None:
    assume(not (repeats_itself(before.strip()) or repeats_itself(before)))
    seam = Seam(before, is_trimmed=False)
    passed = None
    for place, letter in enumerate(before):
        passed = seam.feed(letter, None)
        if passed is not None:
            assert before[place + 1 :].strip() == ""
    assert passed == []


def test_a_second_answer_is_refused_as_soon_as_it_differs() -> None:
    before = "".join(map(str, range(100)))
    seam = Seam(before, is_trimmed=False)
    assert seam.feed(before[: MAX_CHANCE + 1], None) is None
    with pytest.raises(UpstreamError, match="started a new answer"):
        seam.feed("y", None)


@pytest.mark.parametrize(
    ("before", "pieces", "after"),
    [("one ", [" two"], "two"), ("one \n", [" ", "\ntwo"], "two"), ("one \n", [" two"], "two"), ("one", [" two"], " two")],
)
def test_white_space_that_a_template_removed_appears_once(before: str, pieces: list[str], after: str) -> None:
    seam, told = Seam(before, is_trimmed=True), []
    passed = None
    for piece in pieces:
        passed = seam.feed(piece, None) if passed is None else [Passed(piece, None, False)]
        told += [text for text, *_ in passed or ()]
    assert "".join(told) == after


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_a_run_taken_over_by_another_worker_at_any_point_obeys_the_laws(manner: Manner, data: st.DataObject) -> None:
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


def test_a_turn_that_ended_after_its_reasoning_can_be_taken_over() -> None:
    """The answer may be missing, for example after the draft of an answer in a format."""
    lost = assembler()
    lost.is_draft = True
    events = lost.start() + lost.feed(
        *({"choices": [{"delta": delta}]} for delta in ({"reasoning": "Hm."}, {"content": "No."}))
    )
    events += lost.end_turn()
    log = LogReplay()
    log.read(encode(events))
    takeover = Takeover(log)
    assert [(item["type"], item["status"]) for item in takeover.items] == [("reasoning", "completed")]
    assert (takeover.phase, takeover.is_over, takeover.can_go_on) == (Phase.REASONING, False, True)


@pytest.mark.parametrize(
    "message", [{}, {"content": None}, {"content": 5}, {"content": "Hello"}, {"content": ["Hello"]}, {"content": [{}]}]
)
def test_a_message_whose_content_is_malformed_is_not_continued(message: dict[str, Any]) -> None:
    """The log of a response from an upstream's own Responses API can contain such a message."""
    log = LogReplay()
    log.take({"type": "response.output_item.added", "item": {"id": "msg_0", "type": "message", **message}})
    assert Takeover(log).phase is Phase.FIXED


def test_encrypted_copies_of_calls_are_no_part_of_an_answer_that_is_taken_over() -> None:
    """A turn that ended with calls of the client is over, with and without copies. After a call of the server, a turn follows."""
    function: dict[str, Any] = {
        "item": {"id": "fc_0", "type": "function_call", "status": "completed", "call_id": "c", "name": "f"}
    }
    served: dict[str, Any] = {"item": {"id": "mcp_0", "type": "mcp_call", "status": "completed", "name": "f", "output": "1"}}
    copies: dict[str, Any] = {
        "item": {"id": "rs_0", "type": "reasoning", "status": "completed", "summary": [], "encrypted_content": "x"}
    }
    for call, is_over, phase in ((function, True, Phase.FIXED), (served, False, Phase.NOTHING)):
        log = LogReplay()
        for index, one in enumerate((call, copies)):
            for step in ("added", "done"):
                log.take({"type": f"response.output_item.{step}", "output_index": index, **one})
        takeover = Takeover(log)
        assert (takeover.is_over, takeover.phase) == (is_over, phase)
