"""From items to chat messages: nothing that the model needs is lost, and what cannot be said is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from responses_mw.errors import APIError, BadRequest
from responses_mw.protocol.chat.dialects import OPENAI, TGI, VLLM
from responses_mw.protocol.chat.messages import to_messages
from responses_mw.protocol.request.items import ID_PREFIXES, ITEMS, parse_input
from responses_mw.protocol.response.text import listing


def messages(*items: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return to_messages(parse_input(list(items)), options.pop("dialect", VLLM), **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **more}


def output(call_id: str, said: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def shape(result: list[dict[str, Any]]) -> list[str]:
    return [
        f"calls {' '.join(one['id'] for one in message['tool_calls'])}"
        if message.get("tool_calls")
        else f"tool {message['tool_call_id']}"
        if message["role"] == "tool"
        else str(message["role"])
        for message in result
    ]


def test_what_the_assistant_did_in_one_go_is_one_message() -> None:
    result = messages(user("x"), reasoning("Hm."), assistant("Look."), call("a"), call("b"), output("a"), output("b"))
    assert shape(result) == ["user", "calls a b", "tool a", "tool b"]
    assert (result[1]["reasoning"], result[1]["content"]) == ("Hm.", "Look.")


def test_outputs_follow_their_calls_wherever_they_stood() -> None:
    result = messages(call("a"), call("b"), user("wait"), output("b"), output("a"))
    assert shape(result) == ["calls a b", "tool a", "tool b", "user"]


def test_an_output_before_its_call_does_not_part_the_calls() -> None:
    result = messages(call("a"), output("c"), call("b"), call("c"), output("a"), output("b"))
    assert shape(result) == ["calls a b c", "tool a", "tool b", "tool c"]


def test_a_later_round_is_a_message_of_its_own() -> None:
    assert shape(messages(call("a"), output("a"), call("b"), output("b"))) == ["calls a", "tool a", "calls b", "tool b"]


def test_ids_that_are_used_again_pair_in_order() -> None:
    result = messages(call("0"), output("0", "first"), user("x"), call("0"), output("0", "second"))
    assert [message["content"] for message in result if message["role"] == "tool"] == ["first", "second"]


def test_a_call_that_was_cut_is_left_out() -> None:
    assert shape(messages(user("x"), call("a", status="incomplete", arguments='{"a'), user("go on"))) == ["user", "user"]


def test_a_call_without_an_output_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="No tool output found for function call a") as raised:
        messages(user("x"), call("a"), user("y"))
    assert raised.value.param == "input[1]"


def test_an_item_of_a_type_that_only_others_know_is_refused_by_name() -> None:
    with pytest.raises(APIError, match="'future_call'") as raised:
        to_messages([{"type": "future_call", "id": "fut_1"}, *parse_input("x")], OPENAI, offset=1)
    assert (raised.value.status, raised.value.param) == (400, "input")


def test_an_output_without_a_call_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="No tool call found for function call output with call_id zz") as raised:
        messages(user("x"), output("zz"))
    assert raised.value.param == "input[1]"


def test_a_call_that_the_history_has_already_is_refused_as_a_duplicate() -> None:
    items = [user("x"), call("a", id="fc_1"), call("a", id="fc_2"), output("a")]
    with pytest.raises(BadRequest, match="Duplicate item found with id fc_1") as raised:
        messages(*items, offset=2)
    assert (raised.value.param, raised.value.code) == ("input[0]", "duplicate_item")
    assert "send only its output" in raised.value.message


def test_another_call_with_the_same_call_id_is_not_taken_for_a_duplicate() -> None:
    with pytest.raises(BadRequest, match="No tool output found for function call a"):
        messages(call("a"), output("a"), {**call("a"), "arguments": '{"other": 1}'}, user("y"))


def test_a_malformed_call_of_another_type_is_not_taken_for_a_duplicate() -> None:
    stored = {"type": "shell_call", "call_id": "a"}  # without the action, as another server may have stored it
    with pytest.raises(BadRequest, match="No tool output found for function call a"):
        to_messages([stored, *parse_input([call("a"), output("a"), user("y")])], VLLM, offset=1)


def test_a_second_output_of_an_answered_call_is_refused_as_such() -> None:
    with pytest.raises(BadRequest, match="The function call a already has an output") as raised:
        messages(user("x"), call("a"), output("a"), output("a"))
    assert (raised.value.param, raised.value.code) == ("input[3]", "duplicate_item")


def test_an_answer_of_reasoning_alone_keeps_user_messages_apart() -> None:
    result = messages(user("x"), reasoning("hm"), user("y"), reasoning("trailing"))
    assert [(message["role"], message["content"]) for message in result] == [("user", "x"), ("assistant", ""), ("user", "y")]
    assert messages(user("x"), reasoning("hm"), user("y"), all_reasoning=True)[1]["reasoning"] == "hm"
    assert shape(messages(user("x"), reasoning("hm"), assistant("z"), user("y"))) == ["user", "assistant", "user"]


def test_images_that_a_tool_returned_follow_it() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    result = messages(call("a"), output("a", [{"type": "input_text", "text": "see"}, image]))
    assert shape(result) == ["calls a", "tool a", "user"]
    assert result[1]["content"] == "see"
    assert result[2]["content"][1]["type"] == "image_url"


def test_reasoning_goes_back_within_the_tool_loop_only() -> None:
    items = [user("x"), reasoning("old"), assistant("y"), user("z"), reasoning("new"), call("a"), output("a")]
    given = [message.get("reasoning") for message in messages(*items)]
    assert given == [None, None, None, "new", None]
    assert [message.get("reasoning") for message in messages(*items, all_reasoning=True)][1] == "old"


def test_reasoning_at_the_end_is_accepted_and_says_nothing() -> None:
    assert shape(messages(user("x"), reasoning("Hm."))) == ["user"]


def test_instructions_stand_first() -> None:
    result = messages(user("x"), {"role": "developer", "content": "y"}, instructions="Be brief.", dialect=OPENAI)
    assert [message["role"] for message in result] == ["system", "user", "developer"]


# -- calls of every kind -------------------------------------------------------------------------------------------------

SHELL = {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, dict[str, Any], str]]] = {
    "custom": (
        {"type": "custom_tool_call", "name": "exec", "input": "1 + 1"},
        {"type": "custom_tool_call_output", "output": "2"},
        ("exec", {"input": "1 + 1"}, "2"),
    ),
    "namespace": (
        {"type": "function_call", "name": "f", "namespace": "crm", "arguments": '{"a":1}'},
        {"type": "function_call_output", "output": [{"type": "input_text", "text": "yes"}]},
        ("crm__f", {"a": 1}, "yes"),
    ),
    "tool search": (
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "crm"}},
        {
            "type": "tool_search_output",
            "execution": "client",
            "tools": [
                {
                    "type": "namespace",
                    "name": "crm",
                    "tools": [{"type": "function", "name": "f", "description": "Finds.\nMore.", "defer_loading": True}],
                }
            ],
        },
        ("tool_search", {"query": "crm"}, "These tools were found and can be called now:\n- crm__f: Finds."),
    ),
    "local shell": (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}},
        {"type": "local_shell_call_output", "output": "a.txt"},
        ("local_shell", {"command": ["ls"]}, "a.txt"),
    ),
    "shell": (
        {"type": "shell_call", "action": {"commands": ["ls", "sleep 9"], "timeout_ms": 5}},
        {
            "type": "shell_call_output",
            "output": [SHELL, {"stdout": "", "stderr": "slow", "outcome": {"type": "timeout"}}],
        },
        ("shell", {"commands": ["ls", "sleep 9"], "timeout_ms": 5}, "a\nExit code: 0\n\nstderr:\nslow\nTimed out."),
    ),
    "apply patch": (
        {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a", "diff": "+x"}, "status": "completed"},
        {"type": "apply_patch_call_output", "status": "failed", "output": "There is an a."},
        (
            "apply_patch",
            {"type": "create_file", "path": "a", "diff": "+x"},
            "The patch could not be applied.\nThere is an a.",
        ),
    ),
}


def said(result: list[dict[str, Any]]) -> list[tuple[str, Any, str]]:
    """Each call's name and arguments, and what the tool answered."""
    calls = [one for message in result for one in message.get("tool_calls", ())]
    answers = {message["tool_call_id"]: message["content"] for message in result if message["role"] == "tool"}
    return [(one["function"]["name"], orjson.loads(one["function"]["arguments"]), answers[one["id"]]) for one in calls]


@pytest.mark.parametrize("kind", PAIRS)
def test_calls_of_every_kind_are_function_calls_to_the_model(kind: str) -> None:
    asked, answered, expected = PAIRS[kind]
    result = messages(user("x"), {**asked, "call_id": "a"}, {**answered, "call_id": "a"})
    assert shape(result) == ["user", "calls a", "tool a"]
    assert said(result) == [expected]


@pytest.mark.parametrize("kind", PAIRS)
def test_a_stored_call_that_lacks_a_member_can_be_continued(kind: str) -> None:
    """An upstream with its own Responses API may have made it."""
    [asked, answered] = parse_input([{**one, "call_id": "a"} for one in PAIRS[kind][:2]])
    for name in asked.keys() - {"type", "call_id"}:
        stored = {member: value for member, value in asked.items() if member != name}
        assert shape(to_messages([stored, answered], VLLM)) == ["calls a", "tool a"]
    with pytest.raises(BadRequest, match="No tool output found"):
        to_messages([{"type": asked["type"]}, *parse_input("x")], VLLM)


@pytest.mark.parametrize("kind", PAIRS)
def test_a_call_of_any_kind_needs_its_output(kind: str) -> None:
    asked, answered, _ = PAIRS[kind]
    with pytest.raises(BadRequest, match=f"No tool output found for {asked['type'].replace('_', ' ')} a"):
        messages({**asked, "call_id": "a"})
    with pytest.raises(BadRequest, match=f"No tool call found for {answered['type'].replace('_', ' ')} with call_id a"):
        messages({**answered, "call_id": "a"})


def test_the_output_of_a_local_shell_names_its_call_by_its_id() -> None:
    asked, answered, expected = PAIRS["local shell"]
    assert said(messages({**asked, "call_id": "a"}, {**answered, "id": "a"})) == [expected]


def test_images_that_a_custom_tool_returned_follow_it() -> None:
    asked, answered, _ = PAIRS["custom"]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    result = messages({**asked, "call_id": "a"}, {**answered, "call_id": "a", "output": [image]})
    assert shape(result) == ["calls a", "tool a", "user"]


def test_tools_that_an_item_brings_and_lists_of_tools_are_no_messages() -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": [{"name": "f", "input_schema": {}}]}
    assert shape(messages(brought, user("x"), listed, assistant("y"))) == ["user", "assistant"]


# -- calls that were carried out by a server -----------------------------------------------------------------------------


def mcp(item_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "mcp_call", "id": item_id, "server_label": "s", "name": "get", "arguments": '{"a":1}', **more}


RESULT = {"number": 3, "url": "https://a.org", "title": "A", "snippet": "About a."}
SERVED: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any], str]]] = {
    "mcp": (mcp("i", output="sunny", error=None), ("get", {"a": 1}, "sunny")),
    "mcp, an error of its tool": (
        mcp("i", status="failed", error={"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no"}]}),
        ("get", {"a": 1}, "no"),
    ),
    "mcp, an error of the protocol": (
        mcp("i", status="failed", error={"type": "mcp_protocol_error", "code": -1, "message": "bad"}),
        ("get", {"a": 1}, "bad"),
    ),
    "mcp, an error as text": (mcp("i", status="failed", error="away"), ("get", {"a": 1}, "away")),
    "code": (
        {
            "type": "code_interpreter_call",
            "id": "i",
            "code": "1",
            "container_id": "c",
            "outputs": [{"type": "logs", "logs": "1"}],
        },
        ("python", {"code": "1"}, "1"),
    ),
    "code without output": (
        {"type": "code_interpreter_call", "id": "i", "code": None, "container_id": "c", "outputs": None},
        ("python", {"code": ""}, "(no output)"),
    ),
    "search": (
        {
            "type": "web_search_call",
            "id": "i",
            "action": {"type": "search", "query": "a", "queries": ["a"]},
            "results": [RESULT],
        },
        ("web_search", {"query": "a"}, listing([RESULT])),
    ),
    "search without results": (
        {
            "type": "web_search_call",
            "id": "i",
            "action": {"type": "search", "queries": ["a"], "sources": [{"url": "https://a"}]},
        },
        ("web_search", {"query": "a"}, "The results are not shown again.\nhttps://a"),
    ),
    "a page that was opened": (
        {"type": "web_search_call", "id": "i", "action": {"type": "open_page", "url": "https://a"}},
        ("web_search", {"url": "https://a"}, "The results are not shown again."),
    ),
}


@pytest.mark.parametrize("kind", SERVED)
def test_a_call_that_a_server_carried_out_is_a_call_and_its_result(kind: str) -> None:
    item, expected = SERVED[kind]
    result = messages(user("x"), reasoning("Hm."), assistant("Look."), item, assistant("So."))
    assert shape(result) == ["user", "calls i", "tool i", "assistant"]
    assert (result[1]["reasoning"], result[1]["content"]) == ("Hm.", "Look.")
    assert said(result) == [expected]


def test_a_turn_with_calls_on_both_sides_loses_none() -> None:
    result = messages(user("x"), call("a"), mcp("i", output="1"), call("b"), output("b"), output("a"))
    assert shape(result) == ["user", "calls a i", "tool a", "tool i", "calls b", "tool b"]


def test_a_call_that_no_server_carried_out_is_left_out() -> None:
    assert shape(messages(user("x"), mcp("i", status="incomplete"), mcp("j", status="in_progress"))) == ["user"]


def test_the_model_sees_what_the_run_knows_of_a_result_and_names_it_so() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    shown = {"i": [{"type": "input_text", "text": "see"}, image], "j": "told"}
    result = messages(mcp("i", output="[image]"), mcp("j"), results=shown, names=lambda item: f"s_{item['name']}")
    assert shape(result) == ["calls i", "tool i", "user", "calls j", "tool j"]
    assert [answer for _, _, answer in said(result)] == ["see", "told"]
    assert {name for name, *_ in said(result)} == {"s_get"}
    assert result[2]["content"][1]["type"] == "image_url"


REQUEST: dict[str, Any] = {
    "type": "mcp_approval_request",
    "id": "q",
    "server_label": "s",
    "name": "get",
    "arguments": '{"a":1}',
}


def approval(approve: bool, **more: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": "q", "approve": approve, **more}


def test_an_approved_call_is_said_once() -> None:
    assert shape(messages(user("x"), REQUEST)) == ["user"]
    assert shape(messages(user("x"), REQUEST, approval(True))) == ["user"]
    carried_out = mcp("i", output="1", approval_request_id="q")
    assert shape(messages(user("x"), REQUEST, approval(True), carried_out)) == ["user", "calls i", "tool i"]


def test_the_model_is_told_of_a_call_that_was_declined() -> None:
    result = messages(user("x"), REQUEST, approval(False, reason="Too dear."), user("y"))
    assert shape(result) == ["user", "calls q", "tool q", "user"]
    assert said(result) == [("get", {"a": 1}, "The user did not approve this call. Reason: Too dear.")]
    assert said(messages(REQUEST, approval(False)))[0][2] == "The user did not approve this call."


STEPS = st.lists(
    st.one_of(
        st.builds(lambda text: [user(text)], st.text(min_size=1)),
        st.builds(lambda text: [assistant(text)], st.text(min_size=1)),
        st.builds(
            lambda texts: [call(f"c{n}") for n in range(len(texts))] + [output(f"c{n}", text) for n, text in enumerate(texts)],
            st.lists(st.text(), min_size=1, max_size=3),
        ),
    ),
    max_size=8,
)


@given(STEPS)
def test_nothing_that_was_said_is_lost_and_its_order_holds(steps: list[list[dict[str, Any]]]) -> None:
    items = [item for step in steps for item in step]
    result = messages(*items)
    texts = [str(item.get("content", item.get("output"))) for item in items if item.get("type") != "function_call"]
    told = [message["content"] for message in result if "content" in message]
    assert "\n".join(told).split("\n") == "\n".join(texts).split("\n")
    assert sum(len(message.get("tool_calls", ())) for message in result) == sum("arguments" in item for item in items)
    for before, after in pairwise(result):
        if after["role"] == "tool":
            assert before["role"] == "tool" or "tool_calls" in before


GARBAGE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "command", "path"]), inner, max_size=2)
    ),
    max_leaves=4,
)
EXAMPLES: list[dict[str, Any]] = [
    *({**item, "call_id": "a"} for pair in PAIRS.values() for item in pair[:2]),
    *(item for item, _ in SERVED.values()),
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "f"}]},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "compaction_trigger"},
    {
        "type": "mcp_list_tools",
        "id": "l",
        "server_label": "s",
        "tools": [{"name": "f", "input_schema": {}, "description": None}],
    },
    REQUEST,
    approval(True),
    approval(False),
]


def places(value: Any, *path: Any) -> list[tuple[Any, ...]]:
    """The path of every member, at any depth."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, member in inside for place in ((*path, key), *places(member, *path, key))]


@st.composite
def spoiled(draw: st.DrawFn) -> dict[str, Any]:
    """An item of which one member is something else, or gone."""
    item: dict[str, Any] = orjson.loads(orjson.dumps(draw(st.sampled_from(EXAMPLES))))
    *path, key = draw(st.sampled_from(places(item)))
    holder: Any = item
    for step in path:
        holder = holder[step]
    if isinstance(holder, dict) and draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = draw(GARBAGE)
    return item


@given(st.lists(spoiled() | st.sampled_from(EXAMPLES), max_size=4), st.sampled_from([VLLM, OPENAI, TGI]))
def test_any_item_is_said_or_a_400_that_names_it(items: list[dict[str, Any]], dialect: Any) -> None:
    try:
        parsed = parse_input(items)
        assume(all(item["type"] != "item_reference" for item in parsed))  # the items are in their place by then
        result = to_messages(parsed, dialect)
    except APIError as error:
        assert error.status == 400
        assert str(error.param).startswith("input[")
        return
    assert orjson.dumps(result)
    for before, after in pairwise(result):
        if after["role"] == "tool":
            assert before["role"] == "tool" or "tool_calls" in before


def test_every_type_of_item_has_a_prefix_for_its_ids_and_a_place_in_the_history() -> None:
    assert ITEMS.keys() - {"item_reference"} == ID_PREFIXES.keys()
    assert len(set(ID_PREFIXES.values())) == len(ID_PREFIXES)
    assert {item["type"] for item in EXAMPLES} >= ITEMS.keys() - {"message", "reasoning", "item_reference"}
