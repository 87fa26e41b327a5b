"""What single servers were seen to do, each by name. `output` tells what the response says, after all laws were checked."""

from __future__ import annotations

from typing import Any

import pytest

from responses_mw.errors import UpstreamError
from responses_mw.protocol.chat.chunks import as_chunk
from responses_mw.protocol.response.builder import ResponseOptions
from tests.protocol.runs import assembler, chunk, fragment, output, respond, run
from tests.support.replay import check, decoded

STOP = chunk(finish_reason="stop")
HI = [("output_text", "Hi")]


def calls(*fragments: Any, **choice: Any) -> dict[str, Any]:
    return chunk(tool_calls=list(fragments), **choice)


# -- text and reasoning --------------------------------------------------------------------------------------------------


def test_reasoning_under_both_names_is_told_once() -> None:
    assert output(chunk(reasoning="Hm", reasoning_content="Hm"), STOP) == [("reasoning", "Hm")]


def test_reasoning_content_that_is_null_or_empty_is_none() -> None:
    assert output(chunk(reasoning_content=None, content="Hi"), chunk(reasoning=None, content=""), STOP) == [HI]


def test_content_that_is_empty_beside_reasoning_opens_no_message() -> None:
    assert output(chunk(role="assistant", reasoning="Hm", content=""), STOP) == [("reasoning", "Hm")]


def test_white_space_between_reasoning_and_a_call_makes_no_message() -> None:
    chunks = [chunk(reasoning="Hm"), chunk(content="\n\n"), calls(fragment(name="f", arguments="{}")), STOP]
    assert output(*chunks) == [("reasoning", "Hm"), ("f", "{}")]


def test_white_space_before_text_belongs_to_it() -> None:
    assert output(chunk(content="\n"), chunk(content="\n"), chunk(content="Hi"), STOP) == [[("output_text", "\n\nHi")]]


def test_an_answer_of_no_tokens_is_an_empty_message() -> None:
    assert output(chunk(role="assistant", content=""), STOP) == [[("output_text", "")]]


def test_an_answer_that_is_all_reasoning_gets_no_message() -> None:
    """deepseek_r1's parser with thinking off puts the whole answer there."""
    assert output(chunk(reasoning="All of it", content=None), STOP) == [("reasoning", "All of it")]


def test_a_refusal_is_a_part_of_its_own_kind() -> None:
    assert output(chunk(refusal="I can"), chunk(refusal="not"), STOP) == [[("refusal", "I cannot")]]


def test_text_and_refusal_share_a_message() -> None:
    assert output(chunk(content="Hi"), chunk(refusal="no"), STOP) == [[("output_text", "Hi"), ("refusal", "no")]]


def test_a_chunk_with_everything_is_told_in_order() -> None:
    everything = chunk(
        reasoning="Hm", content="Hi", tool_calls=[fragment(name="f", arguments="{}")], finish_reason="tool_calls"
    )
    assert output(everything) == [("reasoning", "Hm"), HI, ("f", "{}")]


def test_content_as_a_list_of_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "reference"}, {"type": "text", "text": "i"}]
    assert output(chunk(content=parts), STOP) == [HI]
    assert output(chunk(content=[{"type": "reference"}]), STOP) == [[("output_text", "")]]


@pytest.mark.parametrize("empty", [{"delta": None}, {}, {"delta": {}}, {"delta": {"content": None}}, {"message": "x"}])
def test_a_choice_without_delta_says_nothing(empty: dict[str, Any]) -> None:
    assert output(chunk(content="Hi"), {"choices": [{"index": 0, **empty}]}, STOP) == [HI]


@pytest.mark.parametrize(
    "empty", [{}, {"choices": None}, {"choices": []}, {"choices": [], "sglext": {"x": 1}}, {"prompt_progress": {}}]
)
def test_a_chunk_without_choices_says_nothing(empty: dict[str, Any]) -> None:
    assert output(empty, chunk(content="Hi"), STOP) == [HI]


def test_choices_of_another_index_are_not_ours() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "Hi"}}]}
    assert output(other, STOP) == [HI]


def test_more_choices_after_the_finish_reason_change_no_end() -> None:
    """Old watsonx."""
    assert output(chunk(content="Hi", finish_reason="stop"), chunk(content=""), {"choices": [{"delta": {}}]}) == [HI]


@pytest.mark.parametrize(
    ("told", "shown"), [("priority", "priority"), ("on_demand", "default"), (None, "default"), ({}, "default")]
)
def test_the_tier_that_served_is_told_where_it_is_one_of_the_references(told: Any, shown: str) -> None:
    assert respond({**chunk(content="Hi"), "service_tier": told}, STOP)["service_tier"] == shown


def test_unknown_members_of_chunks_are_left_alone() -> None:
    extra = chunk(
        content="Hi", obfuscation="x", content_filter_results={}, token_ids=[1], stop_reason=None, reasoning_details=[]
    )
    assert output({**extra, "time_info": {}, "system_fingerprint": "fp_ollama", "id": ""}, STOP) == [HI]


@pytest.mark.parametrize("tag", ["think", "reasoning"])
def test_inline_reasoning_is_told_apart_where_the_setting_names_its_tag(tag: str) -> None:
    text = f"<{tag}>Hm</{tag}>Hi"
    said = [("reasoning", "Hm"), HI]
    assert output(*[chunk(content=letter) for letter in text], STOP, options=ResponseOptions(think_tag=tag)) == said
    assert output(chunk(content=text), STOP) == [[("output_text", text)]]


def test_half_a_tag_at_the_end_is_text() -> None:
    assert output(chunk(content="Hi <thi"), STOP, options=ResponseOptions(think_tag="think")) == [[("output_text", "Hi <thi")]]


# -- calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool_calls", [None, [], {}])
def test_tool_calls_that_are_empty_are_none(tool_calls: Any) -> None:
    assert output(chunk(content="Hi", tool_calls=tool_calls), STOP) == [HI]


def test_a_call_with_finish_reason_stop_is_a_call() -> None:
    assert output(calls(fragment(name="f", arguments="{}", id="a"), finish_reason="stop")) == [("f", "{}")]


def test_a_named_call_whose_last_fragment_finishes() -> None:
    chunks = [
        calls(fragment(name="f", id="a")),
        calls(fragment(arguments='{"a"')),
        calls(fragment(arguments=":1}"), finish_reason="stop"),
    ]
    assert output(*chunks) == [("f", '{"a":1}')]


def test_no_arguments_at_all_are_an_empty_object_and_one_delta() -> None:
    nothing: tuple[Any, ...] = (None, "", {})
    for arguments in nothing:
        events = decoded(run([calls(fragment(name="f", id="a", arguments=arguments)), STOP]))
        assert [event["delta"] for event in events if event["type"].endswith("arguments.delta")] == ["{}"]


def test_arguments_as_an_object_become_json() -> None:
    assert output(calls(fragment(name="f", arguments={"a": [1, None]})), STOP) == [("f", '{"a":[1,null]}')]


def test_a_function_that_is_null_at_first_is_waited_for() -> None:
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


def test_a_name_that_is_repeated_is_one_name() -> None:
    chunks = [calls(fragment(name="f", id="a", arguments='{"a"')), calls(fragment(name="f", id="a", arguments=":1}")), STOP]
    assert output(*chunks) == [("f", '{"a":1}')]


def test_a_name_that_is_repeated_without_ids_is_one_name() -> None:
    chunks = [calls(fragment(name="f", arguments='{"a"')), calls(fragment(name="f", arguments=":1}")), STOP]
    assert output(*chunks) == [("f", '{"a":1}')]


def test_fragments_of_one_index_in_one_delta_are_one_call() -> None:
    chunks = [calls(fragment(name="f", id="a"), fragment(arguments="{"), fragment(arguments="}")), STOP]
    assert output(*chunks) == [("f", "{}")]


def test_fragments_without_an_index_go_by_their_ids_or_to_the_last_call() -> None:
    one = [{"id": "a", "function": {"name": "f", "arguments": "{"}}, {"id": "b", "function": {"name": "g", "arguments": "{"}}]
    two = [{"id": "a", "function": {"arguments": "}"}}, {"function": {"arguments": "}"}}]
    assert output(calls(*one), calls(two[0]), calls(two[1]), STOP) == [("f", "{}"), ("g", "{}")]


def test_calls_that_all_have_index_zero_are_told_apart_by_their_ids() -> None:
    chunks = [calls(fragment(name="f", id=call_id, arguments="{}")) for call_id in "ab"]
    assert output(*chunks, STOP) == [("f", "{}"), ("f", "{}")]


def test_calls_that_all_have_index_zero_and_no_ids_are_told_apart_when_they_are_whole() -> None:
    chunks = [calls(fragment(name="f", arguments='{"a":1}')), calls(fragment(name="f", arguments='{"a":2}'))]
    assert output(*chunks, STOP) == [("f", '{"a":1}'), ("f", '{"a":2}')]


def test_calls_without_index_id_or_arguments_are_told_apart_by_their_names() -> None:
    chunks = [calls({"function": {"name": "f", "arguments": {}}}), calls({"function": {"name": "g", "arguments": '{"a":1}'}})]
    assert output(*chunks, STOP) == [("f", "{}"), ("g", '{"a":1}')]


def test_a_call_without_a_name_is_the_upstreams_fault() -> None:
    response = respond(calls(fragment(arguments="{}", id="a")), STOP)
    assert response["status"] == "failed"
    assert "naming" in response["error"]["message"]


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|im_end|>", "", "</s>"])
def test_tgis_grammar_gives_name_and_arguments(end: str) -> None:
    text = '{"function": {"_name": "get_weather", "city": "Par}is"}}' + end
    chunks = [chunk(tool_calls={"index": 0, "id": "", "function": {"name": None, "arguments": letter}}) for letter in text]
    assert output(*chunks, chunk(finish_reason="eos_token")) == [("get_weather", '{"city":"Par}is"}')]


def _call_ids(response: dict[str, Any]) -> list[str]:
    return [item["call_id"] for item in response["output"]]


def test_the_upstreams_call_id_is_kept() -> None:
    assert _call_ids(respond(calls(fragment(name="f", id="functions.f:0")), STOP)) == ["functions.f:0"]


@pytest.mark.parametrize("given", [None, "", 7, "x" * 65])
def test_a_call_id_that_is_missing_or_unusable_is_minted(given: Any) -> None:
    assert _call_ids(respond(calls(fragment(name="f", id=given)), STOP)) == ["call_0"]


def test_a_call_id_that_the_chain_has_used_is_minted_anew() -> None:
    options = ResponseOptions(used_call_ids=frozenset({"0"}))
    assert _call_ids(respond(calls(fragment(name="f", id="0")), STOP, options=options)) == ["call_0"]
    two = [calls(fragment(n, name="f", id="0", arguments="{}")) for n in range(2)]
    assert _call_ids(respond(*two, STOP)) == ["0", "call_1"]


def test_calls_that_the_request_does_not_allow_are_suppressed() -> None:
    chunks = [calls(fragment(0, name="f", arguments="{}")), calls(fragment(1, name="g", arguments="{}"))]
    tools = [{"type": "function", "name": name, "parameters": None} for name in ("f", "g")]
    only = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert output(*chunks, STOP, tools=tools, tool_choice=only) == [("g", "{}")]
    assert output(*chunks, STOP, tools=tools, tool_choice="none") == [[("output_text", "")]]


def test_of_parallel_calls_only_the_first_is_told_where_the_request_wants_one() -> None:
    chunks = [calls(fragment(n, name="f", arguments=f'{{"n":{n}}}')) for n in range(3)]
    assert output(*chunks, STOP, options=ResponseOptions(single_call=True)) == [("f", '{"n":0}')]


def test_malformed_arguments_are_told_as_they_are() -> None:
    assert output(calls(fragment(name="f", arguments="{not json")), chunk(finish_reason="tool_calls")) == [("f", "{not json")]


def test_calls_behind_malformed_arguments_still_come() -> None:
    chunks = [
        calls(fragment(0, name="f", arguments="{not")),
        calls(fragment(1, name="g", arguments="{}")),
        calls(fragment(0, arguments="!")),
    ]
    assert output(*chunks, STOP) == [("f", "{not!"), ("g", "{}")]


# -- ends ----------------------------------------------------------------------------------------------------------------

ENDS = ["stop", "tool_calls", "function_call", "stop_sequence", "eos_token", "repetition"]


@pytest.mark.parametrize("reason", ENDS)
def test_a_finish_reason_completes_the_response(reason: str) -> None:
    response = respond(chunk(content="Hi"), chunk(finish_reason=reason))
    assert (response["status"], response["incomplete_details"], response["completed_at"]) == ("completed", None, 1_700_000_001)


@pytest.mark.parametrize(("reason", "why"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_is_incomplete(reason: str, why: str) -> None:
    response = respond(chunk(content="H"), chunk(finish_reason=reason))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": why})
    assert response["output"][0]["status"] == "incomplete"


def test_a_call_that_was_cut_is_incomplete_and_not_asked_for() -> None:
    assembling = assembler()
    events = assembling.start() + assembling.feed(calls(fragment(name="f", arguments='{"a')))
    events += assembling.feed(chunk(finish_reason="length")) + assembling.end_turn()
    assembling.conclude(1)
    response = check(events + assembling.terminal())
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_of_two_interleaved_calls_that_were_cut_none_is_asked_for() -> None:
    chunks = [
        calls(fragment(0, name="f", arguments='{"a')),
        calls(fragment(1, name="g", arguments='{"b')),
        chunk(finish_reason="length"),
    ]
    response = respond(*chunks)
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_a_cut_within_the_name_leaves_no_call() -> None:
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
def test_an_end_is_clean_after_a_finish_reason_or_usage_at_the_end(chunks: list[dict[str, Any]], clean: bool) -> None:
    assembling = assembler()
    for one in chunks:
        assembling.feed(one)
    assert assembling.ended is clean


def test_a_turn_does_not_end_with_the_end_of_the_turn_before() -> None:
    assembling = assembler()
    assembling.feed(calls(fragment(name="f", arguments="{}"), finish_reason="tool_calls"))
    assembling.end_turn()
    assert (assembling.has_client_calls, assembling.finish_reason) == (True, "tool_calls")
    assert not assembling.ended
    assembling.feed(chunk(content="Hi"))
    assert not assembling.ended
    assert (assembling.has_client_calls, assembling.finish_reason) == (False, None)


def test_a_turn_without_a_single_chunk_asks_for_no_calls() -> None:
    assembling = assembler()
    assembling.feed(calls(fragment(name="f", arguments="{}"), finish_reason="tool_calls"))
    assembling.end_turn()
    assembling.end_turn()
    assert (assembling.has_client_calls, assembling.finish_reason) == (False, None)


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_a_run_begins_as_created_and_then_waits_or_works(status: str) -> None:
    assembling = assembler()
    events = decoded(assembling.start(queued=status == "queued"))
    assert [event["type"] for event in events] == ["response.created", f"response.{status}"]
    assert {event["response"]["status"] for event in events} == {status}


def test_a_cancelled_run_ends_in_failed_with_its_own_status() -> None:
    assembling = assembler()
    events = assembling.start()
    assembling.response["status"] = "cancelled"
    response = check(events + assembling.terminal())
    assert response["status"] == "cancelled"


def test_what_was_streamed_of_an_open_call_stays_when_the_run_fails() -> None:
    response = respond(calls(fragment(name="f", id="a", arguments='{"a')), calls("no fragment"))
    assert response["status"] == "failed"
    assert (response["output"][0]["arguments"], response["output"][0]["status"]) == ('{"a', "incomplete")


# -- usage and logprobs --------------------------------------------------------------------------------------------------

DETAILS = {"cached_tokens": 0, "cache_write_tokens": 0}


def _usage(*chunks: dict[str, Any]) -> Any:
    return respond(*chunks)["usage"]


def test_usage_that_never_comes_is_null() -> None:
    assert _usage(chunk(content="Hi"), STOP) is None


def test_usage_on_every_chunk_is_cumulative() -> None:
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
def test_usage_has_all_its_details_in_whatever_shape_it_came(usage: dict[str, Any], expected: Any) -> None:
    told = _usage(chunk(content="Hi"), STOP, {"choices": [], "usage": usage})
    if expected is not None:
        cached, reasoning = told["input_tokens_details"]["cached_tokens"], told["output_tokens_details"]["reasoning_tokens"]
        told = (told["input_tokens"], cached, told["output_tokens"], reasoning, told["total_tokens"])
    assert told == expected


def _logprobs(*entries: Any) -> dict[str, Any]:
    return {"content": list(entries), "refusal": None}


def test_a_text_has_no_more_log_probabilities_than_it_may_have_tokens() -> None:
    token = {"token": "", "logprob": -1, "top_logprobs": [{}] * 1000}
    chunks = [chunk(content="Hi", logprobs=_logprobs(*[token] * 1000)), STOP]
    part = respond(*chunks, options=ResponseOptions(logprobs=True))["output"][0]["content"][0]
    assert (len(part["logprobs"]), len(part["logprobs"][0]["top_logprobs"])) == (102, 20)


def test_logprobs_come_where_they_were_asked_for_and_nowhere_else() -> None:
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
def test_logprobs_of_the_visible_text_are_kept_where_reasoning_is_within_it(size: int) -> None:
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
def test_logprobs_are_those_of_the_text_where_a_chunk_has_more(
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
    """vLLM reports the token that ends the answer, too, unless it streams."""
    entries = [{"token": token, "logprob": -1.0, "bytes": [300]} for token in ("Hi", "<|im_end|>")]
    [item] = respond(_whole({"content": "Hi"}, logprobs=_logprobs(*entries)), options=ResponseOptions(logprobs=True))["output"]
    assert [token["token"] for token in item["content"][0]["logprobs"]] == ["Hi"]


def test_logprobs_without_bytes_get_them() -> None:
    """TGI leaves them out."""
    entry = {"token": "é", "logprob": -1.0, "top_logprobs": None}
    part = respond(chunk(content="é", logprobs=_logprobs(entry)), STOP, options=ResponseOptions(logprobs=True))["output"][0][
        "content"
    ][0]
    assert part["logprobs"] == [{"token": "é", "logprob": -1.0, "bytes": [195, 169], "top_logprobs": []}]


@pytest.mark.parametrize(
    "logprobs", [None, [], {"content": None}, {"content": []}, _logprobs("x", None, {}), 1, {"content": 3}]
)
def test_logprobs_that_are_none_or_make_no_sense_do_no_harm(logprobs: Any) -> None:
    assert output(chunk(content="Hi", logprobs=logprobs), STOP, options=ResponseOptions(logprobs=True)) == [HI]


# -- whole answers -------------------------------------------------------------------------------------------------------


def _whole(message: Any, **choice: Any) -> dict[str, Any]:
    return as_chunk(
        {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}
    )


def test_a_whole_answer_of_tgi_has_its_arguments_as_an_object_and_no_content() -> None:
    call = {"id": "0", "type": "function", "function": {"name": "f", "description": None, "arguments": {"a": 1}}}
    assert output(_whole({"role": "assistant", "tool_calls": [call]})) == [("f", '{"a":1}')]


def test_a_whole_answer_with_null_members_is_its_text() -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "tool_calls": None,
        "refusal": None,
        "reasoning": None,
        "function_call": None,
    }
    assert output(_whole(message, logprobs=None)) == [HI]


def test_whole_calls_with_the_same_id_are_told_apart_by_their_place() -> None:
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
def test_a_whole_answer_that_makes_no_sense_is_the_upstreams_fault(completion: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError, match="malformed"):
        as_chunk(completion)


@pytest.mark.parametrize("nothing", [{}, {"choices": None}, {"choices": []}, {"choices": [{"message": None}]}])
def test_a_whole_answer_with_nothing_in_it_says_nothing(nothing: dict[str, Any]) -> None:
    assert output(as_chunk(nothing)) == []
