"""Compaction of histories: on request, above a threshold, and by Codex's `compaction_trigger` item."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import openai
import pytest

from tests.support import oracle
from tests.support.counting import Counting, words
from tests.support.echo import Echo, said
from tests.support.scripted import BrokenOff, Signal, completion, finish, text, usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import Ours, Serve, Start

# openai has no type for the user messages of a compaction, and parses them as messages of the assistant.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

KEYS = ["k" * 33]
SUMMARY = "They spoke of ducks."
PROMPT = "Sum it up."
TALK: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Tell me of ducks."},
    {"role": "assistant", "content": "Ducks swim."},
    {"role": "user", "content": "And geese?"},
]
TRIGGER: Any = {"type": "compaction_trigger"}
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}]


@pytest.fixture
def upstream() -> Echo:
    return Echo()


@pytest.fixture
def ours(start_at: Start) -> Ours:
    return start_at("proxy", auth__secret_keys=KEYS, compaction__prompt=PROMPT)


@pytest.fixture
def other(start_at: Start) -> Ours:
    """Another replica."""
    return start_at("mounted", auth__secret_keys=KEYS)


def summarised(upstream: Echo) -> None:
    counts = {"prompt_tokens": 40, "completion_tokens": 5, "total_tokens": 45}
    upstream.whole(completion({"content": SUMMARY}, counts=counts))


def above(tokens: int) -> Any:
    return [{"type": "compaction", "compact_threshold": tokens}]


# -- POST /v1/responses/compact ------------------------------------------------------------------------------------------------


async def test_a_compaction_can_be_continued_on_another_replica_and_is_not_stored(
    ours: Ours, other: Ours, upstream: Echo
) -> None:
    summarised(upstream)
    compacted = await ours.client.responses.compact(model="tiny", input=TALK[:3])
    assert said(upstream.messages) == ["Be brief.", "Tell me of ducks.", "Ducks swim.", PROMPT]
    assert compacted.object == "response.compaction"
    assert compacted.usage.total_tokens == 45
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert SUMMARY not in compacted.model_dump_json()
    window: Any = [item.model_dump() for item in compacted.output]
    again = await other.client.responses.create(
        model="tiny", input=[TALK[0], *window, {"role": "user", "content": "And geese?"}], store=False
    )
    developer, kept, user = upstream.messages
    assert (developer["content"], kept["content"]) == ("Be brief.", "Tell me of ducks.")
    assert SUMMARY in str(user["content"])
    assert "Ducks swim." not in str(user["content"])
    assert again.output_text.endswith("And geese?!")
    with pytest.raises(openai.NotFoundError):
        await ours.client.responses.retrieve(compacted.id)


async def test_a_compaction_has_all_user_messages_verbatim_and_one_compaction_item(ours: Ours, upstream: Echo) -> None:
    first = (await ours.http.post("/v1/responses", json={"model": "tiny", "input": TALK[:2]})).json()
    for further in (TALK[3:], [{"role": "user", "content": "And swans?"}]):
        summarised(upstream)
        body = {"model": "tiny", "previous_response_id": first["id"], "input": further}
        compacted = (await ours.http.post("/v1/responses/compact", json=body)).json()
        *messages, item = compacted["output"]
        assert (item["type"], item["id"][:4]) == ("compaction", "cmp_")
        texts = ["Tell me of ducks.", further[0]["content"]]
        assert [message["content"] for message in messages] == [[{"type": "input_text", "text": text}] for text in texts]
        assert {(message["type"], message["role"], message["status"]) for message in messages} == {
            ("message", "user", "completed")
        }
        assert len({message["id"] for message in messages if message["id"].startswith("msg_")}) == 2


async def test_the_official_client_can_continue_a_compaction_and_compact_it_again(ours: Ours, upstream: Echo) -> None:
    summarised(upstream)
    compacted = await ours.client.responses.compact(model="tiny", input=TALK)
    window: Any = [*compacted.output, {"role": "user", "content": "And swans?"}]
    await ours.client.responses.create(model="tiny", input=window, store=False)
    seen = "\n".join(said(upstream.messages))
    counts = {text: seen.count(text) for text in ("Tell me of ducks.", "And geese?", SUMMARY, "And swans?", "Ducks swim.")}
    assert list(counts.values()) == [1, 1, 1, 1, 0]
    summarised(upstream)
    again = await ours.client.responses.compact(model="tiny", input=window)
    assert [item.type for item in again.output] == [*["message"] * 3, "compaction"]


async def test_an_unanswered_question_is_kept_verbatim(ours: Ours, upstream: Echo) -> None:
    summarised(upstream)
    compacted = await ours.client.responses.compact(model="tiny", input=TALK, instructions="Speak English.")
    assert said(upstream.messages) == ["Speak English.", "Be brief.", "Tell me of ducks.", "Ducks swim.", PROMPT]
    envelope: Any = compacted.output[-1].model_dump()
    await ours.client.responses.create(model="tiny", input=[envelope], store=False)
    (user,) = upstream.messages
    assert SUMMARY in user["content"]
    assert user["content"].endswith("\n\nAnd geese?")


async def test_reasoning_is_the_summary_if_the_model_writes_no_text(ours: Ours, upstream: Echo) -> None:
    upstream.whole(completion({"content": None, "reasoning": "Ducks it was, and"}, "length"))
    compacted = await ours.client.responses.compact(model="tiny", input=TALK[:3])
    envelope: Any = compacted.output[-1].model_dump()
    await ours.client.responses.create(model="tiny", input=[envelope], store=False)
    assert "Ducks it was, and" in str(upstream.messages)


async def test_an_empty_summary_is_a_502(ours: Ours, upstream: Echo) -> None:
    upstream.whole(completion({"content": ""}))
    with pytest.raises(openai.InternalServerError, match="returned no text") as caught:
        await ours.client.responses.compact(model="tiny", input=TALK[:3])
    assert caught.value.status_code == 502


async def test_a_stored_response_can_be_compacted(ours: Ours, upstream: Echo) -> None:
    first = await ours.client.responses.create(model="tiny", input="Tell me of ducks.")
    summarised(upstream)
    await ours.client.responses.compact(model="tiny", previous_response_id=first.id)
    assert said(upstream.messages) == ["Tell me of ducks.", "Tell me of ducks.!", PROMPT]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": "x"}, "model", "missing_required_parameter"),
        ({"model": "tiny"}, "input", "missing_required_parameter"),
        ({"model": "tiny", "input": []}, "input", "nothing_to_compact"),
        ({"model": "tiny", "input": "x", "stream": True}, "stream", "unknown_parameter"),
        ({"model": "tiny", "input": "x", "image": {"context_compression": "enabled"}}, "image.context_compression", "unsupported_parameter"),
        ({"model": "tiny", "previous_response_id": "resp_nowhere"}, "previous_response_id", "previous_response_not_found"),
        ({"model": "tiny", "input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content", "invalid_encrypted_content"),
    ],
)  # fmt: skip
async def test_an_invalid_compaction_request_is_a_400_naming_the_parameter(
    ours: Ours, body: dict[str, Any], param: str, code: str
) -> None:
    answer = await ours.http.post("/v1/responses/compact", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


async def test_a_blank_summary_is_an_error(ours: Ours, upstream: Echo) -> None:
    upstream.whole(completion({"content": " "}))
    with pytest.raises(openai.InternalServerError, match="returned no text"):
        await ours.client.responses.compact(model="tiny", input=TALK)


async def test_an_upstream_error_keeps_its_status(ours: Ours, upstream: Echo) -> None:
    upstream.whole({"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}, 404)
    with pytest.raises(openai.NotFoundError, match="no such model"):
        await ours.client.responses.compact(model="tiny", input=TALK)


async def test_a_client_that_leaves_ends_the_upstream_call_for_the_summary(ours: Ours, upstream: Echo) -> None:
    answer = upstream.whole(completion({"content": SUMMARY}), before=Signal())
    async with anyio.create_task_group() as group:
        group.start_soon(partial(ours.client.responses.compact, model="tiny", input=TALK))
        await answer.asked.wait()
        group.cancel_scope.cancel()
    await answer.left.wait()


async def test_input_tokens_counts_a_compaction_as_the_model_sees_it(serve: Serve, start_at: Callable[..., Ours]) -> None:
    server = Counting("vllm", "/tokenize")
    client = start_at("proxy", upstream=serve(server, lifespan="off")).client
    compacted = await client.responses.compact(model="tiny", input=TALK)
    window: Any = [item.model_dump() for item in compacted.output]
    counted = await client.responses.input_tokens.count(model="tiny", input=window)
    answered = await client.responses.create(model="tiny", input=window)
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens


# -- envelopes -----------------------------------------------------------------------------------------------------------------


async def test_an_envelope_that_was_altered_or_is_of_another_owner_is_a_400_naming_the_parameter(
    ours: Ours, upstream: Echo
) -> None:
    summarised(upstream)
    compacted = await ours.client.responses.compact(model="tiny", input=TALK)
    envelope: Any = compacted.output[-1].model_dump()
    for change in ({}, {"encrypted_content": envelope["encrypted_content"][:-9] + "AAAAAAAA="}):
        key = "key" if change else "another"
        body: Any = [{"role": "user", "content": "Hi"}, {**envelope, **change}]
        with pytest.raises(openai.BadRequestError) as caught:
            await ours.client.with_options(api_key=key).responses.create(model="tiny", input=body)
        assert caught.value.param == "input[1].encrypted_content"
        assert caught.value.code == "invalid_encrypted_content"


async def test_content_that_a_client_adds_to_a_compaction_item_is_not_sent_to_the_model(ours: Ours, upstream: Echo) -> None:
    summarised(upstream)
    compacted = await ours.client.responses.compact(model="tiny", input=TALK[:3])
    envelope: Any = {**compacted.output[-1].model_dump(), "content": [{"type": "input_text", "text": "forged"}]}
    await ours.client.responses.create(model="tiny", input=[envelope], store=False)
    assert "forged" not in str(upstream.messages)


# -- context_management --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_above_the_threshold_the_output_starts_with_a_compaction_that_continuations_use(
    ours: Ours, other: Ours, upstream: Echo, stream: bool
) -> None:
    for answer in ({"content": "x"}, {"content": SUMMARY}):  # the first request counts the tokens
        if stream:
            upstream.stream(text(answer["content"]), finish(), usage(prompt=2000))
        else:
            upstream.whole(completion(answer, counts=usage(prompt=2000)["usage"]))
    body: Any = {"input": TALK, "context_management": above(100)}
    first = (await oracle.stream(ours, **body)).response if stream else await oracle.whole(ours, **body)
    assert [item["type"] for item in first["output"]] == ["compaction", "message"]
    assert said(upstream.requests[1].json["messages"])[-1] == PROMPT
    developer, user = upstream.messages
    assert developer["content"] == "Be brief."
    assert SUMMARY in user["content"]
    assert user["content"].endswith("\n\nAnd geese?")
    assert first["usage"]["input_tokens"] == 2003

    await oracle.whole(other, input="And swans?", previous_response_id=first["id"])
    assert [message["role"] for message in upstream.messages] == ["developer", "user", "assistant", "user"]
    assert "Ducks swim." not in str(upstream.messages)
    listed = await other.http.get(f"/v1/responses/{first['id']}/input_items")
    assert [item["type"] for item in listed.json()["data"]] == ["message"] * 4


async def test_a_history_far_below_the_threshold_is_neither_compacted_nor_counted(ours: Ours, upstream: Echo) -> None:
    response = await ours.client.responses.create(model="tiny", input=TALK, context_management=above(100_000))
    assert [item.type for item in response.output] == ["message"]
    assert len(upstream.requests) == 1


async def test_a_single_question_is_not_compacted_whatever_its_length(ours: Ours, upstream: Echo) -> None:
    response = await ours.client.responses.create(model="tiny", input="word " * 99, context_management=above(10))
    assert [item.type for item in response.output] == ["message"]
    assert len(upstream.requests) == 1


async def test_the_upstream_tokenizer_decides_whether_the_threshold_is_exceeded(
    serve: Serve, start_at: Callable[..., Ours]
) -> None:
    server = Counting("vllm", "/tokenize")
    client = start_at("proxy", upstream=serve(server, lifespan="off")).client
    for threshold, outputs in ((words({"messages": TALK}), ["message"]), (15, ["compaction", "message"])):
        response = await client.responses.create(model="tiny", input=TALK, context_management=above(threshold))
        assert [item.type for item in response.output] == outputs
    assert server.bodies("/tokenize")


async def test_a_history_that_ends_with_a_tool_output_is_compacted_and_can_be_continued(ours: Ours, upstream: Echo) -> None:
    upstream.whole(completion({"content": "x"}, counts=usage(prompt=2000)["usage"]))
    summarised(upstream)
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "a duck"}
    given: Any = [{"role": "user", "content": "Look."}, call, output]
    response = await ours.client.responses.create(model="tiny", input=given, tools=TOOLS, context_management=above(9))
    asked = upstream.requests[1].json
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "tool", "user"]
    assert "tools" not in asked
    assert [message["role"] for message in upstream.messages] == ["user"]
    assert upstream.requests[2].json["tools"]
    call_again: Any = [{**call, "call_id": "d"}, {**output, "call_id": "d"}]
    await ours.client.responses.create(model="tiny", input=call_again, tools=TOOLS, previous_response_id=response.id)
    assert [message["role"] for message in upstream.messages] == ["user", "assistant", "tool"]


async def test_the_output_of_a_background_response_starts_with_the_compaction(start_at: Start, upstream: Echo) -> None:
    ours = start_at("proxy", redis__url=None, auth__secret_keys=KEYS)  # workers of other tests' servers share the other Valkey
    upstream.stream(text("x"), finish(), usage(prompt=2000))
    upstream.stream(text(SUMMARY), finish(), usage())
    created = ours.client.responses.create(model="tiny", input=TALK, context_management=above(10), background=True, stream=True)
    last = [event async for event in await created][-1]
    assert last.type == "response.completed"
    stored = await ours.client.responses.retrieve(last.response.id)
    assert [item.type for item in stored.output] == ["compaction", "message"]
    assert SUMMARY in str(upstream.messages)


async def test_a_response_fails_if_its_summary_breaks_off_twice(start_at: Start, upstream: Echo) -> None:
    ours = start_at("proxy", upstream__status_grace=0)
    upstream.stream(text("x"), finish(), usage(prompt=2000))
    for _ in range(2):
        upstream.stream(text("They sp"), BrokenOff(), done=False)
    streamed = await oracle.stream(ours, input=TALK, context_management=above(10))
    assert streamed.terminal == "response.failed"
    assert streamed.response["output"] == []


# -- compaction_trigger --------------------------------------------------------------------------------------------------------


async def test_a_compaction_trigger_is_answered_with_only_a_compaction_item(ours: Ours, upstream: Echo) -> None:
    upstream.stream(text(SUMMARY), finish(), usage())
    streamed = await oracle.stream(ours, input=[*TALK[:3], TRIGGER], tools=TOOLS, store=False)
    assert streamed.types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    assert [item["type"] for item in streamed.response["output"]] == ["compaction"]
    assert streamed.response["usage"]["input_tokens"] == 3
    assert said(upstream.messages)[-1] == PROMPT
    assert len(upstream.requests) == 1


async def test_a_history_compacted_by_a_trigger_can_be_continued_and_compacted_again(ours: Ours, upstream: Echo) -> None:
    summarised(upstream)
    first = await ours.client.responses.create(model="tiny", input=[*TALK[:3], TRIGGER])
    second = await ours.client.responses.create(model="tiny", input="And geese?", previous_response_id=first.id)
    upstream.whole(completion({"content": "Of geese too."}))
    third = await ours.client.responses.create(model="tiny", input=[TRIGGER], previous_response_id=second.id)
    asked = upstream.messages
    assert [message["role"] for message in asked] == ["developer", "user", "assistant", "user"]
    assert SUMMARY in str(asked[1])
    await ours.client.responses.create(model="tiny", input="And swans?", previous_response_id=third.id)
    assert "Of geese too." in str(upstream.messages)
    assert SUMMARY not in str(upstream.messages)


async def test_output_constraints_are_not_sent_with_the_request_for_the_summary(start_at: Start, upstream: Echo) -> None:
    summarised(upstream)
    client = start_at("proxy").client
    given: Any = {"extra_body": {"structured_outputs": {"choice": ["yes"]}, "top_k": 3}, "max_output_tokens": 5}
    await client.responses.create(model="tiny", input=[*TALK[:3], TRIGGER], text={"format": {"type": "json_object"}}, **given)
    asked = upstream.requests[-1].json
    assert asked["top_k"] == 3
    assert not asked.keys() & {"structured_outputs", "response_format", "max_completion_tokens"}
    assert "Write a summary" in asked["messages"][-1]["content"]
