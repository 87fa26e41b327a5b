"""An upstream's own Responses events become ours: our ids, places and numbers, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import UpstreamError
from responses_mw.protocol import sse
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.response import document
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.response.events import Event
from responses_mw.protocol.response.passthrough import ResponsesPassthrough
from responses_mw.protocol.response.replay import LogReplay
from responses_mw.upstream.backends import to_responses
from tests.protocol.runs import CountedIds, chunk, fragment
from tests.protocol.runs import run as run_chat
from tests.support import oracle
from tests.support.replay import check, decoded

Events = list[dict[str, Any]]


def relayed(**request: Any) -> ResponsesPassthrough:
    parsed = parse({"model": "m", "input": "Hi", **request})
    created = document.create(parsed, response_id="resp_1", model="m", created_at=1_700_000_000)
    options = ResponseOptions(
        summary=parsed.wants_summary,
        seal="sealed {}".format if "reasoning.encrypted_content" in parsed.include else None,
    )
    return ResponsesPassthrough(created, CountedIds(), lambda tools: [{**tool, "echoed": True} for tool in tools], options)


def run(events: Events, **request: Any) -> list[Event]:
    """All events of a response, as the runner makes them."""
    relaying = relayed(**request)
    made = relaying.start()
    try:
        for event in events:
            made += relaying.feed(event)
        made += relaying.end_turn()
        relaying.conclude(1_700_000_001)
    except UpstreamError as error:
        relaying.fail("server_error", error.message)
    return made + relaying.terminal()


def ended(events: Events, **request: Any) -> dict[str, Any]:
    """The document that the response ends with."""
    return dict(decoded(run(events, **request))[-1]["response"])


def numbered(*events: dict[str, Any]) -> Events:
    return [{**event, "sequence_number": 40 + 2 * number} for number, event in enumerate(events)]


def message(item_id: str = "msg_theirs", text: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [part],
    }


def added(item: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def done(item: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def delta(text: str, item_id: str = "msg_theirs", index: int = 0, **members: Any) -> dict[str, Any]:
    place = {"item_id": item_id, "output_index": index, "content_index": 0}
    return {"type": "response.output_text.delta", **place, "delta": text, "logprobs": [], **members}


def completed(*output: dict[str, Any], **members: Any) -> dict[str, Any]:
    response = {"id": "resp_theirs", "object": "response", "status": "completed", "output": [*output], **members}
    return {"type": f"response.{members.get('status', 'completed')}", "response": response}


CREATED = {"type": "response.created", "response": {"id": "resp_theirs", "output": []}}
NEW_PART = {
    "type": "response.content_part.added",
    "item_id": "msg_theirs",
    "output_index": 0,
    "content_index": 0,
    "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}
TEXT_DONE = {**NEW_PART, "type": "response.output_text.done", "text": "Hello", "logprobs": []}
HELLO = numbered(
    CREATED,
    {**CREATED, "type": "response.in_progress"},
    added(message()),
    NEW_PART,
    delta("Hel"),
    delta("lo"),
    TEXT_DONE,
    {**NEW_PART, "type": "response.content_part.done", "part": message(text="Hello")["content"][0]},
    done(message(text="Hello")),
    completed(message(text="Hello"), usage={"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}),
)


def test_a_stream_passes_with_our_ids_and_numbers() -> None:
    events = run([{name: value for name, value in event.items() if name != "part" or value} for event in HELLO])
    assert b"theirs" not in sse.encode(events)
    response = decoded(events)[-1]["response"]
    assert [event["sequence_number"] for event in decoded(events)] == list(range(len(events)))
    assert response["id"] == "resp_1"
    assert response["output"] == [{**message(text="Hello"), "id": "msg_0"}]
    assert response["output_text"] == "Hello"
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


@given(
    st.lists(st.text(max_size=3), min_size=1, max_size=4), st.booleans(), st.sampled_from(["stop", "length", "content_filter"])
)
def test_what_we_make_ourselves_keeps_all_laws_when_it_is_relayed(texts: list[str], calls: bool, reason: str) -> None:
    """Our own events are an upstream's: relayed they are the same, but for ids and what is told of the model."""
    call = fragment(0, '{"a": 1}', id="call_1", name="f")
    chunks = [*(chunk(content=text) for text in texts), *([chunk(tool_calls=[call])] if calls else [])]
    first = run_chat([chunk(reasoning="Hm."), *chunks, chunk(finish_reason=reason)])
    second = run(decoded(first))
    check(second)
    assert [event.type for event in second] == [event.type for event in first]
    before, after = decoded(first)[-1]["response"], decoded(second)[-1]["response"]
    assert {**after, "completed_at": None} == {**before, "completed_at": None}


def test_events_and_members_that_are_unknown_pass_untouched() -> None:
    strange = {"type": "vendor.thought.bubble", "item_id": "xyz_9", "shape": {"id": "elsewhere", "points": [1, None]}}
    odd = {"id": "xyz_9", "type": "vendor_item", "payload": {"deep": [{"own": True}]}, "nothing": None}
    events = run(numbered(added(odd), strange, {**done(odd), "extra": 1}, completed(odd, vendor={"cost": 0.5})))
    ours = {**odd, "id": "xyz_0"}
    assert decoded(events)[3] == {**strange, "item_id": "xyz_0", "sequence_number": 3}
    assert decoded(events)[4] == {**done(ours), "extra": 1, "sequence_number": 4}
    assert decoded(events)[5]["response"]["output"] == [ours]
    assert decoded(events)[5]["response"]["vendor"] == {"cost": 0.5}


def test_an_item_keeps_its_id_though_the_upstream_changes_it() -> None:
    """As vLLM's do between its events and its document."""
    changed = done(message("msg_other", "Hello"))
    events = run(numbered(added(message()), NEW_PART, delta("Hello", "msg_third"), changed, completed(message("m4", "Hello"))))
    assert [event.get("item_id") for event in decoded(events)[3:5]] == ["msg_0", "msg_0"]
    [item] = [event["item"] for event in decoded(events) if event["type"] == "response.output_item.done"]
    assert item["id"] == decoded(events)[-1]["response"]["output"][0]["id"] == "msg_0"


LLAMA_CPP: Events = [
    CREATED,
    {**CREATED, "type": "response.in_progress"},
    {
        "type": "response.output_item.added",
        "item": {"id": "rs_1", "type": "reasoning", "summary": [], "content": [], "status": "in_progress"},
    },
    {"type": "response.reasoning_text.delta", "item_id": "rs_1", "delta": "Let me"},
    {"type": "response.reasoning_text.delta", "item_id": "rs_1", "delta": " see."},
    {"type": "response.output_item.added", "item": message("msg_1")},
    {"type": "response.content_part.added", "item_id": "msg_1", "part": {"type": "output_text", "text": ""}},
    {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "Hel"},
    {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "lo"},
    {
        "type": "response.output_item.added",
        "item": {"type": "function_call", "call_id": "fc_1", "name": "f", "arguments": "", "status": "in_progress"},
    },
    {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "delta": '{"a":'},
    {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "delta": "1}"},
    {"type": "response.output_item.done", "item": {"id": "rs_1", "type": "reasoning", "summary": [], "content": []}},
    {"type": "response.output_text.done", "item_id": "msg_1", "text": "Hello"},
    {"type": "response.content_part.done", "item_id": "msg_1", "part": {"type": "output_text", "text": "Hello"}},
    {"type": "response.output_item.done", "item": message("msg_1", "Hello")},
    {
        "type": "response.output_item.done",
        "item": {"type": "function_call", "call_id": "fc_1", "name": "f", "arguments": '{"a":1}', "status": "completed"},
    },
    completed(
        {"id": "rs_1", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Let me see."}]},
        message("msg_1", "Hello"),
        {"type": "function_call", "call_id": "fc_1", "name": "f", "arguments": '{"a":1}', "status": "completed"},
    ),
]
"""Items that end only at the end, and events without indices."""


def test_what_a_server_without_indices_leaves_out_is_filled_in() -> None:
    events = run(LLAMA_CPP)
    check(events)
    oracle.check(sse.encode(events) + sse.DONE_FRAME)
    output = decoded(events)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert [output[0]["content"][0]["text"], output[1]["content"][0]["text"], output[2]["arguments"]] == [
        "Let me see.",
        "Hello",
        '{"a":1}',
    ]


@pytest.mark.parametrize("left_out", ["response.content_part.added", "response.output_text.done", "response.content_part.done"])
def test_events_that_begin_and_end_a_part_are_filled_in(left_out: str) -> None:
    events = run([event for event in HELLO if event["type"] != left_out])
    check(events)
    assert [event.type for event in events] == [event.type for event in run(HELLO)]


@pytest.mark.parametrize("index", [-1, 7, "0", [], None])
@pytest.mark.parametrize("kind", [NEW_PART["type"], "response.output_text.delta", "response.content_part.done"])
def test_an_index_that_names_no_part_does_no_harm(kind: str, index: Any) -> None:
    odd = {**NEW_PART, "type": kind, "content_index": index, "delta": "x"}
    response = ended([CREATED, added(message()), odd, NEW_PART, delta("Hello"), done(message(text="Hello")), completed()])
    assert (response["status"], response["output_text"]) == ("completed", "Hello")


def test_a_message_without_content_does_no_harm() -> None:
    response = ended([completed({**message(text="Hello"), "content": None})])
    assert (response["status"], response["output"][0]["content"], response["output_text"]) == ("completed", None, "")


@pytest.mark.parametrize(
    "events",
    [
        [completed({**message(text="Hello"), "content": "Hello"})],
        [completed({**message(text="Hello"), "content": ["Hello"]})],
        [added({**message(), "content": 5}), NEW_PART],
        [added({"id": "msg_theirs", "type": "reasoning", "summary": [], "content": 5}), NEW_PART],
    ],
)
def test_content_that_is_no_list_of_parts_is_the_upstreams_fault(events: Events) -> None:
    response = ended(events)
    assert response["status"] == "failed"
    assert "malformed" in response["error"]["message"]


@pytest.mark.parametrize("action", [None, [1], "search", 5])
def test_a_search_whose_action_is_no_object_does_no_harm(action: Any) -> None:
    search = {"id": "ws_theirs", "type": "web_search_call", "status": "completed", "action": action}
    response = ended(numbered(added(search), done(search), completed(search)))
    assert (response["status"], response["output"]) == ("completed", [{**search, "id": "ws_0"}])


@pytest.mark.parametrize("content", ["Hello", {"0": {}}, ["Hello"], [], 5])
@pytest.mark.parametrize("kind", [NEW_PART["type"], "response.output_text.delta", "response.refusal.delta"])
def test_nothing_more_passes_of_an_item_that_has_ended(kind: str, content: Any) -> None:
    over = {"id": "rs_theirs", "type": "reasoning", "summary": [], "content": content}
    late = [{**NEW_PART, "type": kind, "delta": "x"}, {**NEW_PART, "type": "response.content_part.done"}, done(over)]
    events = run(numbered(done(over), *late, completed(over)))
    assert decoded(events)[-1]["response"]["output"] == [{**over, "id": "rs_0"}]
    assert [event.type for event in events[2:]] == [
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("part", [{}, {"text": "Hello"}, {"type": "output_text"}, {"type": "output_text", "text": 5}])
def test_a_part_without_a_type_or_a_text_does_no_harm(part: dict[str, Any]) -> None:
    response = ended([completed({**message(text="Hello"), "content": [part]})])
    assert (response["status"], response["output_text"]) == ("completed", "")


@pytest.mark.parametrize("content", [[None], ["x"], "x", 5, {"a": 1}])
@pytest.mark.parametrize("index", [0, 7])
@pytest.mark.parametrize("end", [[], [completed()]])
def test_a_text_that_grows_in_malformed_content_does_no_harm(content: Any, index: int, end: Events) -> None:
    thought = {"id": "rs_theirs", "type": "reasoning", "summary": [], "content": content}
    grown = delta("Hm", "rs_theirs", type="response.refusal.delta", content_index=index)
    events = run(numbered(added(thought), grown, *end))
    status = "completed" if end and isinstance(content, list) else "failed"
    assert decoded(events)[-1]["response"]["status"] == status
    LogReplay().read(sse.encode(events))  # a job's log, from which another worker reads the output


def test_a_text_that_has_ended_is_not_ended_again() -> None:
    text_done = {**NEW_PART, "type": "response.output_text.done", "text": "Hello", "logprobs": []}
    part_done = {**NEW_PART, "type": "response.content_part.done", "part": message(text="Hello")["content"][0]}
    late = [text_done, delta("!"), part_done, delta("!"), part_done, done(message(text="Hello"))]
    events = run(numbered(CREATED, added(message()), NEW_PART, delta("Hello"), *late, completed()))
    assert [event.type for event in events].count("response.output_text.done") == 1


def test_a_part_of_a_type_that_its_list_does_not_hold_does_no_harm() -> None:
    odd = {**NEW_PART, "type": "response.reasoning_summary_part.added"}
    response = ended([CREATED, added(message()), NEW_PART, delta("Hello"), odd, odd, done(message(text="Hello")), completed()])
    assert (response["status"], response["output_text"]) == ("completed", "Hello")


def test_a_call_has_no_parts_for_an_index() -> None:
    call = {"id": "fc_theirs", "type": "function_call", "arguments": "", "name": "f", "call_id": "c"}
    grown = {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": "{}", "_index": []}
    output = ended([CREATED, added(call), grown, completed({**call, "arguments": "{}"})])["output"]
    assert output == [{**call, "id": "fc_0", "arguments": "{}"}]


def test_log_probabilities_that_are_no_list_do_no_harm() -> None:
    said = [CREATED, added(message()), NEW_PART, {**delta("Hello"), "logprobs": 5}]
    response = ended([*said, completed()])
    assert (response["status"], response["output_text"]) == ("completed", "Hello")


def test_a_part_that_begins_after_the_end_of_its_item_does_no_harm() -> None:
    over = {**message(text="Hello"), "content": []}
    response = ended([CREATED, added(message()), done(over), NEW_PART, delta("Hello"), done(over), completed()])
    assert (response["status"], response["output"][0]["content"]) == ("completed", [])


def test_ids_that_refer_to_an_item_follow_it_and_call_ids_stay() -> None:
    asked = {"id": "mcpr_theirs", "type": "mcp_approval_request", "name": "f", "server_label": "s", "arguments": "{}"}
    call = {"id": "mcp_theirs", "type": "mcp_call", "approval_request_id": "mcpr_theirs", "call_id": "mcpr_theirs"}
    output = ended(numbered(added(asked), done(asked), added(call, 1), done(call, 1), completed(asked, call)))["output"]
    assert [item["id"] for item in output] == ["mcpr_0", "mcp_1"]
    assert (output[1]["approval_request_id"], output[1]["call_id"]) == ("mcpr_0", "mcpr_theirs")


def test_the_members_that_are_ours_stay_ours() -> None:
    theirs = completed(
        created_at=1,
        metadata={"their": "own"},
        store=False,
        background=True,
        model="/models/real-name",
        previous_response_id="resp_other",
        conversation={"id": "conv_other"},
        service_tier="priority",
        temperature=0.6,
        truncation=None,
        tools=[{"type": "mcp", "server_label": "s"}],
    )
    response = ended([theirs], metadata={"a": "b"})
    assert (response["created_at"], response["metadata"], response["store"]) == (1_700_000_000, {"a": "b"}, True)
    assert (response["model"], response["background"], response["conversation"]) == ("m", False, None)
    assert response["previous_response_id"] is None
    assert (response["service_tier"], response["temperature"], response["truncation"]) == ("priority", 0.6, "disabled")
    assert response["tools"] == [{"type": "mcp", "server_label": "s", "echoed": True}]


def test_a_whole_answer_is_streamed_with_its_texts_as_deltas() -> None:
    call = {"id": "fc_theirs", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}
    said = [{"type": "reasoning_text", "text": "Hm"}]
    thought = {"id": "rs_theirs", "type": "reasoning", "summary": [], "content": said, "status": "completed"}
    events = run([completed(thought, message(text="Hello"), call)])
    assert check(events)["output_text"] == "Hello"
    deltas = [(event.type, event.data["delta"]) for event in events if event.type.endswith(".delta")]
    assert deltas == [
        ("response.reasoning_text.delta", "Hm"),
        ("response.output_text.delta", "Hello"),
        ("response.function_call_arguments.delta", "{}"),
    ]
    assert {event.data["item"]["status"] for event in events if event.type.endswith("item.added")} == {"in_progress"}


@pytest.mark.parametrize("between", [[], [TEXT_DONE], [NEW_PART, TEXT_DONE]], ids=["item", "text", "part"])
@pytest.mark.parametrize("end", [done(message(text="Hello")), completed(message(text="Hello"))])
def test_a_text_of_which_only_the_end_comes_is_one_delta(between: Events, end: dict[str, Any]) -> None:
    events = run(numbered(added(message()), *between, end, *([] if "response" in end else [completed()])))
    oracle.check(sse.encode(events) + sse.DONE_FRAME)
    assert [event.data["delta"] for event in events if event.type == "response.output_text.delta"] == ["Hello"]
    assert check(events)["output_text"] == "Hello"


ARGUMENTS_DONE = {"type": "response.function_call_arguments.done", "item_id": "fc_theirs", "output_index": 0}


@pytest.mark.parametrize("between", [[], [{**ARGUMENTS_DONE, "name": "f", "arguments": '{"a": 1}'}]], ids=["item", "arguments"])
@pytest.mark.parametrize("is_done", [True, False])
def test_a_call_of_which_only_the_end_comes_has_its_arguments_once(between: Events, is_done: bool) -> None:
    call = {
        "id": "fc_theirs",
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    ends = [done(call)] if is_done else []
    events = decoded(run(numbered(added({**call, "arguments": ""}), *between, *ends, completed(call))))
    shown = [event for event in events if "arguments" in event["type"]]
    assert [event["arguments"] for event in shown if event["type"] == ARGUMENTS_DONE["type"]] == ['{"a": 1}']
    assert [event["delta"] for event in shown if event["type"].endswith(".delta")] == ['{"a": 1}']
    assert events[-1]["response"]["output"] == [{**call, "id": "fc_0"}]


@pytest.mark.parametrize(
    "members",
    [
        {"type": "message", "content": [{"type": ["output_text"], "text": "Hello"}]},
        {"type": "message", "content": [{"type": "summary_text", "text": "Hello"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Hello", "annotations": 5}]},
        {"type": "reasoning", "content": ["Hm"], "summary": 5},
        {"type": "function_call", "arguments": {"a": 1}, "name": 5},
    ],
)
def test_a_malformed_whole_item_is_shown_without_its_texts(members: dict[str, Any]) -> None:
    events = run([completed({"id": "theirs", "status": "completed", **members})])
    assert [event.type for event in events[2:]] == [
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    assert decoded(events)[-1]["response"]["output"][0].items() >= members.items()


def test_an_item_that_only_the_last_event_ends_is_done_before_it() -> None:
    events = run(numbered(added(message()), NEW_PART, delta("Hel"), completed(message("m2", "Hello"))))
    assert decoded(events)[-2]["item"] == {**message(text="Hello"), "id": "msg_0"}
    events = run(numbered(added(message()), NEW_PART, delta("Hel"), completed()))
    assert decoded(events)[-2]["item"]["content"][0]["text"] == "Hel"
    assert decoded(events)[-2]["item"]["status"] == "completed"


def test_a_done_without_an_added_gets_one() -> None:
    events = run(numbered(done(message(text="Hello"), 7), completed()))
    assert {event["output_index"] for event in decoded(events)[2:-1]} == {0}
    assert [event.type for event in events if "item" in event.data] == [
        "response.output_item.added",
        "response.output_item.done",
    ]


def test_items_are_counted_anew_where_the_upstream_cannot_count() -> None:
    first, second = message("m1", "One"), message("m2", "Two")
    stream = numbered(added(first, 1), done(first, 1), added(second, 1), delta("!", "m2", 1), done(second, 1), completed())
    events = decoded(run(stream))
    assert [event["output_index"] for event in events if "output_index" in event] == [0, 0, 1, 1, 1, 1]
    assert [item["content"][0]["text"] for item in events[-1]["response"]["output"]] == ["One", "Two"]


@pytest.mark.parametrize("end", range(2, len(HELLO) - 1))
def test_a_stream_without_an_end_fails_wherever_it_stops(end: int) -> None:
    response = ended(HELLO[:end])
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    if 3 < end < 9:
        text = "".join(event["delta"] for event in HELLO[:end] if event["type"].endswith("text.delta"))
        assert response["output"][0]["status"] == "incomplete"
        assert response["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize("theirs", ["response.reasoning_text", "response.reasoning"])
@pytest.mark.parametrize(
    ("open_reasoning", "ours"), [(False, "response.reasoning_text"), (True, "response.reasoning")], ids=["openai", "open"]
)
def test_the_events_of_reasoning_have_one_name_however_the_upstream_calls_them(
    theirs: str, open_reasoning: bool, ours: str
) -> None:
    item = {"id": "rs_theirs", "type": "reasoning", "summary": [], "status": "in_progress"}
    thought = {**delta("Hm", "rs_theirs"), "type": f"{theirs}.delta"}
    relaying = ResponsesPassthrough(relayed().response, CountedIds(), list, ResponseOptions(open_reasoning=open_reasoning))
    events = relaying.feed(added(item), thought, {**thought, "type": f"{theirs}.done", "text": "Hm"})
    assert [event["type"] for event in decoded(events)][2:] == [f"{ours}.delta", f"{ours}.done"]
    relaying.fail("server_error", "It broke off.")
    assert relaying.response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm"}]


def test_reasoning_whose_parts_were_not_announced_keeps_its_text_when_it_is_cut() -> None:
    """As vLLM streams it."""
    item = {"id": "rs_theirs", "type": "reasoning", "summary": [], "status": "in_progress"}
    thought = {**delta("Hm", "rs_theirs"), "type": "response.reasoning_text.delta"}
    output = ended(numbered(added(item), thought, thought))["output"]
    assert output == [{**item, "id": "rs_0", "status": "incomplete", "content": [{"type": "reasoning_text", "text": "HmHm"}]}]


def test_a_failed_response_tells_why_and_what_it_came_to() -> None:
    error = {"code": "rate_limit_exceeded", "message": "Slow down."}
    usage = {"input_tokens": 3, "output_tokens": 1}
    events = run(numbered(added(message()), NEW_PART, delta("Hel"), completed(status="failed", error=error, usage=usage)))
    response = decoded(events)[-1]["response"]
    assert (events[-1].type, response["error"], response["usage"]["total_tokens"]) == ("response.failed", error, 4)
    assert response["output"][0]["status"] == "incomplete"
    assert "response.output_item.done" not in [event.type for event in events]


@pytest.mark.parametrize(
    ("kind", "status", "expected"),
    [
        ("response.completed", "incomplete", "incomplete"),  # vLLM
        ("response.incomplete", None, "incomplete"),
        ("response.completed", "cancelled", "failed"),
        ("response.completed", "in_progress", "failed"),
    ],
)
def test_the_document_tells_how_the_response_ended(kind: str, status: str | None, expected: str) -> None:
    ending = {**completed(incomplete_details={"reason": "max_output_tokens"}), "type": kind}
    ending["response"]["status"] = status
    response = ended([ending])
    assert response["status"] == expected
    assert (response["error"] is None) == (expected != "failed")
    assert response["completed_at"] is None
    if expected == "incomplete":
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_nothing_passes_after_the_end() -> None:
    assert run([completed(), delta("late"), completed()])[-1].type == "response.completed"
    assert len(run([completed(), delta("late"), completed()])) == 3


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": 3},
        {"type": "response.x\n\ndata: {}"},
        {"type": "response.output_item.added"},
        {"type": "response.output_item.added", "item": []},
        {"type": "response.output_item.done", "item": {"id": "a"}},
        {"type": "response.completed"},
        completed() | {"response": {"output": {}}},
        {**NEW_PART, "part": "text"},
    ],
)
def test_what_makes_no_sense_is_the_upstreams_fault(event: dict[str, Any]) -> None:
    relaying = relayed()
    relaying.feed(added(message()))
    with pytest.raises(UpstreamError):
        relaying.feed(event)


@pytest.mark.parametrize("index", [-1, 99, "0", None, [], {}])
def test_a_place_that_does_not_exist_harms_nothing(index: Any) -> None:
    events = run([added(message()), {**delta("x", "msg_other"), "output_index": index}, completed()])
    assert events[-1].type == "response.completed"


def test_an_event_with_an_unknown_index_belongs_to_the_item_with_its_id_or_to_none() -> None:
    events = decoded(run(numbered(added(message(), 7), delta("x", "msg_other"), delta("y"), completed())))
    shown = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["item_id"], event["output_index"]) for event in shown] == [("y", "msg_0", 0)]


def test_an_event_that_is_nested_too_deep_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = {"a": nested}
    with pytest.raises(UpstreamError, match="deeper"):
        relayed().feed({"type": "response.x", "a": nested})


def test_a_run_that_asks_the_upstream_nothing_is_complete() -> None:
    relaying = relayed()
    relaying.start()
    relaying.conclude(1_700_000_001)
    assert decoded(relaying.terminal())[0]["response"]["status"] == "completed"


# -- the request -------------------------------------------------------------------------------------------------------


def sent(*items: dict[str, Any], **request: Any) -> dict[str, Any]:
    parsed = parse({"model": "m", "input": "Hi", **request})
    return to_responses(parsed, [*items, *parsed.items], model="real")


def test_nothing_is_sent_that_only_we_have() -> None:
    body = sent(metadata={"a": "b"}, previous_response_id="resp_1", background=True, store=True, client_metadata={})
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    assert body == {"model": "real", "input": [user], "store": False}


def test_what_the_caller_set_is_sent() -> None:
    given = {
        "temperature": 0,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": "required",
        "instructions": "Be short.",
        "top_k": 5,
    }
    body = sent(**given, stream=True, stream_options={"include_obfuscation": False, "include_usage": True})
    assert body == {
        **given,
        "model": "real",
        "input": body["input"],
        "store": False,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    }


def test_reasoning_goes_back_sealed_without_an_id_and_open_with_one() -> None:
    sealed = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "x"}
    openly = {"id": "rs_2", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    neither = {"id": "rs_3", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    items = sent(sealed, openly, neither)["input"][:-1]
    assert items == [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, openly]


# -- what a request asks of reasoning, and servers of open models ignore -----------------------------------------------------------

THOUGHT: dict[str, Any] = {
    "id": "rs_theirs",
    "type": "reasoning",
    "summary": [],
    "content": None,
    "encrypted_content": None,
    "status": "in_progress",
}
THOUGHT_DONE = {**THOUGHT, "content": [{"type": "reasoning_text", "text": "Hm."}], "status": "completed"}
_AT = {"item_id": "rs_theirs", "output_index": 0, "content_index": 0}
VLLM_THINKS = numbered(
    CREATED,
    added(THOUGHT),
    {"type": "response.content_part.added", **_AT, "part": {"type": "reasoning_text", "text": ""}},
    {"type": "response.reasoning_text.delta", **_AT, "delta": "H"},
    {"type": "response.reasoning_text.delta", **_AT, "delta": "m."},
    {"type": "response.reasoning_text.done", **_AT, "text": "Hm."},
    {"type": "response.content_part.done", **_AT, "part": {"type": "reasoning_text", "text": "Hm."}},
    done(THOUGHT_DONE),
    completed(THOUGHT_DONE),
)
LLAMACPP_THINKS = [
    CREATED,
    {"type": "response.output_item.added", "item": {**THOUGHT, "content": [], "encrypted_content": ""}},
    {"type": "response.reasoning_text.delta", "item_id": "rs_theirs", "delta": "H"},
    {"type": "response.reasoning_text.delta", "item_id": "rs_theirs", "delta": "m."},
    {"type": "response.output_item.added", "item": message()},
    {"type": "response.output_text.delta", "item_id": "msg_theirs", "delta": "Hi"},
    {"type": "response.output_item.done", "item": {**THOUGHT_DONE, "encrypted_content": ""}},
    {"type": "response.output_item.done", "item": message(text="Hi")},
    completed({**THOUGHT_DONE, "encrypted_content": ""}, message(text="Hi")),
]
WHOLE_THOUGHT = [completed(THOUGHT_DONE)]
SUMMARY: Any = {"reasoning": {"summary": "auto"}}
SEALED: Any = {"include": ["reasoning.encrypted_content"]}


@pytest.mark.parametrize("theirs", [VLLM_THINKS, LLAMACPP_THINKS], ids=["vllm", "llamacpp"])
def test_readable_reasoning_streams_as_the_summary_that_was_asked_for(theirs: Events) -> None:
    events = run(theirs, **SUMMARY)
    oracle.check(sse.encode(events) + sse.DONE_FRAME)
    shown = [event for event in decoded(events) if "summary_index" in event]
    kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in shown]
    assert kinds == ["part.added", "text.delta", "text.delta", "text.done", "part.done"]
    assert b"reasoning_text" not in sse.encode(events)


@pytest.mark.parametrize("theirs", [VLLM_THINKS, LLAMACPP_THINKS, WHOLE_THOUGHT], ids=["vllm", "llamacpp", "whole"])
def test_readable_reasoning_is_summarized_and_encrypted_if_that_was_asked_for(theirs: Events) -> None:
    item = ended(theirs, **SEALED)["output"][0]
    assert (item["encrypted_content"], item["content"][0]["text"]) == ("sealed Hm.", "Hm.")
    item = ended(theirs, **SUMMARY)["output"][0]
    assert ("content" in item, item["summary"]) == (False, [{"type": "summary_text", "text": "Hm."}])
    assert not item["encrypted_content"]
    item = ended(theirs, **SUMMARY, **SEALED)["output"][0]
    assert (item["encrypted_content"], item["summary"][0]["text"]) == ("sealed Hm.", "Hm.")


def test_reasoning_that_the_upstream_summarized_and_encrypted_is_left_alone() -> None:
    theirs = {**THOUGHT, "summary": [{"type": "summary_text", "text": "In short."}], "encrypted_content": "gAAA"}
    [item] = ended([completed(theirs)], **SUMMARY, **SEALED)["output"]
    assert item == {**theirs, "id": item["id"]}


@pytest.mark.parametrize(
    "odd", [{"content": "Hm."}, {"content": [1]}, {"content": [{"type": "reasoning_text"}]}, {"summary": 3}]
)
def test_malformed_reasoning_does_no_harm(odd: dict[str, Any]) -> None:
    [item] = ended([completed({**THOUGHT, **odd})], **SUMMARY, **SEALED)["output"]
    assert not item["encrypted_content"]


def test_log_probabilities_of_a_whole_answer_are_those_of_its_text() -> None:
    """vLLM lists those of the reasoning and of the end, too."""
    tokens = ["<think>", "Hm", ".", "</think>", "Hel", "lo", "<|im_end|>"]
    told = message(text="Hello")
    told["content"][0]["logprobs"] = [
        {"token": token, "logprob": -1.0, "bytes": [*token.encode()], "top_logprobs": []} for token in tokens
    ]
    part = ended([completed(THOUGHT_DONE, told)])["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["Hel", "lo"]


PART_ADDED = {"type": "response.content_part.added", "output_index": 0, "part": {"type": "output_text", "text": ""}}


@pytest.mark.parametrize(
    "events",
    [
        [added(message(), index) for index in range(1001)],
        [added(message()), *[PART_ADDED] * 1001],
        [added(message()), *[{**PART_ADDED, "content_index": 0}] * 1001],
    ],
)
def test_items_and_parts_without_end_are_the_upstreams_fault(events: list[dict[str, Any]]) -> None:
    assert "more than 1000" in ended(numbered(*events))["error"]["message"]
