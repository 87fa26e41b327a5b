"""The laws of responses, checked with generated answers in the form of each server, split in every way."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from responses_mw.protocol import sse
from responses_mw.protocol.chat.chunks import as_chunk
from responses_mw.protocol.response import document
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.sse import SSEDecoder
from tests.protocol import manners
from tests.protocol.manners import MANNERS, Answer, Call, Manner, render
from tests.protocol.runs import assembler, run, said
from tests.support import spec
from tests.support.replay import check, decoded

INTERRUPTED = "The upstream closed the connection before its answer was complete."

each_manner = pytest.mark.parametrize("manner", MANNERS, ids=lambda manner: manner.name)


def _said(response: dict[str, Any]) -> list[Any]:
    told = [(said(item), item["type"]) for item in response["output"]]
    return [(one[0], orjson.loads(one[1])) if isinstance(one, tuple) and kind != "reasoning" else one for one, kind in told]


@each_manner
@given(data=st.data())
def test_the_response_has_the_models_output_however_chunks_are_split(manner: Manner, data: st.DataObject) -> None:
    answer = data.draw(manners.answers)
    response = check(run(render(manner, answer, data.draw(manners.cuts()))))
    assert response == check(run(render(manner, answer, data.draw(manners.cuts()))))
    assert _said(response) == manners.expected(answer, manner)
    assert response["status"] == "completed"
    assert response["error"] is None
    assert (response["usage"] or {}).get("total_tokens") == (None if manner.usage == "never" else 14)


@pytest.mark.parametrize(
    "manner", [m for m in MANNERS if m.name in ("openai", "vllm", "sglang", "watsonx")], ids=lambda m: m.name
)
@given(data=st.data())
def test_interleaved_calls_become_consecutive_items(manner: Manner, data: st.DataObject) -> None:
    answer = Answer(calls=tuple(data.draw(st.lists(manners.calls, min_size=2, max_size=4))))
    cut = data.draw(manners.cuts())
    mixed = check(run(render(manner, answer, cut, interleave=data.draw(manners.interleavings()))))
    assert mixed == check(run(render(manner, answer, cut)))


@given(data=st.data())
def test_text_between_the_fragments_of_a_call_does_not_split_the_call(data: st.DataObject) -> None:
    manner = next(one for one in MANNERS if one.name == "openai")
    answer = Answer(calls=tuple(data.draw(st.lists(manners.calls, min_size=1, max_size=3))))
    chunks = render(manner, answer, data.draw(manners.cuts()))
    at = data.draw(st.integers(1, len(chunks) - 2))
    text = data.draw(manners.texts.filter(str.strip))
    chunks.insert(at, {"choices": [{"index": 0, "delta": {"content": text}}]})
    told = _said(check(run(chunks)))
    assert [one for one in told if isinstance(one, tuple)] == [(call.name, call.arguments) for call in answer.calls]
    assert [("output_text", text)] in told


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_a_stream_that_breaks_off_fails_and_keeps_its_partial_output(manner: Manner, data: st.DataObject) -> None:
    chunks = render(manner, data.draw(manners.answers), data.draw(manners.cuts()))
    assembling = assembler()
    events = assembling.start()
    for one in chunks[: data.draw(st.integers(0, len(chunks)))]:
        events += assembling.feed(one)
    assembling.fail("server_error", INTERRUPTED)
    response = check(events + assembling.terminal())
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": INTERRUPTED}


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_an_answer_truncated_at_any_length_is_incomplete_and_requests_no_truncated_call(
    manner: Manner, data: st.DataObject
) -> None:
    answer = data.draw(manners.answers)
    chunks = render(manner, answer, data.draw(manners.cuts()))[: data.draw(st.integers(0, 12))]
    assembling = assembler()
    events = assembling.start()
    for one in [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}]:
        events += assembling.feed(one)
    events += assembling.end_turn()
    assembling.conclude(1_700_000_001)
    response = check(events + assembling.terminal())
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    for item in response["output"]:
        if item["type"] == "function_call" and item["status"] == "completed":
            orjson.loads(item["arguments"])


@given(manners.answers, manners.cuts())
def test_a_whole_answer_gives_the_same_response_as_a_streamed_answer(answer: Answer, cut: manners.Cut) -> None:
    manner = next(one for one in MANNERS if one.name == "openai")
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": call.name, "arguments": manners.dumped(call)}}
        for n, call in enumerate(answer.calls)
    ]
    message = {
        "role": "assistant",
        "content": answer.text or None,
        "refusal": answer.refusal or None,
        "tool_calls": calls or None,
    }
    completion = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": manners.USAGE}
    assert check(run([as_chunk(completion)])) == check(run(render(manner, answer, cut)))


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_reasoning_is_returned_as_a_summary_if_the_request_asks_for_one(manner: Manner, data: st.DataObject) -> None:
    answer = data.draw(manners.answers)
    chunks = render(manner, answer, data.draw(manners.cuts()))
    events = run(chunks, ResponseOptions(summary=True))
    assert _said(check(events)) == manners.expected(answer, manner)
    assert not any(event.type.startswith("response.reasoning_text") for event in events)
    assert not any("content" in item for item in check(events)["output"] if item["type"] == "reasoning")


@given(manner=st.sampled_from(MANNERS), data=st.data())
def test_reasoning_events_of_the_specification_differ_only_in_their_names(manner: Manner, data: st.DataObject) -> None:
    chunks = render(manner, data.draw(manners.answers), data.draw(manners.cuts()))
    openai, specified = decoded(run(chunks)), decoded(run(chunks, ResponseOptions(open_reasoning=True)))
    assert [spec.faults(event, spec.EVENTS[event["type"]]) for event in specified] == [[]] * len(specified)
    assert [{**event, "type": event["type"].replace("reasoning_text", "reasoning")} for event in openai] == specified


@given(answer=manners.answers, cut=manners.cuts(), seed=st.lists(st.integers(1, 50), min_size=1))
def test_the_response_does_not_depend_on_how_the_network_splits_its_bytes(
    answer: Answer, cut: manners.Cut, seed: list[int]
) -> None:
    chunks = render(MANNERS[0], answer, cut)
    data = b"".join(b"data: " + orjson.dumps(one) + b"\n\n" for one in chunks)
    decoder, received, position = SSEDecoder(), [], 0
    while position < len(data):
        for length in seed:
            received += decoder.feed(data[position : position + length])
            position += length
    received += decoder.flush()
    assert [orjson.loads(one) for one in received] == chunks


@given(st.lists(st.tuples(manners.answers, st.sampled_from(MANNERS)), min_size=2, max_size=3), manners.cuts())
def test_the_turns_of_a_run_make_one_response_with_the_sum_of_their_usage(
    turns: list[tuple[Answer, Manner]], cut: manners.Cut
) -> None:
    assembling = assembler()
    events = assembling.start()
    expected, tokens = [], 0
    for answer, manner in turns:
        for one in render(manner, answer, cut):
            events += assembling.feed(one)
        events += assembling.end_turn()
        assert assembling.answer.has_client_calls is bool(answer.calls[: manner.most_calls])
        expected += manners.expected(answer, manner)
        tokens += 0 if manner.usage == "never" else 14
    assembling.conclude(1_700_000_001)
    response = check(events + assembling.terminal())
    assert _said(response) == expected
    assert (response["usage"] or {"total_tokens": 0})["total_tokens"] == tokens
    call_ids = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    assert len(call_ids) == len(set(call_ids))


@given(manners.answers, st.sampled_from(MANNERS), manners.cuts())
def test_one_text_chunk_is_one_delta(answer: Answer, manner: Manner, cut: manners.Cut) -> None:
    chunks = render(manner, answer, cut)
    deltas = [event["delta"] for event in decoded(run(chunks)) if event["type"] == "response.output_text.delta"]
    assert deltas == (cut(answer.text) if "".join(deltas) else [])


@each_manner
@given(data=st.data())
def test_an_event_does_not_change_after_it_is_returned(manner: Manner, data: st.DataObject) -> None:
    assembling = assembler()
    events = assembling.start()
    encoded = sse.encode(events)
    for chunk in [*render(manner, data.draw(manners.answers), data.draw(manners.cuts())), None]:
        made = assembling.feed(chunk) if chunk is not None else assembling.end_turn()
        encoded += sse.encode(made)
        events += made
    assembling.conclude(1)
    assert sse.encode(events) == encoded


@given(st.text(max_size=30), st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", ">", "a", " ", "\n"]), max_size=8))
def test_thinking_within_the_text_is_recognized_however_the_text_is_split(start: str, pieces: list[str]) -> None:
    text = start + "".join(pieces)
    options = ResponseOptions(think_tag="think")
    chunks = [{"choices": [{"index": 0, "delta": {"content": letter}}]} for letter in text]
    at_once = [{"choices": [{"index": 0, "delta": {"content": text}}]}]
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    assert check(run([*chunks, finish], options)) == check(run([*at_once, finish], options))


def test_every_event_is_parsed_as_the_sdk_class_of_its_type() -> None:
    """Parse with the SDK's own union, so that no event is parsed as the class of another type."""
    adapter = TypeAdapter[Any](ResponseStreamEvent)
    answer = Answer(reasoning="Hm.", text="It is", refusal="no", calls=(Call("f", {"a": 1}),))
    seen = set()
    for manner in (MANNERS[0], MANNERS[2]):
        for event in decoded(run(render(manner, answer, lambda text: [text] if text else []))):
            model = adapter.validate_python(event)
            assert model.type == event["type"]
            assert model.to_dict() == event
            seen.add(event["type"])
    assert len(seen) == 15


@given(manners.answers, st.sampled_from(MANNERS), manners.cuts())
def test_every_document_has_the_members_that_the_specification_and_the_sdk_require(
    answer: Answer, manner: Manner, cut: manners.Cut
) -> None:
    response = document.whole(check(run(render(manner, answer, cut))))
    assert spec.faults(response, "ResponseResource") == []
    assert response["output_text"] == Response.model_validate(response).output_text
