"""`POST /v1/responses` from end to end: the answer to the client and the request to the upstream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio.to_thread
import openai
import pytest
from pydantic import BaseModel

from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, TINY, call, completion, delta, finish, frame, reasoning, text, usage

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PARIS = '{"city": "Paris"}'


def without_ids(value: Any) -> Any:
    """A document without the members that differ between runs."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        fleeting = {"id", "created_at", "completed_at"}
        return {name: without_ids(member) for name, member in value.items() if name not in fleeting}
    return value


@pytest.mark.both_mounts
async def test_the_official_client_gets_an_answer(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    response = await ours.client.responses.create(model="tiny", input="Hi", instructions="Be kind.")
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == 5
    assert upstream.requests[0].json == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    }


@pytest.mark.both_mounts
async def test_the_official_synchronous_client_gets_an_answer_and_a_stream(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    upstream.stream(*HELLO)

    def ask() -> tuple[str, list[str]]:
        response = ours.sync_client.responses.create(model="tiny", input="Hi")
        with ours.sync_client.responses.stream(model="tiny", input="Hi") as events:
            return response.output_text, [event.delta for event in events if event.type == "response.output_text.delta"]

    assert await anyio.to_thread.run_sync(ask) == ("Hello", ["Hel", "lo"])


@pytest.mark.both_mounts
async def test_the_official_asynchronous_client_follows_a_stream(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    async with ours.client.responses.stream(model="tiny", input="Hi") as events:
        deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
        final = await events.get_final_response()
    assert (deltas, final.output_text) == (["Hel", "lo"], "Hello")


async def test_structured_output_is_parsed_by_the_official_client(ours: Ours, upstream: ScriptedUpstream) -> None:
    class City(BaseModel):
        name: str

    upstream.whole(completion({"content": '{"name": "Paris"}'}))
    response = await ours.client.responses.parse(model="tiny", input="Where?", text_format=City)
    assert response.output_parsed == City(name="Paris")
    assert upstream.requests[0].json["response_format"]["json_schema"]["name"] == "City"


async def test_a_call_is_returned_to_the_client_and_its_output_is_sent_upstream(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(call("", name="get_weather", call_id="call_1"), call(PARIS), finish("tool_calls"))
    upstream.stream(*HELLO)
    first = await stream(ours, tools=[WEATHER])
    [item] = first.response["output"]
    assert (item["name"], item["arguments"], item["call_id"], item["status"]) == ("get_weather", PARIS, "call_1", "completed")
    question = {"role": "user", "content": "Weather?"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    await stream(ours, tools=[WEATHER], input=[question, item, output])
    _, assistant, tool = upstream.requests[1].json["messages"]
    assert assistant["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PARIS}
    assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


@pytest.mark.parametrize(
    ("chunks", "message", "reason"),
    [
        pytest.param([text("Hello")], {"content": "Hello"}, "stop", id="text"),
        pytest.param([reasoning("Hm."), text("Hello")], {"reasoning": "Hm.", "content": "Hello"}, "stop", id="reasoning"),
        pytest.param([text("Hel")], {"content": "Hel"}, "length", id="cut"),
        pytest.param([text("Hel")], {"content": "Hel"}, "content_filter", id="filtered"),
        pytest.param([delta(refusal="No.")], {"content": None, "refusal": "No."}, "stop", id="refusal"),
        pytest.param(
            [call(PARIS, name="get_weather", call_id="call_1"), call("{}", name="get_weather", call_id="call_2", index=1)],
            {
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}},
                    {"id": "call_2", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
                ],
            },
            "tool_calls",
            id="calls",
        ),
    ],
)
async def test_json_and_stream_give_the_same_document(
    ours: Ours, upstream: ScriptedUpstream, chunks: list[dict[str, Any]], message: dict[str, Any], reason: str
) -> None:
    upstream.stream(*chunks, finish(reason), usage())
    upstream.whole(completion(message, reason))
    body: dict[str, Any] = {"tools": [WEATHER], "metadata": {"a": "b"}, "temperature": 0.5, "reasoning": {"effort": "low"}}
    streamed = (await stream(ours, **body)).response
    document = await whole(ours, **body)
    assert document.pop("output_text") == "".join(
        part.get("text", "") for item in document["output"] if item["type"] == "message" for part in item["content"]
    )
    streamed.pop("output_text", None)
    assert without_ids(document) == without_ids(streamed)


@pytest.mark.both_mounts
async def test_a_json_completion_is_streamed_to_a_streaming_client(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    streamed = await stream(ours)
    assert (streamed.terminal, streamed.deltas) == ("response.completed", ["Hello"])


@pytest.mark.both_mounts
async def test_a_chat_stream_is_collected_for_a_json_client(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    assert (await whole(ours))["output_text"] == "Hello"


async def test_only_a_streaming_create_requests_a_chat_stream_with_usage(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    upstream.stream(*HELLO)
    await whole(ours)
    await stream(ours)
    assert "stream" not in upstream.requests[0].json
    assert upstream.requests[1].json["stream"] is True
    assert upstream.requests[1].json["stream_options"] == {"include_usage": True}


async def test_reasoning_in_the_configured_think_tag_is_separated_from_the_text(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours = start(upstream__think_tag="think")
    upstream.stream(text("<thi"), text("nk>Hm.</think>"), text("Hello"), finish())
    streamed = await stream(ours)
    assert [item["type"] for item in streamed.response["output"]] == ["reasoning", "message"]
    assert streamed.deltas == ["Hm.", "Hello"]


# -- the model -----------------------------------------------------------------------------------------------------------


async def test_a_missing_model_defaults_to_the_only_model_of_the_upstream(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    response = await ours.http.post("/v1/responses", json={"input": "Hi", "model": None, "stream": True})
    assert response.status_code == 200
    assert '"model":"tiny"' in response.text
    assert upstream.requests[0].json["model"] == "tiny"


async def test_a_missing_model_is_a_400_naming_the_models_if_there_are_several(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.models = [TINY, {**TINY, "id": "huge"}]
    response = await ours.http.post("/v1/responses", json={"input": "Hi"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert "tiny, huge" in response.json()["error"]["message"]
    assert upstream.requests == []


async def test_adapters_are_ignored_when_the_default_model_is_chosen(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.models = [TINY, {**TINY, "id": "lora", "parent": "tiny"}]
    upstream.whole(completion({"content": "Hello"}))
    assert (await whole(ours, model=None))["model"] == "tiny"


@pytest.mark.parametrize("model", ["tiny", "some/other"])
async def test_the_requested_model_is_sent_upstream_and_returned(ours: Ours, upstream: ScriptedUpstream, model: str) -> None:
    upstream.whole(completion({"content": "Hello"}))
    assert (await whole(ours, model=model))["model"] == model
    assert upstream.requests[0].json["model"] == model


# -- parameters and forms of answers -------------------------------------------------------------------------------------


async def test_extra_parameters_are_forwarded_to_the_upstream(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    await ours.client.responses.create(
        model="tiny", input="Hi", extra_body={"top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["x"]}
    )
    asked = upstream.requests[0].json
    assert {name: asked[name] for name in ("top_k", "min_p", "seed", "stop")} == {
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x"],
    }


async def test_requested_logprobs_are_returned(ours: Ours, upstream: ScriptedUpstream) -> None:
    token = {
        "token": "Hi",
        "logprob": -0.5,
        "bytes": [72, 105],
        "top_logprobs": [{"token": "Hi", "logprob": -0.5, "bytes": None}],
    }
    chunk = text("Hi")
    chunk["choices"][0]["logprobs"] = {"content": [token]}
    upstream.stream(chunk, finish())
    streamed = await stream(ours, top_logprobs=1, include=["message.output_text.logprobs"])
    [part] = streamed.response["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["Hi"]
    assert part["logprobs"][0]["top_logprobs"][0]["bytes"] == [72, 105]


async def test_an_empty_answer_is_an_empty_message(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": ""}))
    upstream.stream(delta(role="assistant", content=""), finish())
    assert (await whole(ours))["output"][0]["content"][0]["text"] == ""
    assert (await stream(ours)).response["output"][0]["type"] == "message"


@pytest.mark.both_mounts
async def test_an_sse_stream_may_have_any_line_endings_comments_and_multiple_data_lines(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    one, two, end = (frame(piece).decode() for piece in (text("é"), text("…"), finish()))
    upstream.stream(
        b"\xef\xbb\xbf: ping\r\n\r\n",
        one.encode().replace(b"\n", b"\r\n")[:-7],
        one.encode().replace(b"\n", b"\r\n")[-7:],
        two.replace("\n", "\r").replace(',"object"', ',\rdata: "object"').encode(),
        b"event: chunk\nid: 1\nretry: 5\n" + end.encode(),
    )
    assert (await stream(ours)).deltas == ["é", "…"]


@pytest.mark.both_mounts
async def test_the_content_type_is_case_insensitive(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO, headers={"content-type": "Text/Event-Stream"})
    assert (await whole(ours))["output_text"] == "Hello"


async def test_an_unstored_response_has_store_false(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    document = await whole(ours, store=False)
    assert document["store"] is False


@pytest.mark.both_mounts
async def test_the_official_client_raises_bad_request_error_with_param_and_code(ours: Ours, upstream: ScriptedUpstream) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ours.client.responses.create(model="tiny", input=[{"type": "message", "role": "user"}])  # type: ignore[list-item]
    assert (caught.value.param, caught.value.code) == ("input[0].content", "missing_required_parameter")
    assert upstream.requests == []
