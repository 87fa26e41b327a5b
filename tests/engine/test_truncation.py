"""`truncation: auto` with servers that report their context length, and with servers that only refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.counting import Counting, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import Ours, Serve

LENGTH = 200
OLD = [
    item
    for number in range(20)
    for item in (
        {"role": "user", "content": f"question {number} " + "word " * 10},
        {"role": "assistant", "content": "answer " * 10},
    )
]
HISTORY: Any = [{"role": "developer", "content": "be brief"}, *OLD, {"role": "user", "content": "and now"}]

VLLM = "This model's maximum context length is {length} tokens. However, your prompt contains at least {count} input tokens, which ..."
SGLANG = "The input ({count} tokens) is longer than the model's context length ({length} tokens)."
LLAMACPP = "request ({count} tokens) exceeds the available context size ({length} tokens), try increasing it"
TGI = "`inputs` tokens + `max_new_tokens` must be <= {length}. Given: {count} `inputs` tokens and 1 `max_new_tokens`"
OPENAI = (
    "This model's maximum context length is {length} tokens. However, you requested {count} tokens ({count} in the messages)."
)

SERVERS = [
    pytest.param("vllm", ["/tokenize"], VLLM, id="vllm"),
    pytest.param("sglang", ["/tokenize"], SGLANG, id="sglang"),
    pytest.param("HF", ["/info", "/chat_tokenize"], TGI, id="tgi"),
    pytest.param("llamacpp", ["/props", "/apply-template", "/tokenize"], LLAMACPP, id="llamacpp"),
    pytest.param("system", [], OPENAI, id="openai"),
]


@pytest.fixture
def before(serve: Serve, start_at: Callable[..., Ours]) -> Callable[[Counting], Ours]:
    return lambda server: start_at("proxy", upstream=serve(server, lifespan="off"))


@pytest.mark.parametrize(("owner", "paths", "refusal"), SERVERS)
@pytest.mark.parametrize("tells_length", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_history_that_is_too_long_is_truncated_until_it_fits(
    before: Callable[[Counting], Ours], owner: str, paths: list[str], refusal: str, tells_length: bool, stream: bool
) -> None:
    server = Counting(owner, *paths, length=LENGTH)
    server.tells_length, server.refusal = tells_length, refusal
    ours = before(server)
    body = {"model": "tiny", "input": HISTORY, "max_output_tokens": 20, "truncation": "auto", "stream": stream}
    answer = await ours.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "Hello" in answer.text
    shown = server.bodies("/v1/chat/completions")[-1]
    texts = [message["content"] for message in shown["messages"]]
    texts = [text if isinstance(text, str) else text[0]["text"] for text in texts]
    assert (texts[0], texts[-1]) == ("be brief", "and now")
    assert LENGTH / 2 < words(shown) <= LENGTH - 20
    attempts = 1 if tells_length and owner != "system" else 2
    assert len(server.bodies("/v1/chat/completions")) == attempts


async def test_a_history_that_is_too_long_is_an_error_without_truncation(before: Callable[[Counting], Ours]) -> None:
    server = Counting("vllm", "/tokenize", length=LENGTH)
    with pytest.raises(openai.BadRequestError) as caught:
        await before(server).client.responses.create(model="tiny", input=HISTORY)
    assert caught.value.code == "context_length_exceeded"
    assert not server.bodies("/tokenize")


@pytest.mark.parametrize("tells_length", [True, False])
async def test_a_history_that_cannot_be_truncated_enough_is_an_error(
    before: Callable[[Counting], Ours], tells_length: bool
) -> None:
    server = Counting("vllm", "/tokenize", length=LENGTH)
    server.tells_length = tells_length
    client = before(server).client
    too_long: Any = [[*OLD, {"role": "user", "content": "word " * 300}], "word " * 300]
    for text in too_long:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input=text, truncation="auto")
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("told", [VLLM, "max_model_len is {length}"])
async def test_a_history_is_truncated_without_a_tokenizer(before: Callable[[Counting], Ours], told: str) -> None:
    server = Counting("vllm", length=LENGTH)
    server.refusal = told
    response = await before(server).client.responses.create(model="tiny", input=HISTORY, truncation="auto")
    assert response.output_text == "Hello"
    assert response.usage is not None
    assert LENGTH / 4 < response.usage.input_tokens < LENGTH


async def test_truncation_leaves_room_for_the_answer(before: Callable[[Counting], Ours]) -> None:
    client = before(Counting("vllm", "/tokenize", length=LENGTH)).client
    response = await client.responses.create(model="tiny", input=HISTORY, truncation="auto")
    assert response.usage is not None
    assert LENGTH / 2 < response.usage.input_tokens <= LENGTH * 7 / 8


async def test_an_unrelated_error_of_the_upstream_is_passed_on(before: Callable[[Counting], Ours]) -> None:
    server = Counting("system", length=LENGTH)
    server.refusal = "no such thing"
    with pytest.raises(openai.BadRequestError, match="no such thing"):
        await before(server).client.responses.create(model="tiny", input=HISTORY, truncation="auto")
    assert len(server.bodies("/v1/chat/completions")) == 1


async def test_a_history_that_certainly_fits_is_not_counted(before: Callable[[Counting], Ours]) -> None:
    server = Counting("vllm", "/tokenize", length=100_000)
    response = await before(server).client.responses.create(model="tiny", input=HISTORY, truncation="auto")
    assert response.truncation == "auto"
    assert not server.bodies("/tokenize")


async def test_a_truncated_history_is_stored_whole(before: Callable[[Counting], Ours]) -> None:
    server = Counting("vllm", "/tokenize", length=LENGTH)
    client = before(server).client
    first = await client.responses.create(model="tiny", input=HISTORY, truncation="auto")
    listed = [item async for item in client.responses.input_items.list(first.id, limit=100)]
    assert len(listed) == len(HISTORY)
    again = await client.responses.create(model="tiny", input="go on", previous_response_id=first.id, truncation="auto")
    assert again.output_text == "Hello"


@pytest.mark.parametrize(
    "refusal",
    [
        "max_model_len is " + "9" * 5000,
        "max_model_len is 5, and the messages resulted in " + "9" * 5000 + " tokens",
        "max_model_len is 0, and the messages resulted in 0 tokens",
    ],
)
async def test_a_refusal_with_absurd_numbers_is_still_context_length_exceeded(
    before: Callable[[Counting], Ours], refusal: str
) -> None:
    server = Counting("system", length=5)
    server.refusal = refusal
    with pytest.raises(openai.BadRequestError) as caught:
        await before(server).client.responses.create(model="tiny", input=HISTORY, truncation="auto")
    assert caught.value.code == "context_length_exceeded"


async def test_the_number_of_models_with_a_cached_context_length_is_limited(
    before: Callable[[Counting], Ours], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.upstream.context_window._MAX_MODELS", 2)
    server = Counting("vllm", "/tokenize", length=LENGTH)
    client = before(server).client

    async def listed(model: str) -> int:
        """Return how often a request lists the models."""
        count = len(server.bodies("/v1/models"))
        await client.responses.create(model=model, input="Hi", truncation="auto")
        return len(server.bodies("/v1/models")) - count

    assert [await listed(model) > 0 for model in ("a", "b", "a", "c", "a")] == [True, True, False, True, True]


class Odd(Counting):
    """A server whose page at `path` does not have the documented form."""

    def __init__(self, owner: str, path: str, page: Any) -> None:
        super().__init__(owner, path, "/tokenize", length=LENGTH)
        self.odd = {path: page}

    def _answer(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        return (200, self.odd[path]) if path in self.odd else super()._answer(path, asked)


async def test_a_tokenizer_that_never_counts_fewer_tokens_is_asked_a_few_times(before: Callable[[Counting], Ours]) -> None:
    class Stuck(Counting):
        def _answer(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
            if path == "/tokenize":  # first too many, and then always one too many
                count = LENGTH if len(self.bodies(path)) == 1 else LENGTH - LENGTH // 8 + 1
                return 200, {"tokens": [*range(count)]}
            return super()._answer(path, asked)

    server = Stuck("vllm", "/tokenize", length=LENGTH)
    body = {"model": "tiny", "input": [*OLD * 5, *HISTORY], "truncation": "auto"}
    assert (await before(server).http.post("/v1/responses", json=body)).status_code == 200
    assert len(server.bodies("/tokenize")) <= 12


@pytest.mark.parametrize(
    ("owner", "path", "page"),
    [
        ("llamacpp", "/props", ["n_ctx"]),
        ("llamacpp", "/props", {"default_generation_settings": ["n_ctx"]}),
        ("llamacpp", "/props", {"default_generation_settings": {"n_ctx": "200"}}),
        ("llamacpp", "/props", {"default_generation_settings": {"n_ctx": True}}),
        ("vllm", "/v1/models", {"data": [{"id": "tiny", "owned_by": "vllm", "parent": ["base"]}]}),
        ("vllm", "/v1/models", {"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": {"n": 200}}]}),
        ("HF", "/info", {"model_id": "tiny", "max_total_tokens": [200]}),
    ],
)
async def test_a_length_of_a_wrong_type_counts_as_not_reported(
    before: Callable[[Counting], Ours], owner: str, path: str, page: Any
) -> None:
    response = await before(Odd(owner, path, page)).client.responses.create(model="tiny", input=HISTORY, truncation="auto")
    assert response.output_text == "Hello"
    assert response.usage is not None
    assert LENGTH / 4 < response.usage.input_tokens < LENGTH
