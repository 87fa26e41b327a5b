"""Vector stores and files of this server, in requests for an upstream that has stores and files of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.asgi.test_vector_stores import filled
from tests.support.scripted import HELLO, ScriptedUpstream, listing
from tests.support.scripted_responses import ScriptedResponses, item, response

from .test_loop_files import authorized, tool

if TYPE_CHECKING:
    from openai.types import VectorStore

    from tests.support.servers import Ours, Several

__all__ = ["filled"]  # a fixture

FOREIGN = "vs_68a1f0c2d4e88191b0a7c3d5e6f70812"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


@pytest.fixture
def llama() -> ScriptedUpstream:
    return listing(ScriptedUpstream(), "meta/llama")


@pytest.fixture
def qwen() -> ScriptedResponses:
    scripted = ScriptedResponses()
    listing(scripted, "qwen")
    return scripted


@pytest.fixture
def ours(several: Several) -> Ours:
    return authorized(several({}, {"api": "responses"}, files__ingestion_concurrency=0))


async def create(ours: Ours, **body: Any) -> Any:
    return await ours.http.post("/v1/responses", json={"input": "Hi", "model": "qwen", **body})


@pytest.mark.parametrize("options", [{}, {"stream": True}])
async def test_a_store_of_this_server_is_refused_by_a_model_whose_upstream_has_its_own(
    ours: Ours, qwen: ScriptedResponses, filled: VectorStore, options: dict[str, Any]
) -> None:
    search = {"type": "file_search", "vector_store_ids": [FOREIGN, filled.id]}
    answer = await create(ours, tools=[{"type": "web_search"}, search], **options)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[1].vector_store_ids[1]"
    assert not qwen.requests


async def test_a_file_of_this_server_is_refused_for_the_code_interpreter_of_an_upstream(
    ours: Ours, qwen: ScriptedResponses
) -> None:
    file = await ours.client.files.create(file=("a.txt", b"text"), purpose="user_data")
    interpreter = {"type": "code_interpreter", "container": {"type": "auto", "file_ids": [file.id]}}
    answer = await create(ours, tools=[interpreter])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].container.file_ids[0]")
    assert not qwen.requests


@pytest.mark.parametrize(
    "unusual",
    [{"vector_store_ids": [FOREIGN]}, {"vector_store_ids": FOREIGN}, {"vector_store_ids": [None, 1]}, {"container": []}, {}],
)
async def test_all_other_tools_are_passed_to_the_upstream_unchanged(
    ours: Ours, qwen: ScriptedResponses, filled: VectorStore, unusual: dict[str, Any]
) -> None:
    qwen.whole(response(item()))
    passed = {"type": "file_search", **unusual}
    assert (await create(ours, tools=[passed])).status_code == 200
    assert qwen.requests[-1].json["tools"] == [passed]


async def test_a_store_of_another_owner_is_passed_on_like_an_unknown_one(
    ours: Ours, qwen: ScriptedResponses, filled: VectorStore
) -> None:
    qwen.whole(response(item()))
    ours.http.headers["authorization"] = "Bearer another"
    assert (await create(ours, tools=[tool(filled)])).status_code == 200


async def test_a_search_of_this_server_does_not_fall_back_to_an_upstream_with_other_stores(
    several: Several, away: str, qwen: ScriptedResponses, filled: VectorStore
) -> None:
    llama = {"url": [away], "models": ["meta/llama"], "fallbacks": ["qwen:qwen"]}
    ours = authorized(several(llama, {"api": "responses"}, files__ingestion_concurrency=0))
    qwen.whole(response(item()))
    assert (await create(ours, model="llama", tools=[tool(filled)])).status_code == 502
    assert not qwen.requests
    assert (await create(ours, model="llama")).status_code == 200


async def test_files_of_this_server_are_read_for_an_upstream_with_a_responses_api(ours: Ours, qwen: ScriptedResponses) -> None:
    document = await ours.client.files.create(file=("a.txt", b"The ducks of 1987."), purpose="user_data")
    image = await ours.client.files.create(file=("a.png", PNG), purpose="vision")
    theirs = {"type": "input_file", "file_id": "file-6F2ksmvXxt4VdoqmHRw6kL"}
    content = [{"type": "input_file", "file_id": document.id}, {"type": "input_image", "file_id": image.id}, theirs]
    qwen.whole(response(item()))
    first = await create(ours, input=[{"role": "user", "content": content}])
    assert first.status_code == 200
    text, shown, passed = qwen.requests[-1].json["input"][0]["content"]
    assert (text["type"], "The ducks of 1987." in text["text"]) == ("input_text", True)
    assert shown["image_url"].startswith("data:image/png;base64,")
    assert passed == theirs
    qwen.whole(response(item()))
    assert (await create(ours, previous_response_id=first.json()["id"])).status_code == 200
    assert "The ducks of 1987." in str(qwen.requests[-1].json["input"])


async def test_a_chat_upstream_still_searches_the_stores_of_this_server(
    ours: Ours, llama: ScriptedUpstream, filled: VectorStore
) -> None:
    llama.stream(*HELLO)
    assert (await create(ours, model="llama", tools=[tool(filled)])).status_code == 200
    assert llama.requests[-1].json["tools"][0]["function"]["name"] == "file_search"
