"""Conversion of items to chat messages: nothing that the model needs is lost, and items without an equivalent are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from responses_mw.errors import APIError, BadRequest
from responses_mw.protocol.chat.messages import to_messages
from responses_mw.protocol.dialects import OPENAI, TGI, VLLM
from responses_mw.protocol.request.items import ID_PREFIXES, ITEMS, parse_input
from responses_mw.protocol.search_results import file_output, sources_of, web_listing


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


def test_consecutive_items_of_the_assistant_become_one_message() -> None:
    result = messages(user("x"), reasoning("Hm."), assistant("Look."), call("a"), call("b"), output("a"), output("b"))
    assert shape(result) == ["user", "calls a b", "tool a", "tool b"]
    assert (result[1]["reasoning"], result[1]["content"]) == ("Hm.", "Look.")


def test_outputs_follow_their_calls_wherever_they_are_in_the_input() -> None:
    result = messages(call("a"), call("b"), output("b"), output("a"), user("go on"))
    assert shape(result) == ["calls a b", "tool a", "tool b", "user"]


def test_a_message_before_an_output_is_moved_before_the_call() -> None:
    items = [user("x"), reasoning("Hm."), call("a"), call("b"), user("1"), output("b"), user("2"), output("a"), user("3")]
    result = messages(*items)
    assert shape(result) == ["user", "user", "user", "calls a b", "tool a", "tool b", "user"]
    assert [message["content"] for message in result if message["role"] == "user"] == ["x", "1", "2", "3"]
    result = messages(user("x"), reasoning("Hm."), call("a"), user("1"), output("a"))
    assert (shape(result), result[2]["reasoning"]) == (["user", "user", "calls a", "tool a"], "Hm.")


def test_a_message_between_answers_of_the_assistant_keeps_its_place() -> None:
    items = [call("a", status="incomplete"), user("1"), assistant("2"), user("3"), output("a")]
    assert [message.get("content") for message in messages(*items)] == [None, "done", "1", "2", "3"]


def test_an_output_before_its_call_does_not_separate_the_calls() -> None:
    result = messages(call("a"), output("c"), call("b"), call("c"), output("a"), output("b"))
    assert shape(result) == ["calls a b c", "tool a", "tool b", "tool c"]


def test_calls_after_an_output_are_a_separate_message() -> None:
    assert shape(messages(call("a"), output("a"), call("b"), output("b"))) == ["calls a", "tool a", "calls b", "tool b"]


def test_reused_call_ids_are_paired_in_order() -> None:
    result = messages(call("0"), output("0", "first"), user("x"), call("0"), output("0", "second"))
    assert [message["content"] for message in result if message["role"] == "tool"] == ["first", "second"]


def test_a_truncated_call_is_omitted() -> None:
    cut = call("a", status="incomplete", arguments='{"a')
    assert shape(messages(user("x"), cut)) == ["user"]
    assert shape(messages(user("x"), assistant("y"), cut, user("go on"))) == ["user", "assistant", "user"]


def test_a_call_without_an_output_is_refused_with_its_path() -> None:
    with pytest.raises(BadRequest, match="No tool output found for function call a") as raised:
        messages(user("x"), call("a"), user("y"))
    assert raised.value.param == "input[1]"


def test_an_item_of_an_unsupported_type_is_refused_with_its_path() -> None:
    with pytest.raises(APIError, match="'future_call'") as raised:
        to_messages([{"type": "future_call", "id": "fut_1"}, *parse_input("x")], OPENAI, offset=1)
    assert (raised.value.status, raised.value.param) == (400, "input")


def test_an_output_without_a_call_is_refused_with_its_path() -> None:
    with pytest.raises(BadRequest, match="No tool call found for function call output with call_id zz") as raised:
        messages(user("x"), output("zz"))
    assert raised.value.param == "input[1]"


def test_a_call_that_is_already_in_the_history_is_refused_as_a_duplicate() -> None:
    items = [user("x"), call("a", id="fc_1"), call("a", id="fc_2"), output("a")]
    with pytest.raises(BadRequest, match="Duplicate item found with id fc_1") as raised:
        messages(*items, offset=2)
    assert (raised.value.param, raised.value.code) == ("input[0]", "duplicate_item")
    assert "send only its output" in raised.value.message


def test_a_different_call_with_the_same_call_id_is_no_duplicate() -> None:
    with pytest.raises(BadRequest, match="No tool output found for function call a"):
        messages(call("a"), output("a"), {**call("a"), "arguments": '{"other": 1}'}, user("y"))


def test_a_malformed_call_of_another_type_is_no_duplicate() -> None:
    stored = {"type": "shell_call", "call_id": "a"}  # without the action, as another server may have stored it
    with pytest.raises(BadRequest, match="No tool output found for function call a"):
        to_messages([stored, *parse_input([call("a"), output("a"), user("y")])], VLLM, offset=1)


def test_a_second_output_for_a_call_is_refused() -> None:
    with pytest.raises(BadRequest, match="The function call a already has an output") as raised:
        messages(user("x"), call("a"), output("a"), output("a"))
    assert (raised.value.param, raised.value.code) == ("input[3]", "duplicate_item")


def test_an_answer_with_only_reasoning_separates_user_messages() -> None:
    result = messages(user("x"), reasoning("hm"), user("y"), reasoning("trailing"))
    assert [(message["role"], message["content"]) for message in result] == [("user", "x"), ("assistant", ""), ("user", "y")]
    assert messages(user("x"), reasoning("hm"), user("y"), all_reasoning=True)[1]["reasoning"] == "hm"
    assert shape(messages(user("x"), reasoning("hm"), assistant("z"), user("y"))) == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "left",
    [
        lambda: [reasoning("hm")],
        lambda: [call("c", status="incomplete", arguments='{"a')],
        lambda: [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x", "status": "incomplete"}],
        lambda: [mcp("i", status="incomplete")],
        lambda: [REQUEST],
        lambda: [REQUEST, approval(True), mcp("i", status="incomplete", approval_request_id="q")],
    ],
)
def test_a_turn_without_output_separates_user_messages(left: Any) -> None:
    items = left()
    empty = {"role": "assistant", "content": ""}
    result = messages(user("x"), *items, user("y"))
    assert (shape(result), result[1]) == (["user", "assistant", "user"], empty)
    assert shape(messages(user("x"), *items, {"role": "developer", "content": "z"}, user("y")))[:2] == ["user", "assistant"]
    result = messages(user("x"), mcp("j", output="1"), *items, user("y"))
    assert (shape(result), result[3]) == (["user", "calls j", "tool j", "assistant", "user"], empty)
    assert shape(messages(user("x"), *items)) == ["user"]
    assert shape(messages({"role": "developer", "content": "z"}, *items, user("y"))) == ["developer", "user"]


def test_no_message_is_inserted_between_an_output_and_a_user_message() -> None:
    assert shape(messages(user("x"), reasoning("Hm."), call("a"), output("a"), user("y")))[-2:] == ["tool a", "user"]


def test_images_that_a_tool_returned_follow_its_output() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    result = messages(call("a"), output("a", [{"type": "input_text", "text": "see"}, image]))
    assert shape(result) == ["calls a", "tool a", "user"]
    assert result[1]["content"] == "see"
    assert result[2]["content"][1]["type"] == "image_url"


def test_reasoning_is_sent_back_only_within_a_tool_loop() -> None:
    items = [user("x"), reasoning("old"), assistant("y"), user("z"), reasoning("new"), call("a"), output("a")]
    given = [message.get("reasoning") for message in messages(*items)]
    assert given == [None, None, None, "new", None]
    assert [message.get("reasoning") for message in messages(*items, all_reasoning=True)][1] == "old"


def test_reasoning_at_the_end_is_accepted_and_ignored() -> None:
    assert shape(messages(user("x"), reasoning("Hm."))) == ["user"]


def test_instructions_come_first() -> None:
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
    """Return the name and the arguments of each call, and its result."""
    calls = [one for message in result for one in message.get("tool_calls", ())]
    answers = {message["tool_call_id"]: message["content"] for message in result if message["role"] == "tool"}
    return [(one["function"]["name"], orjson.loads(one["function"]["arguments"]), answers[one["id"]]) for one in calls]


@pytest.mark.parametrize("kind", PAIRS)
def test_calls_of_every_kind_are_sent_as_function_calls(kind: str) -> None:
    asked, answered, expected = PAIRS[kind]
    result = messages(user("x"), {**asked, "call_id": "a"}, {**answered, "call_id": "a"})
    assert shape(result) == ["user", "calls a", "tool a"]
    assert said(result) == [expected]


@pytest.mark.parametrize("kind", PAIRS)
def test_a_stored_call_that_lacks_a_member_can_be_continued(kind: str) -> None:
    """An upstream with its own Responses API may have created such a call."""
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


def test_the_output_of_a_local_shell_refers_to_its_call_by_its_id() -> None:
    asked, answered, expected = PAIRS["local shell"]
    assert said(messages({**asked, "call_id": "a"}, {**answered, "id": "a"})) == [expected]


def test_images_that_a_custom_tool_returned_follow_its_output() -> None:
    asked, answered, _ = PAIRS["custom"]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    result = messages({**asked, "call_id": "a"}, {**answered, "call_id": "a", "output": [image]})
    assert shape(result) == ["calls a", "tool a", "user"]


def test_items_that_contain_tools_become_no_messages() -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": [{"name": "f", "input_schema": {}}]}
    assert shape(messages(brought, user("x"), listed, assistant("y"))) == ["user", "assistant"]


# -- calls that were carried out by a server -----------------------------------------------------------------------------


def mcp(item_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "mcp_call", "id": item_id, "server_label": "s", "name": "get", "arguments": '{"a":1}', **more}


EXCERPT = {"file_id": "file-1", "filename": "a.md", "score": 0.5, "attributes": {}, "text": "t", "number": 1}
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
        ("web_search", {"query": "a"}, web_listing([RESULT])),
    ),
    "search without results": (
        {
            "type": "web_search_call",
            "id": "i",
            "action": {"type": "search", "queries": ["a"], "sources": [{"url": "https://a"}]},
        },
        ("web_search", {"query": "a"}, "The results of this search are no longer available.\nhttps://a"),
    ),
    "search in files": (
        {"type": "file_search_call", "id": "i", "queries": ["a", "b"], "results": [EXCERPT]},
        ("file_search", {"queries": ["a", "b"]}, file_output({"results": [EXCERPT]})),
    ),
    "search in files that failed": (
        {"type": "file_search_call", "id": "i", "status": "failed", "queries": ["a"], "results": [], "error": "No."},
        ("file_search", {"queries": ["a"]}, "No."),
    ),
    "search in files without results": (
        {"type": "file_search_call", "id": "i", "queries": ["a"], "results": None},
        ("file_search", {"queries": ["a"]}, "The results of this search are no longer available."),
    ),
    "a page that was opened": (
        {"type": "web_search_call", "id": "i", "action": {"type": "open_page", "url": "https://a"}},
        ("web_search", {"url": "https://a"}, "The results of this search are no longer available."),
    ),
}


@pytest.mark.parametrize("kind", SERVED)
def test_a_call_executed_by_a_server_becomes_a_call_and_its_result(kind: str) -> None:
    item, expected = SERVED[kind]
    result = messages(user("x"), reasoning("Hm."), assistant("Look."), item, assistant("So."))
    assert shape(result) == ["user", "calls i", "tool i", "assistant"]
    assert (result[1]["reasoning"], result[1]["content"]) == ("Hm.", "Look.")
    assert said(result) == [expected]


def test_a_turn_with_calls_of_server_and_client_keeps_all_of_them() -> None:
    result = messages(user("x"), call("a"), mcp("i", output="1"), call("b"), output("b"), output("a"))
    assert shape(result) == ["user", "calls a i", "tool a", "tool i", "calls b", "tool b"]


SAME_TURN = {"upstream": {"same_turn": True}}


def test_items_of_one_turn_with_a_server_side_call_share_a_message() -> None:
    turn = [reasoning("Hm."), assistant("Look."), mcp("i", output="1"), mcp("j", output="2") | SAME_TURN]
    late = {**assistant("Both."), **SAME_TURN}
    result = messages(user("x"), *turn, late, mcp("k", output="3"), assistant("So."))
    assert shape(result) == ["user", "calls i j", "tool i", "tool j", "calls k", "tool k", "assistant"]
    assert (result[1]["reasoning"], result[1]["content"]) == ("Hm.", "Look.\nBoth.")
    result = messages(user("x"), *turn, call("a") | SAME_TURN, output("a"), assistant("So."))
    assert shape(result) == ["user", "calls i j a", "tool i", "tool j", "tool a", "assistant"]
    pending = {**REQUEST, **SAME_TURN}
    result = messages(
        user("x"), *turn, pending, approval(True), mcp("k", output="3", approval_request_id="q"), assistant("So.")
    )
    assert shape(result) == ["user", "calls i j q", "tool i", "tool j", "tool q", "assistant"]
    result = messages(user("x"), mcp("i", output="1"), mcp("j", status="incomplete") | SAME_TURN, assistant("So."))
    assert shape(result) == ["user", "calls i", "tool i", "assistant"]


def test_a_call_is_sent_back_as_the_upstream_wrote_it() -> None:
    given: dict[str, Any] = {
        "id": "call_1__thought__" + "x" * 300,
        "call": {"extra_content": {"google": {"thought_signature": "s"}}},
    }
    given |= {"function": {"thought_signature": "t"}}
    for item, more in ((call("a"), [output("a")]), (mcp("i", output="1"), []), ({**REQUEST}, [approval(False)])):
        result = messages(user("x"), item | {"upstream": given}, *more)
        made = result[1]["tool_calls"][0]
        assert (made["id"], result[2]["tool_call_id"]) == (given["id"], given["id"])
        assert made["extra_content"] == given["call"]["extra_content"]
        assert made["function"].keys() == {"name", "arguments", "thought_signature"}


def test_members_that_a_client_attributes_to_the_upstream_replace_no_member_of_a_call() -> None:
    forged = {"type": "custom", "id": "z", "index": 9, "function": {"name": "rm"}}
    upstream = {"call": forged, "function": {"name": "rm", "arguments": "[]"}, "other": 1}
    result = messages(user("x"), call("a") | {"upstream": upstream}, output("a"))
    assert result[1]["tool_calls"] == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("x", "upstream"),
        ({"id": 1}, "upstream.id"),
        ({"call": "x"}, "upstream.call"),
        ({"function": []}, "upstream.function"),
        ({"same_turn": "x"}, "upstream.same_turn"),
        ({"id": "x" * 70_000}, "upstream.id"),
        ({"call": {"x": "x" * 70_000}}, "upstream"),
    ],
)
def test_malformed_upstream_members_of_an_item_are_refused(given: Any, param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        messages(user("x"), call("a") | {"upstream": given}, output("a"))
    assert raised.value.param == f"input[1].{param}"


def test_a_server_side_call_that_was_not_executed_is_omitted() -> None:
    assert shape(messages(user("x"), mcp("i", status="incomplete"), mcp("j", status="in_progress"))) == ["user"]


def test_the_model_gets_the_result_that_the_run_knows_under_the_offered_name() -> None:
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


def test_an_approved_call_is_sent_once() -> None:
    assert shape(messages(user("x"), REQUEST)) == ["user"]
    assert shape(messages(user("x"), REQUEST, approval(True))) == ["user"]
    carried_out = mcp("i", output="1", approval_request_id="q")
    for more in ([], [user("y")]):
        result = messages(user("x"), assistant("Look."), REQUEST, *more, approval(True), carried_out, assistant("So."))
        assert shape(result) == ["user", "calls q", "tool q", *("user" for _ in more), "assistant"]
        assert (result[1]["content"], result[2]["content"]) == ("Look.", "1")
    assert shape(messages(user("x"), approval(True), carried_out)) == ["user", "calls i", "tool i"]  # the request was dropped


def test_the_model_is_informed_about_a_declined_call() -> None:
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
def test_no_text_is_lost_and_the_order_is_kept(steps: list[list[dict[str, Any]]]) -> None:
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
    {"type": "configuration_update", "reasoning": {"effort": "high"}},
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
    """Return the path of every member, at any depth."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, member in inside for place in ((*path, key), *places(member, *path, key))]


@st.composite
def spoiled(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an item with one member replaced or removed."""
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
def test_any_item_is_sent_or_refused_with_its_path(items: list[dict[str, Any]], dialect: Any) -> None:
    try:
        parsed = parse_input(items)
        assume(all(item["type"] != "item_reference" for item in parsed))  # the items are in their place by then
        assert all(source.file_id or source.url for source in sources_of(parsed))
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
