"""Quirks seen in single servers. `output` checks all laws and summarizes the response."""

from __future__ import annotations

from typing import Any

import pytest

from responses_mw.errors import UpstreamBrokeOff, UpstreamError
from responses_mw.protocol.chat.chunks import as_chunk
from responses_mw.protocol.response.builder import ResponseOptions
from tests.protocol.runs import assembler, chunk, fragment, output, respond, run
from tests.support.replay import check, decoded

STOP = chunk(finish_reason="stop")
HI = [("output_text", "Hi")]


def calls(*fragments: Any, **choice: Any) -> dict[str, Any]:
    return chunk(tool_calls=list(fragments), **choice)


# -- text and reasoning --------------------------------------------------------------------------------------------------


def test_reasoning_sent_under_both_names_appears_once() -> None:
    assert output(chunk(reasoning="Hm", reasoning_content="Hm"), STOP) == [("reasoning", "Hm")]


def test_null_or_empty_reasoning_content_is_ignored() -> None:
    assert output(chunk(reasoning_content=None, content="Hi"), chunk(reasoning=None, content=""), STOP) == [HI]


def test_empty_content_next_to_reasoning_opens_no_message() -> None:
    assert output(chunk(role="assistant", reasoning="Hm", content=""), STOP) == [("reasoning", "Hm")]


def test_white_space_between_reasoning_and_a_call_opens_no_message() -> None:
    chunks = [chunk(reasoning="Hm"), chunk(content="\n\n"), calls(fragment(name="f", arguments="{}")), STOP]
    assert output(*chunks) == [("reasoning", "Hm"), ("f", "{}")]


def test_white_space_before_text_belongs_to_it() -> None:
    assert output(chunk(content="\n"), chunk(content="\n"), chunk(content="Hi"), STOP) == [[("output_text", "\n\nHi")]]


def test_an_answer_without_tokens_is_an_empty_message() -> None:
    assert output(chunk(role="assistant", content=""), STOP) == [[("output_text", "")]]


def test_an_answer_with_only_reasoning_has_no_message() -> None:
    """With thinking off, vLLM's parser deepseek_r1 returns the whole answer as reasoning."""
    assert output(chunk(reasoning="All of it", content=None), STOP) == [("reasoning", "All of it")]


def test_a_refusal_becomes_a_refusal_part() -> None:
    assert output(chunk(refusal="I can"), chunk(refusal="not"), STOP) == [[("refusal", "I cannot")]]


def test_text_and_refusal_share_a_message() -> None:
    assert output(chunk(content="Hi"), chunk(refusal="no"), STOP) == [[("output_text", "Hi"), ("refusal", "no")]]


def test_a_chunk_with_reasoning_text_and_calls_gives_items_in_that_order() -> None:
    everything = chunk(
        reasoning="Hm", content="Hi", tool_calls=[fragment(name="f", arguments="{}")], finish_reason="tool_calls"
    )
    assert output(everything) == [("reasoning", "Hm"), HI, ("f", "{}")]


def test_content_that_is_a_list_of_parts_is_joined_to_text() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "reference"}, {"type": "text", "text": "i"}]
    assert output(chunk(content=parts), STOP) == [HI]
    assert output(chunk(content=[{"type": "reference"}]), STOP) == [[("output_text", "")]]


THOUGHTS: list[Any] = [
    {"reasoning_text": "Hm"},
    {"reasoning_details": [{"type": "reasoning.text", "text": "H"}, {"type": "reasoning.text", "text": "m", "signature": "s"}]},
    {"reasoning_details": [{"type": "reasoning.summary", "summary": "Hm"}]},
    {"reasoning": "Hm", "reasoning_details": [{"type": "reasoning.text", "text": "Hm"}]},
    {"reasoning_content": "Hm", "thinking_blocks": [{"type": "thinking", "thinking": "Hm"}]},
    {"reasoning": ["H", {"text": "m"}]},
    {"reasoning": {"content": "Hm"}},
    {"reasoning_content": [{"type": "text", "text": "Hm"}]},
    {"thinking": "Hm"},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "H"}, {"type": "text", "text": "m"}]}]},
    {"content": [{"type": "thinking", "thinking": "Hm", "closed": True}]},
    {"content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"content": {"type": "reasoning", "reasoning": "Hm"}},
]


@pytest.mark.parametrize("thought", THOUGHTS)
def test_reasoning_is_read_in_every_known_form(thought: dict[str, Any]) -> None:
    assert output(chunk(**thought), chunk(content="Hi"), STOP) == [("reasoning", "Hm"), HI]
    message = {"content": "Hi", **thought}
    if "content" in thought:
        parts = thought["content"] if isinstance(thought["content"], list) else [thought["content"]]
        message["content"] = [*parts, {"type": "text", "text": "Hi"}]
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    assert output(as_chunk(whole)) == [("reasoning", "Hm"), HI]


def test_parts_of_a_content_list_keep_their_order() -> None:
    parts = [
        {"type": "text", "text": "Hi"},
        {"type": "thinking", "thinking": "Hm"},
        {"type": "text", "text": "you"},
        {"type": "refusal", "refusal": "no"},
    ]
    said = [HI, ("reasoning", "Hm"), [("output_text", "you"), ("refusal", "no")]]
    assert output(chunk(content=parts), STOP) == said


def test_members_that_the_response_lacks_are_reported_by_name() -> None:
    assembling = assembler()
    assembling.feed(
        chunk(content="Hi", audio={"data": "x"}, images=[{}], refusal=None, name="", function_call=None),
        chunk(content=[{"type": "image_url"}, 5], reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]),
        chunk(annotations=[{"type": "file_citation"}], **{f"x{n}" * 100: n for n in range(1, 100)}),
    )
    assert {"audio", "images", "content.image_url", "content", "reasoning_details"} <= assembling.dropped
    assert len(assembling.dropped) == 32
    assert max(map(len, assembling.dropped)) == 64


def _citation(**members: Any) -> dict[str, Any]:
    return {"url": "https://a.example/x", "title": "x", "start_index": 0, "end_index": 2, **members}


FLAT = {"type": "url_citation", **_citation()}
NESTED = {"type": "url_citation", "url_citation": _citation()}


@pytest.mark.parametrize("annotation", [FLAT, NESTED])
@pytest.mark.parametrize("place", ["before", "with", "repeated", "after", "whole"])
def test_the_upstreams_citations_become_annotations_of_the_text(annotation: dict[str, Any], place: str) -> None:
    chunks = {
        "before": [chunk(annotations=[annotation]), chunk(content="Hi"), STOP],
        "with": [chunk(content="Hi", annotations=[annotation]), STOP],
        "repeated": [chunk(content="H", annotations=[annotation]), chunk(content="i", annotations=[annotation]), STOP],
        "after": [chunk(content="Hi"), chunk(annotations=[annotation], finish_reason="stop")],
        "whole": [
            as_chunk({"choices": [{"message": {"content": "Hi", "annotations": [annotation]}, "finish_reason": "stop"}]})
        ],
    }
    events = run(chunks[place])
    assert check(events)["output"][0]["content"][0]["annotations"] == [FLAT]
    added = [event.data for event in events if event.type == "response.output_text.annotation.added"]
    assert [(event["annotation_index"], event["annotation"]) for event in added] == [(0, FLAT)]


@pytest.mark.parametrize("positions", [{"start_index": None}, {"end_index": 99}, {"start_index": 5}, {"start_index": True}])
def test_a_citation_without_valid_positions_is_placed_at_the_end_of_the_text(positions: dict[str, Any]) -> None:
    annotation = {"type": "url_citation", "url_citation": _citation(title=None, **positions)}
    response = respond(chunk(content="Hi", annotations=[annotation]), STOP)
    expected = {**FLAT, "title": "https://a.example/x", "start_index": 2, "end_index": 2}
    assert response["output"][0]["content"][0]["annotations"] == [expected]


def test_a_null_log_probability_becomes_that_of_an_impossible_token() -> None:
    entry = {"token": "Hi", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "#", "logprob": None}]}
    told = chunk(content="Hi", logprobs={"content": [entry]})
    response = respond(told, STOP, options=ResponseOptions(logprobs=True))
    [token] = response["output"][0]["content"][0]["logprobs"]
    assert (token["logprob"], token["top_logprobs"][0]["logprob"]) == (-0.5, -9999.0)


def test_citations_of_an_answer_without_text_are_reported_as_dropped() -> None:
    assembling = assembler()
    assembling.feed(chunk(reasoning="Hm", annotations=[FLAT]), STOP)
    assembling.end_turn()
    assert assembling.dropped == {"annotations"}


@pytest.mark.parametrize("empty", [{"delta": None}, {}, {"delta": {}}, {"delta": {"content": None}}, {"message": "x"}])
def test_a_choice_without_a_delta_is_ignored(empty: dict[str, Any]) -> None:
    assert output(chunk(content="Hi"), {"choices": [{"index": 0, **empty}]}, STOP) == [HI]


@pytest.mark.parametrize(
    "empty", [{}, {"choices": None}, {"choices": []}, {"choices": [], "sglext": {"x": 1}}, {"prompt_progress": {}}]
)
def test_a_chunk_without_choices_is_ignored(empty: dict[str, Any]) -> None:
    assert output(empty, chunk(content="Hi"), STOP) == [HI]


def test_choices_with_another_index_are_ignored() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "Hi"}}]}
    assert output(other, STOP) == [HI]


def test_choices_after_the_finish_reason_do_not_change_the_outcome() -> None:
    """Old versions of watsonx send such choices."""
    assert output(chunk(content="Hi", finish_reason="stop"), chunk(content=""), {"choices": [{"delta": {}}]}) == [HI]


@pytest.mark.parametrize(
    ("told", "shown"), [("priority", "priority"), ("on_demand", "default"), (None, "default"), ({}, "default")]
)
def test_the_service_tier_is_reported_if_the_reference_knows_its_name(told: Any, shown: str) -> None:
    assert respond({**chunk(content="Hi"), "service_tier": told}, STOP)["service_tier"] == shown


def test_unknown_members_of_chunks_are_ignored() -> None:
    extra = chunk(
        content="Hi", obfuscation="x", content_filter_results={}, token_ids=[1], stop_reason=None, reasoning_details=[]
    )
    assert output({**extra, "time_info": {}, "system_fingerprint": "fp_ollama", "id": ""}, STOP) == [HI]


@pytest.mark.parametrize("tag", ["think", "reasoning"])
def test_inline_reasoning_is_recognized_by_the_tag_in_the_settings(tag: str) -> None:
    text = f"<{tag}>Hm</{tag}>Hi"
    said = [("reasoning", "Hm"), HI]
    assert output(*[chunk(content=letter) for letter in text], STOP, options=ResponseOptions(think_tag=tag)) == said
    assert output(chunk(content=text), STOP) == [[("output_text", text)]]


def test_half_a_tag_at_the_end_is_text() -> None:
    assert output(chunk(content="Hi <thi"), STOP, options=ResponseOptions(think_tag="think")) == [[("output_text", "Hi <thi")]]


# -- calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool_calls", [None, [], {}])
def test_an_empty_list_of_tool_calls_is_ignored(tool_calls: Any) -> None:
    assert output(chunk(content="Hi", tool_calls=tool_calls), STOP) == [HI]


def test_a_call_is_requested_even_if_the_finish_reason_is_stop() -> None:
    assert output(calls(fragment(name="f", arguments="{}", id="a"), finish_reason="stop")) == [("f", "{}")]


def test_the_last_fragment_of_a_call_may_carry_the_finish_reason() -> None:
    chunks = [
        calls(fragment(name="f", id="a")),
        calls(fragment(arguments='{"a"')),
        calls(fragment(arguments=":1}"), finish_reason="stop"),
    ]
    assert output(*chunks) == [("f", '{"a":1}')]


def test_missing_arguments_become_an_empty_object_in_one_delta() -> None:
    nothing: tuple[Any, ...] = (None, "", {})
    for arguments in nothing:
        events = decoded(run([calls(fragment(name="f", id="a", arguments=arguments)), STOP]))
        assert [event["delta"] for event in events if event["type"].endswith("arguments.delta")] == ["{}"]


def test_arguments_sent_as_an_object_are_encoded_as_json() -> None:
    assert output(calls(fragment(name="f", arguments={"a": [1, None]})), STOP) == [("f", '{"a":[1,null]}')]


def test_a_call_whose_function_is_null_at_first_waits_for_its_name() -> None:
    chunks = [
        calls({"index": 0, "id": "a", "function": None}),
        calls(fragment(name="f")),
        calls(fragment(arguments="{}")),
        STOP,
    ]
    assert output(*chunks) == [("f", "{}")]


def test_an_empty_name_does_not_overwrite_the_name() -> None:
    chunks = [calls(fragment(name="f", id="a")), calls(fragment(name="", arguments="{}")), calls(fragment(name=None)), STOP]
    assert output(*chunks) == [("f", "{}")]


def test_a_repeated_name_is_not_appended() -> None:
    chunks = [calls(fragment(name="f", id="a", arguments='{"a"')), calls(fragment(name="f", id="a", arguments=":1}")), STOP]
    assert output(*chunks) == [("f", '{"a":1}')]


def test_a_name_repeated_without_ids_is_not_appended() -> None:
    chunks = [calls(fragment(name="f", arguments='{"a"')), calls(fragment(name="f", arguments=":1}")), STOP]
    assert output(*chunks) == [("f", '{"a":1}')]


def test_fragments_with_the_same_index_in_one_delta_are_one_call() -> None:
    chunks = [calls(fragment(name="f", id="a"), fragment(arguments="{"), fragment(arguments="}")), STOP]
    assert output(*chunks) == [("f", "{}")]


def test_fragments_without_an_index_belong_to_the_call_with_their_id_or_to_the_last_call() -> None:
    one = [{"id": "a", "function": {"name": "f", "arguments": "{"}}, {"id": "b", "function": {"name": "g", "arguments": "{"}}]
    two = [{"id": "a", "function": {"arguments": "}"}}, {"function": {"arguments": "}"}}]
    assert output(calls(*one), calls(two[0]), calls(two[1]), STOP) == [("f", "{}"), ("g", "{}")]


def test_calls_that_all_have_index_zero_are_distinguished_by_their_ids() -> None:
    chunks = [calls(fragment(name="f", id=call_id, arguments="{}")) for call_id in "ab"]
    assert output(*chunks, STOP) == [("f", "{}"), ("f", "{}")]


def test_calls_with_index_zero_and_without_ids_are_distinguished_when_they_are_complete() -> None:
    chunks = [calls(fragment(name="f", arguments='{"a":1}')), calls(fragment(name="f", arguments='{"a":2}'))]
    assert output(*chunks, STOP) == [("f", '{"a":1}'), ("f", '{"a":2}')]


def test_calls_without_index_id_or_arguments_are_distinguished_by_their_names() -> None:
    chunks = [calls({"function": {"name": "f", "arguments": {}}}), calls({"function": {"name": "g", "arguments": '{"a":1}'}})]
    assert output(*chunks, STOP) == [("f", "{}"), ("g", '{"a":1}')]


def test_a_call_without_a_name_is_an_upstream_error() -> None:
    response = respond(calls(fragment(arguments="{}", id="a")), STOP)
    assert response["status"] == "failed"
    assert "naming" in response["error"]["message"]


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|im_end|>", "", "</s>"])
def test_the_name_and_arguments_are_read_from_the_output_of_tgis_grammar(end: str) -> None:
    text = '{"function": {"_name": "get_weather", "city": "Par}is"}}' + end
    chunks = [chunk(tool_calls={"index": 0, "id": "", "function": {"name": None, "arguments": letter}}) for letter in text]
    assert output(*chunks, chunk(finish_reason="eos_token")) == [("get_weather", '{"city":"Par}is"}')]


def _call_ids(response: dict[str, Any]) -> list[str]:
    return [item["call_id"] for item in response["output"]]


def test_the_upstreams_call_id_is_kept() -> None:
    assert _call_ids(respond(calls(fragment(name="f", id="functions.f:0")), STOP)) == ["functions.f:0"]


@pytest.mark.parametrize("given", [None, "", 7, "x" * 65])
def test_a_missing_or_unusable_call_id_is_replaced(given: Any) -> None:
    assert _call_ids(respond(calls(fragment(name="f", id=given)), STOP)) == ["call_0"]


def test_a_call_id_that_the_chain_has_used_is_replaced() -> None:
    options = ResponseOptions(used_call_ids=frozenset({"0"}))
    assert _call_ids(respond(calls(fragment(name="f", id="0")), STOP, options=options)) == ["call_0"]
    two = [calls(fragment(n, name="f", id="0", arguments="{}")) for n in range(2)]
    assert _call_ids(respond(*two, STOP)) == ["0", "call_1"]


def test_calls_that_the_request_does_not_allow_are_suppressed() -> None:
    chunks = [calls(fragment(0, name="f", arguments="{}")), calls(fragment(1, name="g", arguments="{}"))]
    tools = [{"type": "function", "name": name, "parameters": None} for name in ("f", "g")]
    only = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert output(*chunks, STOP, tools=tools, tool_choice=only) == [("g", "{}")]
    told = "No tool was called. The model called 'f', 'g', which the request does not allow."
    assert output(*chunks, STOP, tools=tools, tool_choice="none") == [[("output_text", told)]]


def test_only_the_first_parallel_call_is_kept_if_the_request_forbids_parallel_calls() -> None:
    chunks = [calls(fragment(n, name="f", arguments=f'{{"n":{n}}}')) for n in range(3)]
    assert output(*chunks, STOP, options=ResponseOptions(single_call=True)) == [("f", '{"n":0}')]


def test_malformed_arguments_are_returned_unchanged() -> None:
    assert output(calls(fragment(name="f", arguments="{not json")), chunk(finish_reason="tool_calls")) == [("f", "{not json")]


def test_calls_after_a_call_with_malformed_arguments_are_returned() -> None:
    chunks = [
        calls(fragment(0, name="f", arguments="{not")),
        calls(fragment(1, name="g", arguments="{}")),
        calls(fragment(0, arguments="!")),
    ]
    assert output(*chunks, STOP) == [("f", "{not!"), ("g", "{}")]


# -- ends ----------------------------------------------------------------------------------------------------------------

ENDS = ["stop", "tool_calls", "function_call", "stop_sequence", "eos_token", "STOP", "end_turn", "toolCalls", "unheard_of"]


@pytest.mark.parametrize("reason", ENDS)
def test_a_finish_reason_completes_the_response(reason: str) -> None:
    response = respond(chunk(content="Hi"), chunk(finish_reason=reason))
    assert (response["status"], response["incomplete_details"], response["completed_at"]) == ("completed", None, 1_700_000_001)


LIMITS = [
    *("length", "max_tokens", "MAX_TOKENS", "model_length", "model_context_window_exceeded", "repetition"),
    *({"type": "length"}, {"type": "max_tokens", "token": 2}, {"reason": "LENGTH"}),
]
FILTERS = ["content_filter", "sensitive", "safety", "SAFETY", "contentFilter", {"type": "content_filter"}]


@pytest.mark.parametrize(
    ("reason", "why"), [(one, "max_output_tokens") for one in LIMITS] + [(one, "content_filter") for one in FILTERS]
)
def test_a_truncated_answer_is_incomplete(reason: Any, why: str) -> None:
    response = respond(chunk(content="H"), chunk(finish_reason=reason))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": why})
    assert response["output"][0]["status"] == "incomplete"


def test_a_truncated_call_is_incomplete_and_not_requested() -> None:
    assembling = assembler()
    events = assembling.start() + assembling.feed(calls(fragment(name="f", arguments='{"a')))
    events += assembling.feed(chunk(finish_reason="length")) + assembling.end_turn()
    assembling.conclude(1)
    response = check(events + assembling.terminal())
    assert [item["status"] for item in response["output"]] == ["incomplete"]


@pytest.mark.parametrize(
    "reason", ["abort", "error", "insufficient_system_resource", "network_error", "ERROR", {"type": "error"}]
)
def test_a_finish_reason_that_reports_an_error_is_an_interruption(reason: Any) -> None:
    assembling = assembler()
    assembling.feed(chunk(content="Hel"), chunk(finish_reason=reason))
    assert not assembling.ended
    with pytest.raises(UpstreamBrokeOff):
        assembling.check_end(done=True)


@pytest.mark.parametrize("reason", ["null", "", None, False, {}, {"type": None}, "NOT_FINISHED"])
def test_a_finish_reason_that_means_unfinished_does_not_end_the_answer(reason: Any) -> None:
    assembling = assembler()
    assembling.feed(chunk(content="Hel", finish_reason=reason))
    assert not assembling.ended
    assert assembling.answer.finish_reason is None


def test_a_truncated_call_stays_incomplete_after_an_unknown_finish_reason() -> None:
    assembling = assembler()
    events = assembling.start() + assembling.feed(calls(fragment(name="f", arguments='{"a')), chunk(finish_reason="unheard_of"))
    events += assembling.end_turn()
    assembling.conclude(1)
    response = check(events + assembling.terminal())
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert assembling.answer.asked == []


def test_an_unknown_finish_reason_ends_the_answer_and_is_reported() -> None:
    assembling = assembler()
    assembling.feed(chunk(content="Hi", finish_reason="unheard_of" * 100))
    assert assembling.ended
    assert not assembling.has_known_end
    assert assembling.unknown_finish_reason == ("unheard_of" * 100)[:64]
    assembling.feed(chunk(finish_reason="stop"))
    assert assembling.has_known_end


def test_done_completes_an_answer_only_after_some_output() -> None:
    assembling = assembler()
    assembling.feed(chunk(role="assistant", content=""))
    with pytest.raises(UpstreamError, match="without any output"):
        assembling.check_end(done=True)
    assembling.feed({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}})
    assert not assembling.ended
    assembling.feed(chunk(content=" "))
    assembling.check_end(done=True)
    with pytest.raises(UpstreamBrokeOff):
        assembling.check_end(done=False)


def test_done_does_not_complete_a_truncated_call() -> None:
    assembling = assembler()
    assembling.feed(calls(fragment(name="f", arguments='{"a')))
    with pytest.raises(UpstreamBrokeOff):
        assembling.check_end(done=True)
    assembling.feed(calls(fragment(arguments='":1}')))
    assembling.check_end(done=True)


def test_two_interleaved_truncated_calls_are_not_requested() -> None:
    chunks = [
        calls(fragment(0, name="f", arguments='{"a')),
        calls(fragment(1, name="g", arguments='{"b')),
        chunk(finish_reason="length"),
    ]
    response = respond(*chunks)
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_a_call_truncated_within_its_name_is_omitted() -> None:
    response = respond(calls(fragment(arguments='{"function": {"_na')), chunk(finish_reason="length"))
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["status"] == "incomplete"


@pytest.mark.parametrize(
    ("chunks", "clean"),
    [
        ([chunk(content="Hi", finish_reason="stop")], True),
        ([chunk(content="Hi"), {"choices": [], "usage": {"prompt_tokens": 1}}], True),
        ([chunk(content="Hi"), {**chunk(content="!"), "usage": {"prompt_tokens": 1}}], True),
        ([chunk(content="Hi")], False),
        ([chunk(content="Hi"), chunk()], False),  # Ollama after an error of its backend
        ([{**chunk(content="Hi"), "usage": {"prompt_tokens": 1}}] * 2, False),  # usage on every chunk
        ([{"choices": [], "usage": {"prompt_tokens": 1}}, chunk(content="Hi")], False),
        ([], False),
    ],
)
def test_a_stream_ends_cleanly_after_a_finish_reason_or_final_usage(chunks: list[dict[str, Any]], clean: bool) -> None:
    assembling = assembler()
    for one in chunks:
        assembling.feed(one)
    assert assembling.ended is clean


def test_the_end_of_one_turn_does_not_end_the_next_turn() -> None:
    assembling = assembler()
    assembling.feed(calls(fragment(name="f", arguments="{}"), finish_reason="tool_calls"))
    assembling.end_turn()
    assert (assembling.answer.has_client_calls, assembling.answer.finish_reason) == (True, "tool_calls")
    assert not assembling.ended
    assembling.feed(chunk(content="Hi"))
    assert not assembling.ended
    assert (assembling.answer.has_client_calls, assembling.answer.finish_reason) == (False, None)


def test_a_turn_without_chunks_requests_no_calls() -> None:
    assembling = assembler()
    assembling.feed(calls(fragment(name="f", arguments="{}"), finish_reason="tool_calls"))
    assembling.end_turn()
    assembling.end_turn()
    assert (assembling.answer.has_client_calls, assembling.answer.finish_reason) == (False, None)


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_a_run_starts_with_created_and_then_queued_or_in_progress(status: str) -> None:
    assembling = assembler()
    events = decoded(assembling.start(queued=status == "queued"))
    assert [event["type"] for event in events] == ["response.created", f"response.{status}"]
    assert {event["response"]["status"] for event in events} == {status}


def test_a_cancelled_run_ends_with_response_failed_and_the_status_cancelled() -> None:
    assembling = assembler()
    events = assembling.start()
    assembling.response["status"] = "cancelled"
    response = check(events + assembling.terminal())
    assert response["status"] == "cancelled"


def test_the_streamed_part_of_an_open_call_is_kept_when_the_run_fails() -> None:
    response = respond(calls(fragment(name="unused", id="a", arguments='{"a')), calls("no fragment"))
    assert response["status"] == "failed"
    assert (response["output"][0]["arguments"], response["output"][0]["status"]) == ('{"a', "incomplete")


# -- usage and logprobs --------------------------------------------------------------------------------------------------

DETAILS = {"cached_tokens": 0, "cache_write_tokens": 0}


def _usage(*chunks: dict[str, Any]) -> Any:
    return respond(*chunks)["usage"]


def test_usage_is_null_if_the_upstream_reports_none() -> None:
    assert _usage(chunk(content="Hi"), STOP) is None


def test_usage_on_every_chunk_is_treated_as_cumulative() -> None:
    chunks = [
        {**chunk(content="x"), "usage": {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n}} for n in (1, 2)
    ]
    assert (_usage(*chunks, STOP)["output_tokens"], _usage(*chunks, STOP)["total_tokens"]) == (2, 5)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({}, None),
        ({"prompt_tokens": 3, "completion_tokens": 2}, (3, 0, 2, 0, 5)),
        ({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 6, "prompt_tokens_details": None}, (3, 0, 2, 0, 6)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens": 1}, (3, 2, 1, 0, 4)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": None}, "completion_tokens": 1}, (3, 0, 1, 0, 4)),
        ({"prompt_tokens": 1, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 7}}, (1, 0, 9, 7, 10)),
        ({"prompt_tokens": 1, "completion_tokens": 9, "reasoning_tokens": 7}, (1, 0, 9, 7, 10)),  # SGLang
        ({"prompt_tokens": "3", "completion_tokens": None, "total_tokens": []}, (0, 0, 0, 0, 0)),
    ],
)
def test_usage_has_all_details_whatever_form_the_upstream_uses(usage: dict[str, Any], expected: Any) -> None:
    told = _usage(chunk(content="Hi"), STOP, {"choices": [], "usage": usage})
    if expected is not None:
        cached, reasoning = told["input_tokens_details"]["cached_tokens"], told["output_tokens_details"]["reasoning_tokens"]
        told = (told["input_tokens"], cached, told["output_tokens"], reasoning, told["total_tokens"])
    assert told == expected


def _logprobs(*entries: Any) -> dict[str, Any]:
    return {"content": list(entries), "refusal": None}


def test_the_number_of_log_probabilities_of_a_text_is_limited() -> None:
    token = {"token": "", "logprob": -1, "top_logprobs": [{}] * 1000}
    chunks = [chunk(content="Hi", logprobs=_logprobs(*[token] * 1000)), STOP]
    part = respond(*chunks, options=ResponseOptions(logprobs=True))["output"][0]["content"][0]
    assert (len(part["logprobs"]), len(part["logprobs"][0]["top_logprobs"])) == (102, 20)


def test_a_token_longer_than_the_text_belongs_to_the_text() -> None:
    told = [_logprobs({"token": token, "logprob": -1.0, "bytes": None, "top_logprobs": []}) for token in ("Hello", "you")]
    chunks = [chunk(content="He", logprobs=told[0]), chunk(content="<think>"), chunk(content="you", logprobs=told[1])]
    items = respond(*chunks, STOP, options=ResponseOptions(think_tag="think", logprobs=True))["output"]
    [message] = [item for item in items if item["type"] == "message"]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["Hello"]


def test_logprobs_are_returned_only_if_the_request_asks_for_them() -> None:
    token = {
        "token": "Hi",
        "logprob": -0.5,
        "bytes": [72, 105],
        "top_logprobs": [{"token": "Ho", "logprob": -2, "bytes": [72, 111]}],
    }
    chunks = [chunk(content="Hi", logprobs=_logprobs(token)), STOP]
    part = respond(*chunks, options=ResponseOptions(logprobs=True))["output"][0]["content"][0]
    assert part["logprobs"] == [token]
    assert respond(*chunks)["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_logprobs_of_the_visible_text_are_kept_if_it_contains_inline_reasoning(size: int) -> None:
    tokens = ["<", "think", ">", "H", "m", "</th", "ink", ">", "He", "l", "lo", " <b", ">", "!"]
    entries: list[dict[str, Any]] = [
        {"token": token, "logprob": -1.0, "bytes": [*token.encode()], "top_logprobs": []} for token in tokens
    ]
    cut = [entries[at : at + size] for at in range(0, len(entries), size)]
    chunks = [chunk(content="".join(one["token"] for one in piece), logprobs={"content": piece}) for piece in cut]
    part = respond(*chunks, STOP, options=ResponseOptions(logprobs=True, think_tag="think"))["output"][1]["content"][0]
    assert part["text"] == "Hello <b>!"
    assert [one["token"] for one in part["logprobs"]] == ["He", "l", "lo", " <b", ">", "!"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("message", "tokens", "kept"),
    [
        ({"reasoning": "Hello?", "content": "Hello"}, ["<think>", "Hel", "lo?", "</think>", "Hel", "lo", "<end>"], ["Hel", "lo"]),
        ({"reasoning": "é", "content": "éa"}, [b"\xc3", b"\xa9", "\n", b"\xc3", b"\xa9", "a"], ["", "", "a"]),
        ({"reasoning": "other", "content": "Hello"}, ["x", "Hel", "lo"], ["Hel", "lo"]),
        ({"reasoning": "Hm.", "content": "changed"}, ["Hm.", "x"], []),
        ({"content": "Hello", "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}, ["Hello", "<f>"], ["Hello"]),
    ],
)  # fmt: skip
def test_logprobs_that_do_not_belong_to_the_text_are_dropped(
    whole: bool, message: dict[str, Any], tokens: list[str | bytes], kept: list[str]
) -> None:
    entries = [
        {"token": token, "logprob": -1.0} if isinstance(token, str) else {"token": "", "logprob": -1.0, "bytes": [*token]}
        for token in tokens
    ]
    given = _whole(message, logprobs=_logprobs(*entries)) if whole else chunk(**message, logprobs=_logprobs(*entries))
    items = respond(given, STOP, options=ResponseOptions(logprobs=True))["output"]
    [part] = [part for item in items if item["type"] == "message" for part in item["content"]]
    assert [token["token"] for token in part["logprobs"]] == kept


def test_logprobs_of_a_whole_answer_end_with_its_text() -> None:
    """Without streaming, vLLM also reports the token that ends the answer."""
    entries = [{"token": token, "logprob": -1.0, "bytes": [300]} for token in ("Hi", "<|im_end|>")]
    [item] = respond(_whole({"content": "Hi"}, logprobs=_logprobs(*entries)), options=ResponseOptions(logprobs=True))["output"]
    assert [token["token"] for token in item["content"][0]["logprobs"]] == ["Hi"]


def test_logprobs_without_bytes_get_bytes() -> None:
    """TGI omits the bytes."""
    entry = {"token": "é", "logprob": -1.0, "top_logprobs": None}
    part = respond(chunk(content="é", logprobs=_logprobs(entry)), STOP, options=ResponseOptions(logprobs=True))["output"][0][
        "content"
    ][0]
    assert part["logprobs"] == [{"token": "é", "logprob": -1.0, "bytes": [195, 169], "top_logprobs": []}]


@pytest.mark.parametrize(
    "logprobs", [None, [], {"content": None}, {"content": []}, _logprobs("x", None, {}), 1, {"content": 3}]
)
def test_missing_or_malformed_logprobs_are_ignored(logprobs: Any) -> None:
    assert output(chunk(content="Hi", logprobs=logprobs), STOP, options=ResponseOptions(logprobs=True)) == [HI]


# -- whole answers -------------------------------------------------------------------------------------------------------


def _whole(message: Any, **choice: Any) -> dict[str, Any]:
    return as_chunk(
        {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}
    )


def test_a_whole_answer_of_tgi_may_have_object_arguments_and_no_content() -> None:
    call = {"id": "0", "type": "function", "function": {"name": "f", "description": None, "arguments": {"a": 1}}}
    assert output(_whole({"role": "assistant", "tool_calls": [call]})) == [("f", '{"a":1}')]


def test_null_members_of_a_whole_answer_are_ignored() -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "tool_calls": None,
        "refusal": None,
        "reasoning": None,
        "function_call": None,
    }
    assert output(_whole(message, logprobs=None)) == [HI]


def test_the_second_complete_call_with_the_same_id_gets_another_id() -> None:
    call = {"id": "0", "function": {"name": "f", "arguments": "{}"}}
    response = respond(_whole({"tool_calls": [call, call]}))
    assert _call_ids(response) == ["0", "call_1"]


@pytest.mark.parametrize(
    "completion",
    [
        {"choices": {"a": 1}},
        {"choices": ["x"]},
        {"choices": [{"message": "x"}]},
        {"choices": [{"message": {"tool_calls": [1]}}]},
    ],
)
def test_a_malformed_whole_answer_is_an_upstream_error(completion: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError, match="malformed"):
        as_chunk(completion)


@pytest.mark.parametrize("nothing", [{}, {"choices": None}, {"choices": []}, {"choices": [{"message": None}]}])
def test_an_empty_whole_answer_gives_no_output(nothing: dict[str, Any]) -> None:
    assert output(as_chunk(nothing)) == []


def test_completed_at_is_never_earlier_than_created_at() -> None:
    assembling = assembler()
    assembling.start()
    assembling.feed(chunk(content="Hi", finish_reason="stop"))
    assembling.end_turn()
    assembling.conclude(1_600_000_000)  # the clock was set back
    assert assembling.response["completed_at"] == assembling.response["created_at"] == 1_700_000_000
