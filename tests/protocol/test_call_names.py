"""Names of called functions: nearly right, or in pieces."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from responses_mw.protocol.chat.call_names import OfferedNames
from responses_mw.protocol.request.tools import distinct, offered
from responses_mw.protocol.tool_kinds.form import CallForm, OfferedFunction
from tests.protocol.runs import chunk, fragment, output, run
from tests.support.replay import decoded

PARIS = '{"city":"Paris"}'


def functions(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name, "parameters": None} for name in names]


def mcp(label: str, *names: str) -> list[OfferedFunction]:
    return [
        OfferedFunction(
            {"type": "function", "name": name}, CallForm("mcp_call", {"server_label": label, "name": name}, served=True)
        )
        for name in names
    ]


WEATHER = functions("get_weather", "get_time")
CRM = [{"type": "namespace", "name": "crm", "tools": functions("find_customer")}]


@pytest.mark.parametrize(
    "written",
    [
        "get_weather<|channel|>commentary",
        "get_weather<|constrain|>json",
        "get_weather<|",
        "get_weather<",
        "get_weather <|channel|>",
        "get_weather<\uff5ctool\u2581sep\uff5c>",
        "functions.get_weather",
        "functions.get_weather<|channel|>commentary",
        "functions:get_weather",
        " get_weather\n",
        "get-weather",
        "get.weather",
        "get weather",
        "get:weather",
        "get/weather",
        "getWeather",
        "GET_WEATHER",
        "Functions.Get_Weather",
        "get_weather:0",
        "functions.get_weather:12",
    ],
)
def test_a_name_similar_to_one_offered_name_is_corrected(written: str) -> None:
    assert output(chunk(tool_calls=[fragment(name=written, id="a", arguments=PARIS)]), tools=WEATHER) == [
        ("get_weather", PARIS)
    ]


@pytest.mark.parametrize(
    "written", ["weather", "get_weathers", "get_", "x.get_weather", "<|channel|>get_weather", "get_weather_time"]
)
def test_a_name_similar_to_no_offered_name_is_kept(written: str) -> None:
    expected = written if not written.startswith("<") else "<|channel|>get_weather"
    assert output(chunk(tool_calls=[fragment(name=written, id="a", arguments=PARIS)]), tools=WEATHER) == [(expected, PARIS)]


def test_a_special_token_after_an_unknown_name_is_removed() -> None:
    call = fragment(name="nosuch<|channel|>commentary", id="a", arguments=PARIS)
    assert output(chunk(tool_calls=[call]), tools=WEATHER) == [("nosuch", PARIS)]


def test_a_name_similar_to_two_offered_names_is_kept() -> None:
    tools = functions("get_weather", "get-weather")
    for written, meant in [
        ("get-weather", "get-weather"),
        ("functions.get_weather", "get_weather"),
        ("getWeather", "getWeather"),
    ]:
        assert output(chunk(tool_calls=[fragment(name=written, id="a", arguments=PARIS)]), tools=tools) == [(meant, PARIS)]


@pytest.mark.parametrize(
    "written", ["crm__find_customer", "crm.find_customer", "crm/find-customer", "functions.crm.find_customer"]
)
def test_a_namespace_may_have_another_separator(written: str) -> None:
    item = decoded(run([chunk(tool_calls=[fragment(name=written, id="a", arguments="{}")])], tools=CRM))[-1]["response"][
        "output"
    ][0]
    assert (item["name"], item["namespace"]) == ("find_customer", "crm")


def test_a_namespace_whose_name_had_to_be_shortened_may_have_another_separator() -> None:
    tools = [{"type": "namespace", "name": "n" * 60, "tools": functions("find_customer")}]
    names = OfferedNames(offered(tools, []))
    assert names.match(f"{'n' * 60}.find_customer") == offered(tools, [])[0].name


@pytest.mark.parametrize("written", ["w.find", "w__find", "mcp__w__find", "mcp.w.find", "W/Find", "find", "functions.w__find"])
def test_an_mcp_tool_may_be_called_with_the_label_of_its_server(written: str) -> None:
    assert OfferedNames(mcp("w", "find", "read")).match(written) == "find"


def test_the_label_distinguishes_servers_with_equal_tool_names() -> None:
    names = OfferedNames(distinct([*mcp("one", "find"), *mcp("two", "find")]))
    assert [names.match(written) for written in ("one.find", "two.find", "find")] == ["one__find", "two__find", None]


def test_a_call_whose_corrected_name_is_allowed_is_allowed() -> None:
    only = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    calls = [fragment(0, "{}", name="get-time", id="a"), fragment(1, "{}", name="get-weather", id="b")]
    assert output(chunk(tool_calls=calls), tools=WEATHER, tool_choice=only) == [("get_time", "{}")]


# -- in pieces -----------------------------------------------------------------------------------------------------------


def in_pieces(*pieces: str, arguments: tuple[str, ...] = (), tools: Any = WEATHER, **members: Any) -> list[Any]:
    """Return the calls for a name in `pieces`, each with one of the `arguments`."""
    beside = [*arguments, *[""] * len(pieces)]
    fragments = [fragment(0, beside[0], name=pieces[0], id="a")]
    for piece, given in zip(pieces[1:], beside[1:], strict=False):
        fragments.append(fragment(0, given, name=piece, **members))
    rest = [fragment(0, given) for given in arguments[len(pieces) :]]
    chunks = [chunk(tool_calls=[one]) for one in (*fragments, *rest)]
    return output(*chunks, chunk(finish_reason="tool_calls"), tools=tools)


@pytest.mark.parametrize("members", [{}, {"id": "a"}, {"id": None}, {"id": ""}], ids=["no id", "id", "null", "empty"])
def test_a_name_in_pieces_is_joined_however_it_is_split(members: dict[str, Any]) -> None:
    for one, two in itertools.combinations(range(1, len("get_weather") + 1), 2):
        pieces = [piece for piece in ("get_weather"[:one], "get_weather"[one:two], "get_weather"[two:]) if piece]
        assert in_pieces(*pieces, arguments=('{"ci', 'ty":"Paris"}'), **members) == [("get_weather", PARIS)]


@pytest.mark.parametrize("members", [{}, {"id": "a"}])
@pytest.mark.parametrize("arguments", [("", "", "", PARIS), ("", "", PARIS), (PARIS,), ('{"city":', '"Paris"}')])
@pytest.mark.parametrize(
    "pieces",
    [
        ("get", "_weather"),
        ("get_wea", "ther"),
        ("get_weather", "get_weather"),
        ("get_weather", "get_weather", "get_weather"),
        ("get_wea", "get_weather"),
        ("functions", ".get_wea", "ther"),
        ("get-", "weather"),
        ("get_weather", "<|channel|>", "commentary"),
        ("get_wea", "ther<|chan", "nel|>commentary"),
    ],
)
@pytest.mark.parametrize("tools", [WEATHER, functions("get", "get_weather")], ids=["apart", "nested"])
def test_pieces_and_repetitions_of_a_name_are_joined_to_one_name(
    tools: Any, pieces: tuple[str, ...], arguments: tuple[str, ...], members: dict[str, Any]
) -> None:
    assert in_pieces(*pieces, arguments=arguments, tools=tools, **members) == [("get_weather", PARIS)]


@pytest.mark.parametrize("pieces", [("get",), ("get", "get"), ("ge", "t")])
@pytest.mark.parametrize("arguments", [(PARIS,), ('{"city":', '"Paris"}'), ("", "", PARIS), ()])
def test_a_name_that_is_the_beginning_of_another_name_can_be_called(
    pieces: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    expected = [("get", PARIS if arguments else "{}")]
    assert in_pieces(*pieces, arguments=arguments, tools=functions("get", "get_weather")) == expected


def test_a_name_that_is_the_beginning_of_another_name_is_sent_with_the_second_fragment() -> None:
    fragments = [fragment(0, '{"a":', name="get", id="a"), fragment(0, '"b'), fragment(0, '"}')]
    events = run([chunk(tool_calls=[one]) for one in fragments], tools=functions("get", "get_weather"))
    assert [event["delta"] for event in decoded(events) if event["type"].endswith("arguments.delta")] == ['{"a":', '"b', '"}']


def test_two_names_in_pieces_can_be_interleaved() -> None:
    fragments = [
        fragment(0, name="get_", id="a"),
        fragment(1, name="get_", id="b"),
        fragment(0, name="weather"),
        fragment(1, name="time"),
        fragment(0, PARIS),
        fragment(1, "{}"),
    ]
    assert output(*(chunk(tool_calls=[one]) for one in fragments), tools=WEATHER) == [
        ("get_weather", PARIS),
        ("get_time", "{}"),
    ]


def test_two_complete_names_are_two_calls() -> None:
    fragments = [{"function": {"name": "get", "arguments": PARIS}}, {"function": {"name": "get_weather", "arguments": PARIS}}]
    tools = functions("get", "get_weather")
    assert output(*(chunk(tool_calls=[one]) for one in fragments), tools=tools) == [("get", PARIS), ("get_weather", PARIS)]


def test_a_call_whose_name_is_truncated_is_omitted() -> None:
    chunks = [chunk(tool_calls=[fragment(name="get_wea", id="a")]), chunk(finish_reason="length")]
    assert output(*chunks, tools=WEATHER) == [[("output_text", "")]]


def test_an_incomplete_name_with_arguments_is_a_call_of_an_unknown_function() -> None:
    assert in_pieces("get_wea", arguments=(PARIS,)) == [("get_wea", PARIS)]


# -- the legacy member ---------------------------------------------------------------------------------------------------


def test_the_legacy_function_call_is_read_if_there_are_no_tool_calls() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "function_call": {"name": "get_wea", "arguments": ""}},
        {"function_call": {"name": "ther"}, "content": None},
        {"function_call": {"arguments": '{"city":'}},
        {"function_call": {"arguments": '"Paris"}'}},
        {"function_call": None},
    ]
    chunks = [chunk(**delta) for delta in deltas]
    assert output(*chunks, chunk(finish_reason="function_call"), tools=WEATHER) == [("get_weather", PARIS)]


def test_a_legacy_function_call_next_to_tool_calls_adds_no_call() -> None:
    function = {"name": "get_weather", "arguments": PARIS}
    both = chunk(function_call=function, tool_calls=[{"index": 0, "id": "a", "function": function}])
    assert output(both, chunk(function_call=function), chunk(finish_reason="stop"), tools=WEATHER) == [("get_weather", PARIS)]


@pytest.mark.parametrize("function_call", ["get_weather", 5, [1], {"name": 5}])
def test_a_malformed_legacy_function_call_is_an_upstream_error(function_call: Any) -> None:
    events = decoded(run([chunk(function_call=function_call)], tools=WEATHER))
    assert events[-1]["response"]["status"] == "failed"
