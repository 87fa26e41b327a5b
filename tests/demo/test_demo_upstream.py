"""The demo upstream over a real socket, seen by the official client's Chat Completions, and byte by byte."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from responses_mw.demo.upstream import demo_upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1},
                "remark": {"type": "string"},
            },
            "required": ["city", "unit", "days"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "getTime", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_upstream(pace=0) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(verify=False, trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


def ask(client: openai.OpenAI, *texts: str, model: str = "demo", **extra: Any) -> Any:
    """The first choice of the answer to these user messages."""
    messages: Any = [{"role": "user", "content": text} for text in texts]
    return client.chat.completions.create(model=model, messages=messages, **extra).choices[0]


def raw_stream(url: str, **body: Any) -> list[Any]:
    """The chunks of a stream, as they are on the wire, and `[DONE]` at the end."""
    response = httpx.post(f"{url}/v1/chat/completions", json={"stream": True, **body}, verify=False)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    assert data.pop() == "[DONE]"
    return [json.loads(chunk) for chunk in data]


def test_the_demo_upstream_leaves_the_log_handlers_of_the_process_alone() -> None:
    """uvicorn's own handlers would write to the standard error of this moment, even after a test has closed it."""
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")]
    before = [list(logger.handlers) for logger in loggers]
    with demo_upstream(pace=0):
        assert [logger.handlers for logger in loggers] == before


# What the models say


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("What is 17 * 23 + 9?", "17 * 23 + 9 = 400."),
        ("and 2+3*4-1/2?", "2 + 3 * 4 - 1 / 2 = 13.5."),
        ("How much is 12.5 times 4 minus 1", "12.5 * 4 - 1 = 49."),
        ("7 divided by 0", "7 / 0 has no value: it divides by zero."),
    ],
)
def test_a_sum_is_calculated(client: openai.OpenAI, text: str, answer: str) -> None:
    assert ask(client, text).message.content == answer


def test_counting_gives_as_many_tokens_as_asked_for(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Please count to 200"}])
    assert completion.choices[0].message.content == " ".join(map(str, range(1, 201)))
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 200)


def test_earlier_messages_of_the_user_are_remembered(client: openai.OpenAI) -> None:
    told = ("My name is Ada Lovelace.", "My favourite colour is green, of course.")
    assert ask(client, *told, "What is my favourite colour?").message.content == "Your favourite colour is green."
    assert ask(client, *told, "What is my name?").message.content == "Your name is Ada Lovelace."
    assert ask(client, "What is my name?").message.content == "You have not told me your name."


def test_any_other_text_is_described_under_its_instructions(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Grüße aus Zürich,"}, {"type": "text", "text": "世界!"}]},
    ]
    answer = client.chat.completions.create(model="demo", messages=messages).choices[0].message.content
    expected = "You wrote 4 words: “Grüße aus Zürich, 世界!” The longest is “Zürich”, the last is “世界”."
    assert answer == f"I was told: “Be brief.” {expected}"
    assert ask(client, "…").message.content == "You wrote no words."


def test_only_the_thinker_shows_its_thoughts(client: openai.OpenAI) -> None:
    assert ask(client, "1 + 1", model="demo-thinker").message.reasoning.startswith("The user wants to know 1 + 1.")
    assert ask(client, "1 + 1").message.reasoning is None


# Tools


def arguments(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]


def test_a_tool_is_called_when_its_name_is_in_the_text_and_its_required_arguments_come_from_there(
    client: openai.OpenAI,
) -> None:
    choice = ask(client, "Show the weather of New York for 3 days in Fahrenheit", tools=[WEATHER, TIME])
    assert arguments(choice) == [("get_weather", {"city": "New York", "unit": "fahrenheit", "days": 3})]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_tools_are_called_together_unless_parallel_calls_are_off(client: openai.OpenAI) -> None:
    text = "Weather and time in Oslo, please"
    both = ask(client, text, tools=[WEATHER, TIME])
    assert [name for name, _ in arguments(both)] == ["get_weather", "getTime"]
    assert len({call.id for call in both.message.tool_calls}) == 2
    one = ask(client, text, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [name for name, _ in arguments(one)] == ["get_weather"]


@pytest.mark.parametrize(
    ("tool_choice", "called", "finish_reason"),
    [
        ("none", [], "stop"),
        ("auto", [], "stop"),
        ("required", ["get_weather"], "tool_calls"),
        ({"type": "function", "function": {"name": "getTime"}}, ["getTime"], "stop"),
    ],
)
def test_tool_choice_is_honoured_where_the_text_asks_for_no_tool(
    client: openai.OpenAI, tool_choice: Any, called: list[str], finish_reason: str
) -> None:
    choice = ask(client, "Hello there", tools=[WEATHER, TIME], tool_choice=tool_choice)
    assert [name for name, _ in arguments(choice)] == called
    assert choice.finish_reason == finish_reason


def test_tool_choice_none_keeps_a_wanted_tool_from_being_called(client: openai.OpenAI) -> None:
    choice = ask(client, "The weather in Rome?", tools=[WEATHER], tool_choice="none")
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("You wrote 4 words")


def test_the_answer_after_tool_calls_is_made_from_their_results(client: openai.OpenAI) -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "getTime", "arguments": "{}"}},
    ]
    messages: Any = [
        {"role": "user", "content": "Weather and time in Oslo?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "half past nine."},
        {"role": "tool", "tool_call_id": "a", "content": '{"temperature": -3, "sky": "grey"}'},
    ]
    tools: Any = [WEATHER, TIME]
    answer = client.chat.completions.create(model="demo", messages=messages, tools=tools).choices[0].message
    assert answer.content == "getTime says: half past nine. get_weather says: temperature -3, sky grey."
    assert answer.tool_calls is None


# Structured output


class Address(BaseModel):
    city: str
    country: str | None


class Person(BaseModel):
    name: str
    born: int
    address: Address
    languages: list[str]
    score: float


def test_a_json_schema_is_filled_with_values_of_the_text(client: openai.OpenAI) -> None:
    text = "Ada Lovelace, born 1815 in London, spoke French; her score was 9.5."
    completion = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": text}], response_format=Person
    )
    person = completion.choices[0].message.parsed
    assert person is not None
    assert (person.name, person.born, person.address.city, person.score) == ("Ada Lovelace", 1815, "London", 9.5)
    assert "French" in person.languages


def test_a_json_object_contains_values_from_the_text(client: openai.OpenAI) -> None:
    choice = ask(client, "Alice paid 12 to Bob", response_format={"type": "json_object"})
    assert json.loads(choice.message.content) == {
        "text": "Alice paid 12 to Bob",
        "names": ["Bob", "Alice"],
        "numbers": [12],
    }


# Ends


def test_max_tokens_cuts_thoughts_text_and_arguments(client: openai.OpenAI) -> None:
    cut = ask(client, "Count to 10", max_tokens=4)
    assert (cut.message.content, cut.finish_reason) == ("1 2 3 4", "length")
    whole = ask(client, "Count to 10", max_completion_tokens=10)
    assert (whole.message.content, whole.finish_reason) == ("1 2 3 4 5 6 7 8 9 10", "stop")
    thought = ask(client, "Count to 10", model="demo-thinker", max_tokens=3)
    assert (thought.message.reasoning, thought.message.content, thought.finish_reason) == ("The user wants", None, "length")
    call = ask(client, "The weather in Rome?", tools=[WEATHER], max_tokens=2)
    assert (call.message.tool_calls[0].function.arguments, call.finish_reason) == ('{"city":', "length")


# The wire


def test_a_stream_opens_with_the_role_and_ends_with_the_finish_reason(url: str) -> None:
    chunks = raw_stream(url, model="demo", messages=[{"role": "user", "content": "Count to 3"}])
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "demo")}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "1"},
        {"content": " 2"},
        {"content": " 3"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_in_a_chunk_without_choices_where_it_is_asked_for(url: str) -> None:
    messages = [{"role": "user", "content": "1 + 1"}]
    options = {"include_usage": True}
    *chunks, last = raw_stream(url, model="demo-thinker", messages=messages, stream_options=options)
    thoughts = [chunk for chunk in chunks if "reasoning" in chunk["choices"][0]["delta"]]
    texts = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(thoughts) + len(texts),
        "total_tokens": 3 + len(thoughts) + len(texts),
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": len(thoughts)},
    }
    assert chunks.index(thoughts[-1]) < chunks.index(texts[0])


def test_a_streamed_call_has_its_name_first_and_then_its_arguments_in_fragments(url: str) -> None:
    messages = [{"role": "user", "content": "The weather in Rome?"}]
    chunks = raw_stream(url, model="demo", messages=messages, tools=[WEATHER])
    first, *fragments = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    call_id = first.pop("id")
    assert call_id.startswith("chatcmpl-tool-")
    assert first == {"type": "function", "index": 0, "function": {"name": "get_weather"}}
    assert len(fragments) > 3
    assert all(fragment.keys() == {"index", "function"} for fragment in fragments)
    joined = "".join(fragment["function"]["arguments"] for fragment in fragments)
    assert json.loads(joined) == {"city": "Rome", "unit": "celsius", "days": 1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["Tell me about streams", "12 * 12", "The weather in Rome?", "weather, time!"])
@pytest.mark.parametrize("model", ["demo", "demo-thinker"])
def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI, model: str, text: str) -> None:
    body: Any = {"model": model, "messages": [{"role": "user", "content": text}], "tools": [WEATHER, TIME]}
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert (streamed.message.content or None) == whole.message.content  # the client adds up from ""
    assert arguments(streamed) == arguments(whole)
    assert streamed.finish_reason == whole.finish_reason


def test_models_and_health_are_served(client: openai.OpenAI, url: str) -> None:
    assert [(model.id, model.owned_by) for model in client.models.list()] == [("demo", "vllm"), ("demo-thinker", "vllm")]
    health = httpx.get(f"{url}/health", verify=False)
    assert (health.status_code, health.content) == (200, b"")


def test_a_pace_spreads_the_tokens_over_time() -> None:
    with demo_upstream(pace=0.02) as url:
        started = time.monotonic()
        raw_stream(url, model="demo", messages=[{"role": "user", "content": "Count to 10"}])
        assert time.monotonic() - started >= 10 * 0.02


# Continuing an answer


def post(url: str, path: str, **body: Any) -> Any:
    response = httpx.post(f"{url}{path}", json=body, verify=False)
    assert response.status_code == 200, response.text
    return response.json()


def unfinished(*texts: str) -> dict[str, Any]:
    """A request to continue the last of these texts, which is the model's."""
    *asked, begun = texts
    messages = [*({"role": "user", "content": text} for text in asked), {"role": "assistant", "content": begun}]
    return {"model": "demo", "messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def test_the_shown_prompt_ends_with_the_text_to_continue_and_has_the_tokens_of_the_usage(url: str) -> None:
    request = unfinished("Count to 9,", "please:  count to 9", "1 2 3")
    shown = post(url, "/tokenize", **request)
    assert shown["count"] == len(shown["tokens"])
    assert post(url, "/detokenize", tokens=shown["tokens"])["prompt"] == "Count to 9,\nplease:  count to 9\n1 2 3"
    usage = post(url, "/v1/chat/completions", **request)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (shown["count"], 6)


def test_a_text_has_the_tokens_that_a_stream_of_it_has(url: str) -> None:
    assert post(url, "/tokenize", prompt="1 2  3\n4 ")["count"] == 5


@pytest.mark.parametrize("model", ["demo", "demo-thinker"])
def test_an_answer_is_continued_without_new_thoughts(url: str, model: str) -> None:
    chunks = raw_stream(url, **unfinished("Count to 9", "1 2 3 4") | {"model": model})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["content"] for delta in deltas if delta.get("content")] == [" 5", " 6", " 7", " 8", " 9"]
    assert not any("reasoning" in delta for delta in deltas)


def test_a_beginning_that_the_model_would_not_write_is_followed_by_its_own_answer(url: str) -> None:
    choice = post(url, "/v1/chat/completions", **unfinished("1 + 1", "Let me think."))["choices"][0]
    assert choice["message"]["content"] == "\n1 + 1 = 2."


def test_each_chunk_has_the_usage_so_far_if_it_is_asked_for(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "1 + 1"}]
    chunks = raw_stream(url, model="demo-thinker", messages=messages, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks]
    thoughts = sum("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"])
    tokens = [usage["completion_tokens"] for usage in usages]
    assert tokens == [*range(tokens[-1] + 1), tokens[-1], tokens[-1]]
    assert [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages] == [min(n, thoughts) for n in tokens]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [{}, {"messages": [1], "tokens": [10**9]}, {"messages": [], "tokens": 1, "continue_final_message": True}],
)
def test_a_malformed_request_for_a_prompt_is_refused(url: str, path: str, body: dict[str, Any]) -> None:
    response = httpx.post(f"{url}{path}", json=body, verify=False)
    if path == "/tokenize" and body.get("messages") == []:
        assert response.json()["count"] == 0
    else:
        assert (response.status_code, response.json()["error"]["type"]) == (400, "BadRequestError")


# Errors


@pytest.mark.parametrize(
    ("change", "status", "error_type", "param", "words"),
    [
        ({"model": "nope"}, 404, "NotFoundError", "model", "The model `nope` does not exist. Valid aliases: demo,"),
        ({"messages": None}, 400, "BadRequestError", None, "malformed: TypeError"),
        ({"tools": [{"type": "function", "name": "flat"}]}, 400, "BadRequestError", None, "malformed: KeyError('function')"),
        (
            {"messages": [{"role": "user", "content": "word " * 4096}]},
            400,
            "BadRequestError",
            "input_tokens",
            "maximum context length is 4096 tokens",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            400,
            "BadRequestError",
            None,
            "Invalid type: nonsense",
        ),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(
    url: str, change: dict[str, Any], status: int, error_type: str, param: str | None, words: str
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], **change}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, verify=False)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert (error["type"], error["param"]) == (error_type, param)
    assert words in error["message"]


def test_a_body_that_is_not_json_is_a_bad_request(url: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", content=b'{"model": "demo", ', verify=False)
    assert response.status_code == 400
    assert "JSONDecodeError" in response.json()["error"]["message"]


def test_an_unknown_path_is_not_found(url: str) -> None:
    response = httpx.post(f"{url}/v1/responses", json={}, verify=False)
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
