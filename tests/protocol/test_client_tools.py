"""Tools that the client executes: they are functions for the model, and items of their own types for the client."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from responses_mw.errors import BadRequest, NotSupported
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.request.items import parse_input
from responses_mw.protocol.request.tools import check_tools, choice_names, distinct, history_name, namer, offered
from responses_mw.protocol.response.events import CALL_TEXTS
from responses_mw.protocol.tool_kinds.form import CallForm, OfferedFunction, flat_name
from responses_mw.protocol.tool_kinds.registry import UNSERVED

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [FUNCTION, {"type": "custom", "name": "note"}],
}
EVERY_KIND: list[dict[str, Any]] = [
    FUNCTION,
    {"type": "custom", "name": "exec", "description": "Runs code.", "format": GRAMMAR},
    CRM,
    SEARCH,
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
]

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)


def offer(*tools: dict[str, Any], items: list[dict[str, Any]] | None = None) -> list[OfferedFunction]:
    return offered(check_tools(list(tools)), parse_input(items or []))


def names(functions: list[OfferedFunction]) -> list[str]:
    return [one.name for one in functions]


def item_of(form: CallForm, arguments: str) -> dict[str, Any]:
    """Return the final item of a call with these arguments."""
    text = {CALL_TEXTS[form.item].member: arguments} if form.item in CALL_TEXTS else {}
    made = form.made(arguments) if form.made else {}
    item = {"id": "x_1", "type": form.item, "call_id": "c", "status": "completed", **form.members, **text, **made}
    encoded: dict[str, Any] = orjson.loads(orjson.dumps(item))
    return encoded


# -- functions -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_tool_is_offered_as_a_function_with_its_own_form() -> None:
    functions = offer(*EVERY_KIND)
    assert [(one.name, one.form.item) for one in functions] == [
        ("f", "function_call"),
        ("exec", "custom_tool_call"),
        ("crm__f", "function_call"),
        ("crm__note", "custom_tool_call"),
        ("tool_search", "tool_search_call"),
        ("local_shell", "local_shell_call"),
        ("shell", "shell_call"),
        ("apply_patch", "apply_patch_call"),
    ]
    assert all(one.function["type"] == "function" and not one.form.served for one in functions)
    assert functions[0].function == FUNCTION


def test_calls_of_namespaced_tools_are_returned_with_the_bare_name() -> None:
    function, custom = offer(CRM)
    assert function.form.members == {"name": "f", "namespace": "crm"}
    assert custom.form.members == {"name": "note", "namespace": "crm"}


def test_a_regular_expression_is_described_and_becomes_a_pattern_if_possible() -> None:
    for definition, pattern in ((r"^\d+$", "^([0-9]+)$"), (".*", None)):
        (note,) = offer({"type": "custom", "name": "n", "format": {**GRAMMAR, "syntax": "regex", "definition": definition}})
        assert definition in note.function["description"]
        assert note.function["parameters"]["properties"]["input"].get("pattern") == pattern
        assert note.function.get("strict", False) is (pattern is not None)


def test_the_model_gets_the_grammar_and_one_description_of_each_namespace() -> None:
    functions = {one.name: one.function for one in offer(*EVERY_KIND)}
    assert "Runs code." in functions["exec"]["description"]
    assert GRAMMAR["definition"] in functions["exec"]["description"]
    assert functions["exec"]["parameters"]["required"] == ["input"]
    assert "Customers." in functions["crm__f"]["description"]
    assert "Customers." not in functions["crm__note"]["description"]
    assert functions["tool_search"]["description"] == "Finds tools."


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_tools_in_items_can_be_called_and_the_last_definition_applies(kind: str) -> None:
    newer = {**FUNCTION, "description": "newer"}
    item = {"type": kind, "role": "developer", "call_id": "c", "tools": [newer, {**CRM, "description": "Other."}]}
    functions = offer(FUNCTION, {"type": "apply_patch"}, items=[item])
    assert names(functions) == ["f", "apply_patch", "crm__f", "crm__note"]
    assert functions[0].function["description"] == "newer"


def test_a_deferred_tool_is_offered_after_a_search_has_found_it() -> None:
    deferred = {**CRM, "tools": [{**FUNCTION, "defer_loading": True}]}
    assert names(offer(SEARCH, deferred)) == ["tool_search"]
    found = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [deferred]}
    assert names(offer(SEARCH, deferred, items=[found])) == ["tool_search", "crm__f"]


# -- names ---------------------------------------------------------------------------------------------------------------


@given(st.none() | st.text(), st.text())
def test_a_flat_name_is_valid_in_chat_completions(namespace: str | None, name: str) -> None:
    flat = flat_name(namespace, name)
    assert 1 <= len(flat) <= 64
    assert set(flat) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert flat_name(None, flat) == flat


def test_long_names_with_the_same_beginning_stay_different() -> None:
    long = [{"type": "namespace", "name": "n" * 60, "description": "d", "tools": [{**FUNCTION, "name": f"{'f' * 60}{n}"}]}
            for n in range(3)]  # fmt: skip
    functions = offer(*long)
    assert len(set(names(functions))) == 3
    assert [one.form.members["name"] for one in functions] == [f"{'f' * 60}{n}" for n in range(3)]


@given(st.lists(st.sampled_from(["f", "f_2", "f_3", "x" * 64, "a.b", "a_b"]), max_size=12))
def test_colliding_names_are_numbered_and_the_first_one_is_kept(wanted: list[str]) -> None:
    functions = [OfferedFunction({"type": "function", "name": name}, CallForm("function_call")) for name in wanted]
    result = names(distinct(functions))
    assert len(set(result)) == len(result)
    assert all(len(name) <= 64 for name in result)
    for name in set(wanted) - {"a.b", "a_b"}:
        assert result[wanted.index(name)] == name


def test_a_call_in_the_history_gets_the_current_name_of_its_tool() -> None:
    functions = offer(*EVERY_KIND, {**CRM, "name": "a.b".replace(".", "-")})
    for one in functions:
        item = item_of(one.form, "{}")
        assert history_name(item) == one.name == namer(functions)(item)


def test_a_call_of_a_renamed_tool_is_matched_to_its_tool() -> None:
    functions = offer({**FUNCTION, "name": "shell"}, {"type": "shell"}, {"type": "custom", "name": "shell"})
    assert names(functions) == ["shell", "shell_2", "shell_3"]
    name = namer(functions)
    assert [name(item_of(one.form, "")) for one in functions] == names(functions)


def test_a_call_or_approval_request_of_an_mcp_tool_is_matched_by_its_server() -> None:
    waiting = CallForm("mcp_approval_request", {"server_label": "b", "name": "get.it"})
    at_once = CallForm("mcp_call", {"server_label": "a", "name": "get.it"})
    functions = distinct(OfferedFunction({"type": "function", "name": "get.it"}, form) for form in (at_once, waiting))
    assert names(functions) == ["a__get_it", "b__get_it"]
    name = namer(functions)
    assert name({"type": "mcp_call", "server_label": "b", "name": "get.it"}) == "b__get_it"
    assert name({"type": "mcp_call", "server_label": "gone", "name": "get.it"}) == "get_it"


# -- calls ---------------------------------------------------------------------------------------------------------------

ARGUMENTS = st.text() | st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["command", "commands", "env", "type", "path", "diff", "operation", "timeout_ms", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
).map(lambda value: orjson.dumps(value).decode())


@given(ARGUMENTS)
def test_items_are_well_formed_whatever_the_model_writes(arguments: str) -> None:
    for one in offer(*EVERY_KIND):
        item = item_of(one.form, arguments)
        assert ITEM.validate_python(item).type == one.form.item
        assert parse_input([item])[0]["type"] == one.form.item


MADE = {one.name: one.form.made for one in offer(*EVERY_KIND) if one.form.made}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("tool_search", '{"query": "crm"}', {"arguments": {"query": "crm"}}),
        ("tool_search", "{not json", {"arguments": {"malformed_arguments": "{not json"}}),
        ("local_shell", '{"command": ["ls", 1], "env": {"A": 2}, "timeout_ms": 5, "working_directory": "/"}',
         {"action": {"type": "exec", "command": ["ls", "1"], "env": {"A": "2"}, "timeout_ms": 5, "working_directory": "/"}}),
        ("local_shell", '{"command": "ls | wc"}', {"action": {"type": "exec", "command": ["bash", "-lc", "ls | wc"], "env": {}}}),
        ("local_shell", "{not json", {"action": {"type": "exec", "command": ["{not json"], "env": {}}}),
        ("shell", '{"commands": ["a", "b"], "timeout_ms": 9, "max_output_length": -1}',
         {"action": {"commands": ["a", "b"], "timeout_ms": 9}}),
        ("shell", '{"command": "a"}', {"action": {"commands": ["a"]}}),
        ("apply_patch", '{"type": "delete_file", "path": "a", "diff": "x"}', {"operation": {"type": "delete_file", "path": "a"}}),
        ("apply_patch", '{"operation": {"type": "create_file", "path": "a", "diff": "+x"}}',
         {"operation": {"type": "create_file", "path": "a", "diff": "+x"}}),
        ("apply_patch", "*** Begin", {"operation": {"type": "update_file", "path": "", "diff": "*** Begin"}}),
    ],
)  # fmt: skip
def test_arguments_become_members_of_the_item(name: str, arguments: str, expected: dict[str, Any]) -> None:
    assert MADE[name](arguments) == expected


def test_malformed_arguments_are_kept_but_cannot_be_executed() -> None:
    (command,) = MADE["shell"]("{rm -rf x\nrm -rf y")["action"]["commands"]
    assert command == 'false # malformed arguments: "{rm -rf x\\nrm -rf y"'


def test_deeply_nested_arguments_cause_no_error() -> None:
    deep = '{"commands": ' + "[" * 900 + "]" * 900 + "}"
    for made in MADE.values():
        assert orjson.dumps(made(deep))


# -- checks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "param", "code"),
    [
        ({"type": "custom"}, "name", "missing_required_parameter"),
        ({"type": "custom", "name": "no spaces"}, "name", "invalid_value"),
        ({"type": "custom", "name": "a", "format": "text"}, "format", "invalid_type"),
        ({"type": "custom", "name": "a", "format": {"type": "json"}}, "format.type", "invalid_value"),
        ({"type": "custom", "name": "a", "format": {**GRAMMAR, "syntax": "ebnf"}}, "format.syntax", "invalid_value"),
        ({"type": "custom", "name": "a", "format": {**GRAMMAR, "definition": None}}, "format.definition",
         "missing_required_parameter"),
        ({"type": "custom", "name": "a", "async": True}, "async", "unsupported_parameter"),
        ({"type": "namespace", "name": "n"}, "tools", "missing_required_parameter"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}, "tools[0].type", "invalid_value"),
        ({"type": "namespace", "name": "n", "tools": [FUNCTION, {"type": "custom"}]}, "tools[1].name",
         "missing_required_parameter"),
        ({"type": "namespace", "name": "n", "tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading",
         "unsupported_parameter"),
        ({"type": "tool_search"}, "execution", "unsupported_parameter"),
        ({"type": "tool_search", "execution": "client", "parameters": []}, "parameters", "invalid_type"),
        ({"type": "shell", "environment": {"type": "container_auto"}}, "environment.type", "unsupported_parameter"),
        ({"type": "shell", "environment": {"type": "moon"}}, "environment.type", "invalid_value"),
        ({**FUNCTION, "defer_loading": True}, "defer_loading", "unsupported_parameter"),
        ({"type": "shell", "environment": {"type": "local", "skills": [{"name": "n", "path": "/n"}]}},
         "environment.skills[0].description", "missing_required_parameter"),
        ({"type": "function", "function": {"name": "f", "parameters": {}}}, "function", "unsupported_parameter"),
        ({"type": "function", "function": "f"}, "name", "missing_required_parameter"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function",
         "unsupported_parameter"),
        ({**FUNCTION, "allowed_callers": ["programmatic"]}, "allowed_callers", "unsupported_parameter"),
        ({**FUNCTION, "allowed_callers": ["nobody"]}, "allowed_callers[0]", "invalid_value"),
        ({**FUNCTION, "allowed_callers": "direct"}, "allowed_callers", "invalid_type"),
        ({"type": "apply_patch", "allowed_callers": ["programmatic"]}, "allowed_callers", "unsupported_parameter"),
        ({**FUNCTION, "output_schema": {"type": "object"}}, "output_schema", "unsupported_parameter"),
    ],
)  # fmt: skip
def test_an_error_in_a_tool_names_its_path(tool: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as raised:
        check_tools([tool])
    assert (raised.value.param, raised.value.code) == (f"tools[0].{param}", code)
    assert f"tools[0].{param}" in raised.value.message


@pytest.mark.parametrize("callers", [["direct"], ["direct", "programmatic"], [], None])
def test_tools_that_the_model_itself_may_call_are_accepted(callers: Any) -> None:
    tools = [{**tool, "allowed_callers": callers} for tool in EVERY_KIND if tool["type"] not in ("namespace", "tool_search")]
    assert len(names(offer(*tools))) == len(tools)


def test_the_skills_of_a_local_shell_are_described_to_the_model() -> None:
    skills = [
        {"name": "pdf", "description": "Fills in forms.", "path": "/skills/pdf"},
        {"name": "xls", "description": "Computes.", "path": "/skills/xls"},
    ]
    environments: list[dict[str, Any]] = [{}, {"skills": skills}, {"skills": []}]
    plain, skilled, empty = (
        offer({"type": "shell", "environment": {"type": "local", **members}})[0] for members in environments
    )
    assert skilled.function["description"].startswith(plain.function["description"])
    for skill in skills:
        assert all(value in skilled.function["description"] for value in skill.values())
    assert empty.function == plain.function
    assert skilled.function["parameters"] == plain.function["parameters"]


def test_tools_that_run_on_the_server_are_refused_in_items() -> None:
    with pytest.raises(BadRequest) as raised:
        parse_input([{"type": "additional_tools", "role": "developer", "tools": [FUNCTION, {"type": "web_search"}]}])
    assert raised.value.param == "input[0].tools[1].type"


@pytest.mark.parametrize("kind", UNSERVED.types)
def test_an_unsupported_tool_is_accepted_in_tools_but_not_in_an_item_or_as_the_choice(kind: str) -> None:
    tools = [{"type": kind}]
    assert parse({"input": "x", "tools": tools}).tools == tools
    for body, param in (
        ({"input": [{"type": "additional_tools", "role": "developer", "tools": tools}]}, "input[0].tools[0].type"),
        ({"input": "x", "tools": tools, "tool_choice": {"type": kind}}, "tool_choice.type"),
        ({"input": "x", "tools": tools, "tool_choice": {"type": "allowed_tools", "tools": tools}}, "tool_choice.tools[0].type"),
    ):
        with pytest.raises(NotSupported) as raised:
            parse(body)
        assert raised.value.param == param


SERVED: list[dict[str, Any]] = [
    {"type": "mcp", "server_label": "a"},
    {"type": "web_search"},
    {"type": "code_interpreter", "container": "auto"},
]
FORMS = [
    OfferedFunction({"name": "a1"}, CallForm("mcp_call", {"server_label": "a", "name": "1"})),
    OfferedFunction({"name": "a2"}, CallForm("mcp_approval_request", {"server_label": "a", "name": "2"})),
    OfferedFunction({"name": "web"}, CallForm("web_search_call")),
    OfferedFunction({"name": "python"}, CallForm("code_interpreter_call")),
]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "function", "name": "f"}, {"f", "crm__f"}),
        ({"type": "function", "name": "f", "namespace": "crm"}, {"crm__f"}),
        ({"type": "custom", "name": "exec"}, {"exec"}),
        ({"type": "namespace", "name": "crm"}, {"crm__f", "crm__note"}),
        ({"type": "mcp", "server_label": "a"}, {"a1", "a2"}),
        ({"type": "mcp", "server_label": "a", "name": "2"}, {"a2"}),
        ({"type": "web_search_preview"}, {"web"}),
        ({"type": "code_interpreter"}, {"python"}),
        ({"type": "shell"}, {"shell"}),
        ({"type": "local_shell"}, {"local_shell"}),
        ({"type": "apply_patch"}, {"apply_patch"}),
        ({"type": "allowed_tools", "tools": [{"type": "apply_patch"}, {"type": "mcp", "server_label": "a", "name": "1"}]},
         {"apply_patch", "a1"}),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, set()),
    ],
)  # fmt: skip
def test_a_tool_choice_selects_functions(choice: dict[str, Any], expected: set[str]) -> None:
    request = parse({"input": "x", "tools": [*EVERY_KIND, *SERVED], "tool_choice": choice})
    meant = choice_names(request.tool_choice, [*offered(request.tools, request.items), *FORMS])
    assert meant is not None
    assert set(meant) == expected


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "custom", "name": "f"}, "tool_choice.name"),
        ({"type": "function", "function": {"name": "f"}}, "tool_choice.function"),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tool_choice.tools[0].function",
        ),
        ({"type": "function", "name": "f", "namespace": "other"}, "tool_choice.name"),
        ({"type": "mcp", "server_label": "a"}, "tool_choice.server_label"),
        ({"type": "mcp"}, "tool_choice.server_label"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "shell"}, "tool_choice.type"),
        ({"type": "image_generation"}, "tool_choice.type"),
        ({"type": "wand"}, "tool_choice.type"),
        ({"type": "allowed_tools", "tools": [{"type": "code_interpreter"}]}, "tool_choice.tools[0].type"),
        ({"type": "allowed_tools", "tools": [{"type": "allowed_tools", "tools": []}]}, "tool_choice.tools[0].type"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "tool_choice"),
    ],
)
def test_the_chosen_tool_must_be_one_of_the_tools(choice: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse({"input": "x", "tools": [FUNCTION, CRM], "tool_choice": choice})
    assert raised.value.param == param


def test_a_tool_defined_in_an_item_can_be_chosen() -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [CRM]}
    assert parse({"input": [brought], "tool_choice": {"type": "custom", "name": "note"}}).tool_choice["name"] == "note"
    assert parse({"input": [brought], "tool_choice": "required"}).tool_choice == "required"
