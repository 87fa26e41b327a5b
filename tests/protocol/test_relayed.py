"""Events of an upstream's own Responses API get our ids, indices and sequence numbers. Everything else is unchanged."""

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
from responses_mw.protocol.response.passthrough import ResponsesPassthrough
from responses_mw.protocol.response.replay import LogReplay
from responses_mw.protocol.types import Event
from responses_mw.upstream.backends.responses import to_responses
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
    """Return all events of a response, as the runner creates them."""
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
    """Return the final document of the response."""
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


def test_a_stream_is_relayed_with_our_ids_and_sequence_numbers() -> None:
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
def test_our_own_events_still_obey_the_laws_when_they_are_relayed(texts: list[str], calls: bool, reason: str) -> None:
    """Relaying our own events changes only the ids and what is reported about the model."""
    call = fragment(0, '{"a": 1}', id="call_1", name="f")
    chunks = [*(chunk(content=text) for text in texts), *([chunk(tool_calls=[call])] if calls else [])]
    first = run_chat([chunk(reasoning="Hm."), *chunks, chunk(finish_reason=reason)])
    second = run(decoded(first))
    check(second)
    assert [event.type for event in second] == [event.type for event in first]
    before, after = decoded(first)[-1]["response"], decoded(second)[-1]["response"]
    varying: dict[str, Any] = {"completed_at": None, "tools": []}
    assert after | varying == before | varying


def test_unknown_events_and_members_are_relayed_unchanged() -> None:
    strange = {"type": "vendor.thought.bubble", "item_id": "xyz_9", "shape": {"id": "elsewhere", "points": [1, None]}}
    odd = {"id": "xyz_9", "type": "vendor_item", "payload": {"deep": [{"own": True}]}, "nothing": None}
    events = run(numbered(added(odd), strange, {**done(odd), "extra": 1}, completed(odd, vendor={"cost": 0.5})))
    ours = {**odd, "id": "xyz_0"}
    assert decoded(events)[3] == {**strange, "item_id": "xyz_0", "sequence_number": 3}
    assert decoded(events)[4] == {**done(ours), "extra": 1, "sequence_number": 4}
    assert decoded(events)[5]["response"]["output"] == [ours]
    assert decoded(events)[5]["response"]["vendor"] == {"cost": 0.5}


def test_an_item_keeps_its_id_even_if_the_upstream_changes_it() -> None:
    """vLLM uses other ids in its events than in its document."""
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


def test_missing_indices_are_filled_in() -> None:
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
def test_missing_events_that_begin_and_end_a_part_are_added(left_out: str) -> None:
    events = run([event for event in HELLO if event["type"] != left_out])
    check(events)
    assert [event.type for event in events] == [event.type for event in run(HELLO)]


@pytest.mark.parametrize("index", [-1, 7, "0", [], None])
@pytest.mark.parametrize("kind", [NEW_PART["type"], "response.output_text.delta", "response.content_part.done"])
def test_an_index_without_a_part_causes_no_error(kind: str, index: Any) -> None:
    odd = {**NEW_PART, "type": kind, "content_index": index, "delta": "x"}
    response = ended([CREATED, added(message()), odd, NEW_PART, delta("Hello"), done(message(text="Hello")), completed()])
    expected = "xHello" if kind.endswith("delta") else "Hello"
    assert (response["status"], response["output_text"]) == ("completed", expected)


def test_a_message_without_content_causes_no_error() -> None:
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
def test_content_that_is_no_list_of_parts_is_an_upstream_error(events: Events) -> None:
    response = ended(events)
    assert response["status"] == "failed"
    assert "malformed" in response["error"]["message"]


@pytest.mark.parametrize("action", [None, [1], "search", 5])
def test_a_search_whose_action_is_no_object_causes_no_error(action: Any) -> None:
    search = {"id": "ws_theirs", "type": "web_search_call", "status": "completed", "action": action}
    response = ended(numbered(added(search), done(search), completed(search)))
    assert (response["status"], response["output"]) == ("completed", [{**search, "id": "ws_0"}])


@pytest.mark.parametrize("content", ["Hello", {"0": {}}, ["Hello"], [], 5])
@pytest.mark.parametrize("kind", [NEW_PART["type"], "response.output_text.delta", "response.refusal.delta"])
def test_events_of_an_item_that_has_ended_are_dropped(kind: str, content: Any) -> None:
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
def test_a_part_without_a_type_or_text_causes_no_error(part: dict[str, Any]) -> None:
    response = ended([completed({**message(text="Hello"), "content": [part]})])
    assert (response["status"], response["output_text"]) == ("completed", "")


@pytest.mark.parametrize("content", [[None], ["x"], "x", 5, {"a": 1}])
@pytest.mark.parametrize("index", [0, 7])
@pytest.mark.parametrize("end", [[], [completed()]])
def test_deltas_for_malformed_content_cause_no_error(content: Any, index: int, end: Events) -> None:
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


def test_a_part_whose_type_does_not_fit_its_list_causes_no_error() -> None:
    odd = {**NEW_PART, "type": "response.reasoning_summary_part.added"}
    response = ended([CREATED, added(message()), NEW_PART, delta("Hello"), odd, odd, done(message(text="Hello")), completed()])
    assert (response["status"], response["output_text"]) == ("completed", "Hello")


def test_an_index_into_the_parts_of_a_call_causes_no_error() -> None:
    call = {"id": "fc_theirs", "type": "function_call", "arguments": "", "name": "f", "call_id": "c"}
    grown = {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": "{}", "_index": []}
    output = ended([CREATED, added(call), grown, completed({**call, "arguments": "{}"})])["output"]
    assert output == [{**call, "id": "fc_0", "arguments": "{}"}]


def test_log_probabilities_that_are_no_list_cause_no_error() -> None:
    said = [CREATED, added(message()), NEW_PART, {**delta("Hello"), "logprobs": 5}]
    response = ended([*said, completed()])
    assert (response["status"], response["output_text"]) == ("completed", "Hello")


def test_a_part_that_begins_after_the_end_of_its_item_causes_no_error() -> None:
    over = {**message(text="Hello"), "content": []}
    response = ended([CREATED, added(message()), done(over), NEW_PART, delta("Hello"), done(over), completed()])
    assert (response["status"], response["output"][0]["content"]) == ("completed", [])


def test_references_to_items_get_our_ids_and_call_ids_are_kept() -> None:
    asked = {"id": "mcpr_theirs", "type": "mcp_approval_request", "name": "f", "server_label": "s", "arguments": "{}"}
    call = {"id": "mcp_theirs", "type": "mcp_call", "approval_request_id": "mcpr_theirs", "call_id": "mcpr_theirs"}
    output = ended(numbered(added(asked), done(asked), added(call, 1), done(call, 1), completed(asked, call)))["output"]
    assert [item["id"] for item in output] == ["mcpr_0", "mcp_1"]
    assert (output[1]["approval_request_id"], output[1]["call_id"]) == ("mcpr_0", "mcpr_theirs")


def test_members_that_we_set_are_not_overwritten_by_the_upstream() -> None:
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


def test_the_texts_of_a_whole_answer_are_streamed_as_deltas() -> None:
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
def test_a_text_sent_only_at_its_end_becomes_one_delta(between: Events, end: dict[str, Any]) -> None:
    events = run(numbered(added(message()), *between, end, *([] if "response" in end else [completed()])))
    oracle.check(sse.encode(events) + sse.DONE_FRAME)
    assert [event.data["delta"] for event in events if event.type == "response.output_text.delta"] == ["Hello"]
    assert check(events)["output_text"] == "Hello"


ARGUMENTS_DONE = {"type": "response.function_call_arguments.done", "item_id": "fc_theirs", "output_index": 0}


@pytest.mark.parametrize("between", [[], [{**ARGUMENTS_DONE, "name": "f", "arguments": '{"a": 1}'}]], ids=["item", "arguments"])
@pytest.mark.parametrize("is_done", [True, False])
def test_a_call_sent_only_at_its_end_has_its_arguments_once(between: Events, is_done: bool) -> None:
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


CALL = {"id": "fc_theirs", "type": "function_call", "call_id": "c", "name": "f", "arguments": "", "status": "in_progress"}
SHOWN_CALL = {**CALL, "arguments": '{"a": 1}', "status": "completed"}


def _arguments(text: str) -> dict[str, Any]:
    return {**ARGUMENTS_DONE, "type": "response.function_call_arguments.delta", "delta": text}


@pytest.mark.parametrize(
    "contradiction",
    [
        {"arguments": "{}"},
        {"arguments": ""},
        {"arguments": None},
        {"arguments": '{"b": 2}'},
        {"name": "g"},
        {"call_id": "other"},
    ],
)
@pytest.mark.parametrize("by", ["item", "document", "arguments"])
def test_a_streamed_call_takes_precedence_over_a_contradicting_end(contradiction: dict[str, Any], by: str) -> None:
    finished = {**SHOWN_CALL, **contradiction}
    ends = {"item": [done(finished)], "document": [], "arguments": [{**ARGUMENTS_DONE, **contradiction}, done(SHOWN_CALL)]}[by]
    stream = [added(CALL), _arguments('{"a":'), _arguments(" 1}"), *ends, completed(finished)]
    events = decoded(run(numbered(*stream)))
    [item] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert item == {**SHOWN_CALL, "id": "fc_0"}
    assert events[-1]["response"]["output"] == [item]
    [over] = [event for event in events if event["type"] == ARGUMENTS_DONE["type"]]
    assert (over["arguments"], over.get("name", "f")) == ('{"a": 1}', "f")


@pytest.mark.parametrize("end", ["item", "part", "text", "document"])
@pytest.mark.parametrize(("told", "expected"), [("Hello", "Hello"), ("Bye", "Hel"), ("", "Hel"), ("H", "Hel")])
def test_a_streamed_text_takes_precedence_over_a_contradicting_end_but_is_completed_by_a_longer_one(
    end: str, told: str, expected: str
) -> None:
    part_done = {**NEW_PART, "type": "response.content_part.done", "part": message(text=told)["content"][0]}
    ends = {"item": [], "document": [], "part": [part_done], "text": [{**TEXT_DONE, "text": told}, part_done]}[end]
    finished = [] if end == "document" else [done(message(text=told))]
    events = run(numbered(added(message()), NEW_PART, delta("Hel"), *ends, *finished, completed(message(text=told))))
    oracle.check(sse.encode(events) + sse.DONE_FRAME)
    assert check(events)["output_text"] == expected
    assert "".join(event.data["delta"] for event in events if event.type == "response.output_text.delta") == expected
    texts = [event.data["text"] for event in events if event.type == "response.output_text.done"]
    parts = [event.data["part"]["text"] for event in events if event.type == "response.content_part.done"]
    assert texts == parts == [expected]


def test_a_streamed_item_takes_precedence_over_an_end_of_another_type() -> None:
    reasoning = {"id": "msg_theirs", "type": "reasoning", "summary": [], "status": "completed"}
    response = ended(numbered(added(message()), NEW_PART, delta("Hello"), done(reasoning), completed(reasoning)))
    assert [(item["type"], item["status"]) for item in response["output"]] == [("message", "completed")]
    assert response["output_text"] == "Hello"


def test_streamed_parts_missing_in_the_end_are_kept() -> None:
    events = run(numbered(added(message()), NEW_PART, delta("Hello"), done({**message(text=""), "content": []}), completed()))
    assert check(events)["output_text"] == "Hello"


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


def test_an_item_that_only_the_terminal_event_ends_is_done_before_that_event() -> None:
    events = run(numbered(added(message()), NEW_PART, delta("Hel"), completed(message("m2", "Hello"))))
    assert decoded(events)[-2]["item"] == {**message(text="Hello"), "id": "msg_0"}
    events = run(numbered(added(message()), NEW_PART, delta("Hel"), completed()))
    assert decoded(events)[-2]["item"]["content"][0]["text"] == "Hel"
    assert decoded(events)[-2]["item"]["status"] == "completed"


def test_a_done_event_without_an_added_event_gets_one() -> None:
    events = run(numbered(done(message(text="Hello"), 7), completed()))
    assert {event["output_index"] for event in decoded(events)[2:-1]} == {0}
    assert [event.type for event in events if "item" in event.data] == [
        "response.output_item.added",
        "response.output_item.done",
    ]


def test_items_are_renumbered_if_the_upstreams_indices_are_wrong() -> None:
    first, second = message("m1", "One"), message("m2", "Two")
    stream = numbered(added(first, 1), done(first, 1), added(second, 1), delta("!", "m2", 1), done(second, 1), completed())
    events = decoded(run(stream))
    assert [event["output_index"] for event in events if "output_index" in event] == [0, 0, 1, 1, 1, 1]
    assert [item["content"][0]["text"] for item in events[-1]["response"]["output"]] == ["One", "Two!"]


@pytest.mark.parametrize("end", range(2, len(HELLO) - 1))
def test_a_stream_without_a_terminal_event_fails_wherever_it_stops(end: int) -> None:
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
def test_reasoning_events_have_the_same_names_for_every_upstream(theirs: str, open_reasoning: bool, ours: str) -> None:
    item = {"id": "rs_theirs", "type": "reasoning", "summary": [], "status": "in_progress"}
    thought = {**delta("Hm", "rs_theirs"), "type": f"{theirs}.delta"}
    relaying = ResponsesPassthrough(relayed().response, CountedIds(), list, ResponseOptions(open_reasoning=open_reasoning))
    events = relaying.feed(added(item), thought, {**thought, "type": f"{theirs}.done", "text": "Hm"})
    assert [event["type"] for event in decoded(events)][2:] == [f"{ours}.delta", f"{ours}.done"]
    relaying.fail("server_error", "It broke off.")
    assert relaying.response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm"}]


def test_interrupted_reasoning_keeps_its_text_without_events_that_begin_parts() -> None:
    """vLLM streams reasoning without these events."""
    item = {"id": "rs_theirs", "type": "reasoning", "summary": [], "status": "in_progress"}
    thought = {**delta("Hm", "rs_theirs"), "type": "response.reasoning_text.delta"}
    output = ended(numbered(added(item), thought, thought))["output"]
    assert output == [{**item, "id": "rs_0", "status": "incomplete", "content": [{"type": "reasoning_text", "text": "HmHm"}]}]


def test_a_failed_response_has_its_error_and_partial_output() -> None:
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
def test_the_document_has_the_outcome_of_the_response(kind: str, status: str | None, expected: str) -> None:
    ending = {**completed(incomplete_details={"reason": "max_output_tokens"}), "type": kind}
    ending["response"]["status"] = status
    response = ended([ending])
    assert response["status"] == expected
    assert (response["error"] is None) == (expected != "failed")
    assert response["completed_at"] is None
    if expected == "incomplete":
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_events_after_the_terminal_event_are_dropped() -> None:
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
def test_malformed_events_are_an_upstream_error(event: dict[str, Any]) -> None:
    relaying = relayed()
    relaying.feed(added(message()))
    with pytest.raises(UpstreamError):
        relaying.feed(event)


@pytest.mark.parametrize("index", [-1, 99, "0", None, [], {}])
def test_an_output_index_that_does_not_exist_causes_no_error(index: Any) -> None:
    events = run([added(message()), {**delta("x", "msg_other"), "output_index": index}, completed()])
    assert events[-1].type == "response.completed"


def test_an_event_with_an_unknown_index_is_assigned_by_its_item_id_or_dropped() -> None:
    events = decoded(run(numbered(added(message(), 7), delta("x", "msg_other"), delta("y"), completed())))
    shown = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["item_id"], event["output_index"]) for event in shown] == [("y", "msg_0", 0)]


def test_an_event_that_is_nested_too_deeply_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = {"a": nested}
    with pytest.raises(UpstreamError, match="deeper"):
        relayed().feed({"type": "response.x", "a": nested})


def test_a_run_without_an_upstream_request_is_complete() -> None:
    relaying = relayed()
    relaying.start()
    relaying.conclude(1_700_000_001)
    assert decoded(relaying.terminal())[0]["response"]["status"] == "completed"


# -- the request -------------------------------------------------------------------------------------------------------


def sent(*items: dict[str, Any], **request: Any) -> dict[str, Any]:
    parsed = parse({"model": "m", "input": "Hi", **request})
    return to_responses(parsed, [*items, *parsed.items], model="real")


def test_parameters_that_only_we_support_are_not_sent() -> None:
    body = sent(metadata={"a": "b"}, previous_response_id="resp_1", background=True, store=True, client_metadata={})
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    assert body == {"model": "real", "input": [user], "store": False}


def test_parameters_that_the_caller_set_are_sent() -> None:
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


def test_encrypted_reasoning_is_sent_back_without_an_id_and_readable_reasoning_with_one() -> None:
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
def test_readable_reasoning_is_streamed_as_a_summary_if_requested(theirs: Events) -> None:
    events = run(theirs, **SUMMARY)
    oracle.check(sse.encode(events) + sse.DONE_FRAME)
    shown = [event for event in decoded(events) if "summary_index" in event]
    kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in shown]
    assert kinds == ["part.added", "text.delta", "text.delta", "text.done", "part.done"]
    assert b"reasoning_text" not in sse.encode(events)


@pytest.mark.parametrize("theirs", [VLLM_THINKS, LLAMACPP_THINKS, WHOLE_THOUGHT], ids=["vllm", "llamacpp", "whole"])
def test_readable_reasoning_is_summarized_and_encrypted_if_requested(theirs: Events) -> None:
    item = ended(theirs, **SEALED)["output"][0]
    assert (item["encrypted_content"], item["content"][0]["text"]) == ("sealed Hm.", "Hm.")
    item = ended(theirs, **SUMMARY)["output"][0]
    assert ("content" in item, item["summary"]) == (False, [{"type": "summary_text", "text": "Hm."}])
    assert not item["encrypted_content"]
    item = ended(theirs, **SUMMARY, **SEALED)["output"][0]
    assert (item["encrypted_content"], item["summary"][0]["text"]) == ("sealed Hm.", "Hm.")


def test_reasoning_that_the_upstream_summarized_and_encrypted_is_unchanged() -> None:
    theirs = {**THOUGHT, "summary": [{"type": "summary_text", "text": "In short."}], "encrypted_content": "gAAA"}
    [item] = ended([completed(theirs)], **SUMMARY, **SEALED)["output"]
    assert item == {**theirs, "id": item["id"]}


@pytest.mark.parametrize(
    "odd", [{"content": "Hm."}, {"content": [1]}, {"content": [{"type": "reasoning_text"}]}, {"summary": 3}]
)
def test_malformed_reasoning_causes_no_error(odd: dict[str, Any]) -> None:
    [item] = ended([completed({**THOUGHT, **odd})], **SUMMARY, **SEALED)["output"]
    assert not item["encrypted_content"]


def test_log_probabilities_of_a_whole_answer_are_those_of_its_text() -> None:
    """vLLM also lists those of the reasoning and of the end."""
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
def test_too_many_items_or_parts_are_an_upstream_error(events: list[dict[str, Any]]) -> None:
    assert "more than 1000" in ended(numbered(*events))["error"]["message"]
