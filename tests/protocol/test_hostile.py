"""Arbitrary JSON: a request gets an answer or an error in our format, and a chunk gives events or an `UpstreamError`."""

from __future__ import annotations

import copy
import typing
from itertools import product
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from responses_mw.errors import APIError, UpstreamError
from responses_mw.protocol.chat.chunks import as_chunk
from responses_mw.protocol.chat.request import to_chat
from responses_mw.protocol.dialects import DIALECTS
from responses_mw.protocol.json_limits import decode
from responses_mw.protocol.request.create import PARAMETERS, REFUSED, CreateResponse, parse
from responses_mw.protocol.request.items import ITEMS
from responses_mw.protocol.request.tools import offered
from responses_mw.protocol.response import document
from responses_mw.protocol.response.builder import ResponseOptions
from tests.protocol.runs import run
from tests.protocol.samples import SAMPLES
from tests.support.replay import check

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
garbage: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6
)


def sometimes(*sane: Any) -> st.SearchStrategy[Any]:
    """Draw one of these values or, less often, any value."""
    return st.sampled_from(sane) | st.sampled_from(sane) | garbage


def objects(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw an object in which any member may be absent."""
    return st.fixed_dictionaries({}, optional=members)


# -- requests ------------------------------------------------------------------------------------------------------------

PART_TYPES = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
parts = objects(
    type=sometimes(*PART_TYPES, "input_image", "input_file", "input_audio", "input_video"),
    text=sometimes("a", ""),
    refusal=sometimes("no"),
    image_url=sometimes("https://a/b.png", "data:image/png;base64,AA=="),
    detail=sometimes("auto", "low"),
    file_data=sometimes("aGk=", "data:text/plain;base64,aGk=", "data:,x", "=", "JVBERi0="),
    filename=sometimes("a.txt"),
    input_audio=sometimes({"data": "", "format": "wav"}),
    video_url=sometimes("https://a/b.mp4"),
    file_id=st.none() | garbage,
    annotations=garbage,
)
contents = sometimes("Hi", "") | st.lists(parts | garbage, max_size=3)
items = objects(
    type=sometimes("message", "function_call", "function_call_output", "reasoning"),
    role=sometimes("user", "assistant", "system", "developer"),
    content=contents,
    summary=contents,
    output=contents,
    id=sometimes("msg_1"),
    status=sometimes("completed", "incomplete", "in_progress"),
    call_id=sometimes("a", "b"),
    name=sometimes("f"),
    arguments=sometimes("{}", "{not json", '{"a": [1]}', ""),
    encrypted_content=sometimes("x"),
    phase=sometimes("commentary"),
)
tools = objects(
    type=sometimes("function", "web_search", "mcp"),
    name=sometimes("f", "g"),
    parameters=sometimes({}, {"type": "object"}),
    description=sometimes("d"),
    strict=sometimes(True),
)
choices = sometimes("auto", "none", "required", {"type": "function", "name": "f"}) | objects(
    type=sometimes("function", "allowed_tools"),
    mode=sometimes("auto", "required"),
    name=sometimes("f"),
    tools=st.lists(objects(type=sometimes("function"), name=sometimes("f", "g")) | garbage, max_size=3) | garbage,
)
sane: dict[str, st.SearchStrategy[Any]] = {
    "model": sometimes("m"),
    "input": contents | st.lists(items | garbage, max_size=5),
    "instructions": sometimes("Be brief."),
    "tools": st.lists(tools | garbage, max_size=3) | garbage,
    "tool_choice": choices,
    "text": objects(
        verbosity=sometimes("low"),
        format=objects(
            type=sometimes("text", "json_object", "json_schema"),
            name=sometimes("n"),
            schema=sometimes({}),
            strict=sometimes(True),
        ),
    ),
    "reasoning": objects(effort=sometimes("none", "low"), summary=sometimes("auto"), context=sometimes("all_turns")),
    "include": st.lists(sometimes("message.output_text.logprobs"), max_size=2) | garbage,
    "metadata": st.dictionaries(st.text(max_size=5), st.text(max_size=5) | garbage, max_size=3) | garbage,
    "stream": sometimes(True, False),
    "top_logprobs": sometimes(0, 3),
    "stop": sometimes("x", ["x"]),
    "chat_template_kwargs": sometimes({"enable_thinking": True}),
}
names = sorted((PARAMETERS.keys() | REFUSED.keys() | {"seed", "x"}) - sane.keys())
bodies = st.builds(
    lambda known, others: {**others, **known},
    st.fixed_dictionaries({"input": sane["input"]}, optional={name: value for name, value in sane.items() if name != "input"}),
    st.dictionaries(st.sampled_from(names), garbage, max_size=2),
)


def _parsed(body: Any) -> CreateResponse | None:
    try:
        return parse(orjson.loads(orjson.dumps(body)))
    except APIError as error:
        assert error.status in (400, 413)
        assert error.param is None or str(error.param) in error.message
        assert orjson.dumps(error.body())
        return None


@settings(max_examples=5 * settings().max_examples)
@given(bodies | garbage)
def test_any_body_is_a_valid_request_or_gets_a_400(body: Any) -> None:
    request = _parsed(body)
    if request is not None:
        created = document.create(request, response_id="resp_1", model="m", created_at=1)
        assert orjson.loads(orjson.dumps(document.whole(created)))["status"] == "in_progress"


@settings(max_examples=5 * settings().max_examples)
@given(body=bodies, dialect=st.sampled_from(sorted(DIALECTS)), first=st.booleans())
def test_any_request_is_converted_to_chat_in_any_dialect_or_gets_a_400(body: Any, dialect: str, first: bool) -> None:
    request = _parsed(body)
    if request is None:
        return
    try:
        items = [item for item in request.items if item["type"] != "item_reference"]  # they are resolved by then
        functions = offered(request.tools, items)
        chat = to_chat(request, items, DIALECTS[dialect], model="m", offered=functions, first_turn=first)
    except APIError as error:
        assert error.status in (400, 413)
        return
    assert "model" in orjson.loads(orjson.dumps(chat))
    assert None not in chat.values()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every member and element."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, member in members for place in ((*path, key), *_places(member, (*path, key)))]


def _with(value: Any, place: tuple[Any, ...], wrong: Any) -> Any:
    """Return a copy of `value` with `wrong` at one place."""
    copied = copy.deepcopy(value)
    *path, last = place
    holder = copied
    for key in path:
        holder = holder[key]
    holder[last] = wrong
    return copied


WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "", "x", [], [None], ["x"], {}, {"type": "x"})


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: str(sample[0].get("type", "message")))
def test_a_valid_item_with_one_arbitrary_value_is_sent_or_gets_a_400(sample: Any) -> None:
    for place, wrong in product(_places(sample), WRONG):
        request = _parsed({"input": _with(sample, place, wrong)})
        if request is None:
            continue
        kept = [item for item in request.items if item["type"] != "item_reference"]  # they are resolved by then
        for dialect in DIALECTS.values():
            try:
                to_chat(request, kept, dialect, model="m", offered=offered(request.tools, kept))
            except APIError as error:
                assert error.status in (400, 413)


def test_the_sample_items_cover_every_type_and_are_valid() -> None:
    kinds = {item.get("type", "message") for sample in SAMPLES for item in sample}
    assert kinds == ITEMS.keys()
    for sample in SAMPLES:
        assert _parsed({"input": sample}) is not None


@pytest.mark.parametrize("name", sorted({*PARAMETERS, *REFUSED, "input", "tools"}))
@given(value=garbage)
def test_any_value_of_any_parameter_is_accepted_or_refused_with_its_path(name: str, value: Any) -> None:
    body = orjson.loads(orjson.dumps({"input": "Hi", name: value}))
    try:
        parse(body)
    except APIError as error:
        assert error.status == 400
        assert error.param is not None
        assert error.param.startswith(name)
        assert error.param in error.message


@pytest.mark.parametrize("place", ["input", "tools", "metadata", "text", "unknown"])
def test_values_nested_too_deeply_are_refused_in_any_place(place: str) -> None:
    body = f'{{"input": "Hi", "{place}": {"[" * 500}{"]" * 500}}}'
    with pytest.raises(APIError, match="deeper than 64") as caught:
        decode(body.encode())
    assert (caught.value.status, caught.value.code) == (413, "request_too_deep")


def test_values_nested_up_to_the_limit_are_accepted() -> None:
    nested: Any = {}
    for _ in range(30):
        nested = {"a": [nested]}
    body = decode(orjson.dumps({"input": "Hi", "x": nested}))
    assert parse(body).extra["x"] == nested


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_deeply_nested_arguments_cause_no_error(dialect: str) -> None:
    arguments = '{"a":' * 900 + "1" + "}" * 900
    history = [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ]
    request = parse({"input": history})
    try:
        assert orjson.dumps(to_chat(request, request.items, DIALECTS[dialect], model="m"))
    except APIError as error:
        assert error.status == 413


# -- chunks --------------------------------------------------------------------------------------------------------------

fragments = objects(
    index=sometimes(0, 1, None),
    id=sometimes("a", "b", ""),
    type=sometimes("function"),
    function=objects(name=sometimes("f", "", None), arguments=sometimes("{", "}", "", None, {})) | garbage,
)
deltas = objects(
    role=sometimes("assistant"),
    content=sometimes("a", " ", "", None) | st.lists(objects(type=st.just("text"), text=sometimes("a")) | garbage, max_size=2),
    reasoning=sometimes("a", None),
    reasoning_content=sometimes("a", None),
    refusal=sometimes("a", None),
    tool_calls=st.lists(fragments | garbage, max_size=3) | fragments | garbage,
)
tokens = objects(token=sometimes("a"), logprob=sometimes(-1.5), bytes=sometimes([97], None), top_logprobs=garbage)
chat_choices = objects(
    index=sometimes(0, None),
    delta=deltas | garbage,
    message=deltas | garbage,
    finish_reason=sometimes("stop", "length", "tool_calls", None),
    logprobs=objects(content=st.lists(tokens | garbage, max_size=2) | garbage) | garbage,
)
usages = objects(
    prompt_tokens=sometimes(1),
    completion_tokens=sometimes(1),
    prompt_tokens_details=objects(cached_tokens=sometimes(1)) | garbage,
)
chunks = objects(choices=st.lists(chat_choices | garbage, max_size=2) | garbage, usage=usages | garbage)
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
options = st.builds(
    ResponseOptions,
    summary=st.booleans(),
    logprobs=st.booleans(),
    think_tag=st.sampled_from([None, "a"]),
    single_call=st.booleans(),
)


@settings(max_examples=5 * settings().max_examples)
@given(st.lists(chunks, max_size=6), options, st.sampled_from(["auto", ALLOWED]))
def test_any_chunks_make_a_response_that_obeys_the_laws(received: list[Any], option: ResponseOptions, choice: Any) -> None:
    check(run(orjson.loads(orjson.dumps(received)), option, tools=[FUNCTION], tool_choice=choice))


@settings(max_examples=5 * settings().max_examples)
@given(chunks, options, st.sampled_from(["auto", ALLOWED]))
def test_any_whole_answer_makes_a_response_or_an_upstream_error(
    completion: dict[str, Any], option: ResponseOptions, choice: Any
) -> None:
    try:
        chunk = as_chunk(orjson.loads(orjson.dumps(completion)))
    except UpstreamError:
        return
    check(run([chunk], option, tools=[FUNCTION], tool_choice=choice))


@pytest.mark.parametrize(
    "delta",
    [
        "text",
        ["text"],
        {"content": 5},
        {"reasoning": 5},
        {"refusal": True},
        {"tool_calls": [1]},
        {"tool_calls": "f"},
        {"tool_calls": [{"function": "f"}]},
        {"tool_calls": [{"function": {"name": 5}}]},
    ],
)
def test_a_malformed_delta_is_an_upstream_error_instead_of_an_empty_answer(delta: Any) -> None:
    response = check(run([{"choices": [{"index": 0, "delta": delta}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]))
    assert response["status"] == "failed"
    assert "malformed" in response["error"]["message"]


@pytest.mark.parametrize(
    "chunk", [{"choices": {"0": {}}}, {"choices": "x"}, {"choices": [5]}, {"choices": True}, {"usage": [1]}, {"usage": 5}]
)
def test_a_malformed_chunk_is_an_upstream_error(chunk: dict[str, Any]) -> None:
    assert check(run([chunk]))["status"] == "failed"


def test_deeply_nested_arguments_of_the_upstream_are_an_upstream_error() -> None:
    nested: typing.Any = {}
    for _ in range(400):
        nested = {"a": nested}
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": nested}}
    assert check(run([{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}]))["status"] == "failed"
    grammar = '{"function":{"_name":"f","a":' + '{"a":' * 400 + "1" + "}" * 402
    call = {"index": 0, "function": {"arguments": grammar}}
    assert (
        check(run([{"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "stop"}]}]))["status"]
        == "failed"
    )
