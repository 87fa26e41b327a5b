"""`POST /v1/responses/input_tokens`: count the tokens of the chat request that a create would send."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.counting import Counting
from tests.support.metrics import sample_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import Ours, Serve

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
LOOP = [
    {"role": "user", "content": "look at it"},
    {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a black cat"},
]

SERVERS = [
    pytest.param(lambda: Counting("vllm", "/tokenize"), id="vllm"),
    pytest.param(lambda: Counting("sglang", "/tokenize"), id="sglang"),
    pytest.param(lambda: Counting("HF", "/info", "/chat_tokenize"), id="tgi"),
    pytest.param(lambda: Counting("llamacpp", "/props", "/apply-template", "/tokenize"), id="llamacpp"),
    pytest.param(lambda: Counting("system"), id="openai"),
    pytest.param(lambda: Counting("vllm"), id="vllm without its tokenizer"),
]


@pytest.fixture
def before(serve: Serve, start_at: Callable[..., Ours]) -> Callable[[Counting], Ours]:
    """Start the proxy in front of a server."""
    return lambda server: start_at("proxy", upstream=serve(server, lifespan="off"))


@pytest.mark.parametrize("make", SERVERS)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"input": "one two three"}, id="a text"),
        pytest.param({"input": "one", "instructions": "be brief and kind"}, id="instructions"),
        pytest.param({"input": LOOP, "tools": [TOOL]}, id="a tool loop"),
        pytest.param({"input": [{"role": "user", "content": [IMAGE, {"type": "input_text", "text": "what"}]}]}, id="an image"),
        pytest.param({"input": "x", "text": {"format": {"type": "json_object"}}}, id="a format"),
    ],
)
async def test_the_count_equals_the_usage_of_the_create(
    before: Callable[[Counting], Ours], make: Callable[[], Counting], body: dict[str, Any]
) -> None:
    ours = before(make())
    counted = await ours.client.responses.input_tokens.count(model="tiny", **body)
    assert counted.object == "response.input_tokens"
    created = await ours.client.responses.create(model="tiny", **body)
    assert created.usage is not None
    assert counted.input_tokens == created.usage.input_tokens


LONG: Any = [
    {"role": "developer", "content": "be brief"},
    *({"role": role, "content": f"{number} " + "word " * 10} for number in range(20) for role in ("user", "assistant")),
    {"role": "user", "content": "and now"},
]


@pytest.mark.parametrize("make", SERVERS)
async def test_a_truncated_history_is_counted(before: Callable[[Counting], Ours], make: Callable[[], Counting]) -> None:
    server = make()
    server.length = 200
    client = before(server).client
    counted = await client.responses.input_tokens.count(model="tiny", input=LONG, truncation="auto")
    created = await client.responses.create(model="tiny", input=LONG, truncation="auto")
    assert created.usage is not None
    assert 100 < counted.input_tokens == created.usage.input_tokens <= 175  # an eighth is reserved for the answer


async def test_for_a_compaction_the_summary_request_is_counted(before: Callable[[Counting], Ours]) -> None:
    client = before(Counting("vllm", "/tokenize")).client
    items: Any = [*LONG, {"type": "compaction_trigger"}]
    counted = await client.responses.input_tokens.count(model="tiny", input=items)
    created = await client.responses.create(model="tiny", input=items)
    assert created.usage is not None
    assert counted.input_tokens == created.usage.input_tokens > 400


async def test_the_tokenizer_is_called_instead_of_the_model(before: Callable[[Counting], Ours]) -> None:
    server = Counting("vllm", "/tokenize")
    effort: Any = {"effort": "high"}
    await before(server).client.responses.input_tokens.count(model="tiny", input="Hi", tools=[TOOL], reasoning=effort)  # type: ignore[list-item]
    assert not server.bodies("/v1/chat/completions")
    (asked,) = server.bodies("/tokenize")
    assert asked["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["look"]


async def test_without_a_tokenizer_a_completion_of_one_token_is_requested(before: Callable[[Counting], Ours]) -> None:
    server = Counting("system")
    await before(server).http.post("/v1/responses/input_tokens", json={"model": "tiny", "input": "Hi", "max_output_tokens": 99})
    (asked,) = server.bodies("/v1/chat/completions")
    assert (asked["max_completion_tokens"], asked.get("stream")) == (1, None)


async def test_history_is_counted(before: Callable[[Counting], Ours]) -> None:
    client = before(Counting("vllm", "/tokenize")).client
    first = await client.responses.create(model="tiny", input="one two three")
    conversation = await client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Bob"}])
    histories: list[Any] = [{"previous_response_id": first.id}, {"conversation": conversation.id}]
    for history in histories:
        counted = await client.responses.input_tokens.count(model="tiny", input="four", **history)
        created = await client.responses.create(model="tiny", input="four", **history)
        assert counted.input_tokens == created.usage.input_tokens > 5


async def test_counting_stores_nothing(before: Callable[[Counting], Ours]) -> None:
    client = before(Counting("vllm", "/tokenize")).client
    conversation = await client.conversations.create()
    await client.responses.input_tokens.count(model="tiny", input="Hi", conversation=conversation.id)
    assert (await client.conversations.items.list(conversation.id)).data == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "tiny"}, "input"),
        ({"input": "Hi", "temperature": 9}, "temperature"),
        ({"input": "Hi", "personality": "x"}, "personality"),
    ],
)
async def test_an_invalid_request_is_a_400(before: Callable[[Counting], Ours], body: dict[str, Any], param: str) -> None:
    answer = await before(Counting("vllm", "/tokenize")).http.post("/v1/responses/input_tokens", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_unknown_previous_response_is_a_400(before: Callable[[Counting], Ours]) -> None:
    client = before(Counting("vllm", "/tokenize")).client
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.input_tokens.count(model="tiny", previous_response_id="resp_unknown")
    assert caught.value.code == "previous_response_not_found"


async def test_an_upstream_that_reports_no_usage_is_a_502(before: Callable[[Counting], Ours]) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await before(Counting("system", counts=False)).client.responses.input_tokens.count(model="tiny", input="Hi")
    assert caught.value.status_code == 502


async def test_a_failed_count_is_not_recorded_as_a_failed_response(
    start_at: Callable[..., Ours], caplog: pytest.LogCaptureFixture
) -> None:
    def failed() -> float:
        return sample_value("responses_mw_responses_total", {"kind": "json", "status": "failed"}) or 0

    key = f"alice:sha256:{sha256(b'key').hexdigest()}"
    ours = start_at("proxy", upstream="http://127.0.0.1:1", upstream__dialect="openai", auth__api_keys=[key])
    before = failed()
    refused = await ours.http.post(
        "/v1/responses/input_tokens", json={"model": "tiny", "input": "Hi"}, headers={"authorization": "Bearer key"}
    )
    assert refused.status_code == 502
    assert failed() == before
    assert "response resp_" not in caplog.text
