"""Stored responses: continued, retrieved, listed and deleted on any replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest
from openai.types.responses import ResponseCompletedEvent, ResponseItem
from pydantic import TypeAdapter

from tests.support import oracle
from tests.support.echo import said, text_of
from tests.support.scripted import BrokenOff, Signal, call, completion, finish, reasoning, text, usage
from tests.support.stored import everything, kept, texts_in

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.responses import Response

    from tests.support.echo import Echo
    from tests.support.servers import Ours
    from tests.support.valkey import Plain

ITEM: TypeAdapter[ResponseItem] = TypeAdapter(ResponseItem)


async def respond(client: AsyncOpenAI, given: str, previous: str | None = None) -> Response:
    return await client.responses.create(model="tiny", input=given, previous_response_id=previous)


async def items_before(client: AsyncOpenAI, response_id: str) -> list[str]:
    """The texts of all input items, oldest first."""
    pages = client.responses.input_items.list(response_id, order="asc", limit=100)
    return [text_of(item) async for item in pages]


# -- continuing ----------------------------------------------------------------------------------------------------------


async def test_a_response_is_continued_on_another_replica(on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo) -> None:
    first = await respond(on_a, "one")
    second = await respond(on_b, "two", first.id)
    third = await respond(on_a, "three", second.id)
    assert said(upstream.messages) == ["one", "one!", "two", "two!", "three"]
    assert third.output_text == "three!"
    assert third.previous_response_id == second.id


async def test_a_response_can_be_continued_on_another_replica_as_soon_as_it_is_completed(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    async def pair(number: int) -> None:
        async with await on_a.responses.create(model="tiny", input=f"a{number}", stream=True) as stream:
            async for event in stream:
                if isinstance(event, ResponseCompletedEvent):
                    answer = await respond(on_b, f"b{number}", event.response.id)
                    assert answer.output_text == f"b{number}!"

    for start in range(0, 100, 10):
        await asyncio.gather(*(pair(number) for number in range(start, start + 10)))
    seen = {tuple(said(asked.json["messages"])) for asked in upstream.requests}
    assert seen >= {(f"a{number}", f"a{number}!", f"b{number}") for number in range(100)}


async def test_a_long_history_is_sent_in_order(on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo) -> None:
    response = await respond(on_a, "0")
    for number in range(1, 30):
        response = await respond((on_a, on_b)[number % 2], str(number), response.id)
    assert said(upstream.messages) == [text for n in range(29) for text in (f"{n}", f"{n}!")] + ["29"]


async def test_an_unknown_or_deleted_previous_response_is_a_400_naming_it(on_a: AsyncOpenAI, upstream: Echo) -> None:
    gone = (await respond(on_a, "one")).id
    await on_a.responses.delete(gone)
    asked = len(upstream.requests)
    for unknown in (gone, gone[:-1] + ("0" if gone[-1] != "0" else "1"), "resp_short", "nonsense", "resp_{}*"):
        with pytest.raises(openai.BadRequestError) as error:
            await respond(on_a, "two", unknown)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
        assert unknown in error.value.message
    assert len(upstream.requests) == asked


async def test_a_failed_response_is_stored_but_cannot_be_continued(a: Ours, on_b: AsyncOpenAI, upstream: Echo) -> None:
    upstream.stream(text("Hel"), BrokenOff(), done=False)
    failed = (await oracle.stream(a)).response
    headers = {"authorization": "Bearer key"}
    assert (await a.http.get(f"/v1/responses/{failed['id']}")).json()["status"] == "failed"
    assert (await a.http.get(f"/v1/responses/{failed['id']}", headers=headers)).status_code == 404
    with pytest.raises(openai.BadRequestError, match=f"{failed['id']}.*'failed'") as error:
        await on_b.with_options(default_headers={"authorization": ""}).responses.create(
            model="tiny", input="on", previous_response_id=failed["id"]
        )
    assert error.value.param == "previous_response_id"


async def test_an_incomplete_response_can_be_continued(on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo) -> None:
    upstream.whole(completion({"content": "Hel"}, "length"))
    cut = await respond(on_a, "say hello")
    assert cut.status == "incomplete"
    await respond(on_b, "go on", cut.id)
    assert said(upstream.messages) == ["say hello", "Hel", "go on"]


# -- retrieving ----------------------------------------------------------------------------------------------------------


async def test_a_retrieved_response_equals_the_streamed_one(a: Ours, b: Ours, upstream: Echo) -> None:
    upstream.stream(
        reasoning("Hm."),
        text("Hé"),
        text("llo 𝄞"),
        call('{"a":', name="f", call_id="c1"),
        call("1}"),
        finish("tool_calls"),
        usage(),
    )
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    streamed = (await oracle.stream(a, tools=tools, metadata={"k": "v"}, instructions="Be kind.", temperature=0.5)).response
    for replica in (a, b):
        assert (await replica.http.get(f"/v1/responses/{streamed['id']}")).json() == streamed
    assert streamed["output_text"] == "Héllo 𝄞"
    assert [item["type"] for item in streamed["output"]] == ["reasoning", "message", "function_call"]


async def test_a_retrieved_response_equals_the_json_answer(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    answered = await respond(on_a, "one")
    assert await on_b.responses.retrieve(answered.id) == answered
    assert answered.store is True  # type: ignore[attr-defined]


async def test_include_accepts_only_values_of_the_openai_api(on_a: AsyncOpenAI, a: Ours) -> None:
    response = await respond(on_a, "one")
    values = ["reasoning.encrypted_content", "message.output_text.logprobs", "file_search_call.results"]
    assert (await on_a.responses.retrieve(response.id, include=values)).id == response.id  # type: ignore[arg-type]
    assert (await on_a.responses.input_items.list(response.id, include=values)).data  # type: ignore[arg-type]
    for path in (f"/v1/responses/{response.id}", f"/v1/responses/{response.id}/input_items"):
        answer = await a.http.get(path, params={"include": "everything"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


async def test_a_foreground_response_cannot_be_streamed_again_or_cancelled(on_a: AsyncOpenAI) -> None:
    response = await respond(on_a, "one")
    with pytest.raises(openai.BadRequestError) as error:
        await on_a.responses.retrieve(response.id, stream=True)
    assert error.value.param == "stream"
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
        await on_a.responses.cancel(response.id)


async def test_a_response_whose_client_disconnects_is_not_stored(a: Ours, upstream: Echo, keys: Plain) -> None:
    answer = upstream.stream(text("Hel"), go_on := Signal(), text("lo"))
    async with a.http.stream("POST", "/v1/responses", json={"model": "tiny", "input": "Hi", "stream": True}) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                break
    await answer.left.wait()
    go_on.set()
    assert kept(keys) == []


# -- store: false --------------------------------------------------------------------------------------------------------


async def test_store_false_writes_no_key(a: Ours, b: Ours, keys: Plain) -> None:
    stored = await oracle.whole(a, input="known")
    before = everything(keys)
    whole = await oracle.whole(b, input="secret", previous_response_id=stored["id"], store=False)
    streamed = (await oracle.stream(a, input="secret", previous_response_id=stored["id"], store=False)).response
    assert (whole["store"], streamed["store"]) == (False, False)
    assert everything(keys) == before
    for document in (whole, streamed):
        assert (await a.http.get(f"/v1/responses/{document['id']}")).status_code == 404
        chained = {"model": "tiny", "input": "on", "previous_response_id": document["id"]}
        assert (await a.http.post("/v1/responses", json=chained)).status_code == 400


# -- deleting ------------------------------------------------------------------------------------------------------------


async def test_deleting_a_response_deletes_all_its_keys(a: Ours, b: Ours, keys: Plain) -> None:
    document = await oracle.whole(a, input="secret")
    assert kept(keys)
    answer = await b.http.delete(f"/v1/responses/{document['id']}")
    assert answer.json() == {"id": document["id"], "object": "response", "deleted": True}
    assert kept(keys) == []
    assert b"secret" not in texts_in(keys)
    for replica in (a, b):
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            gone = await replica.http.request(method, f"/v1/responses/{document['id']}{path}")
            assert gone.status_code == 404
            assert gone.json()["error"]["message"] == f"Response with id '{document['id']}' not found."


async def test_the_official_client_deletes_a_response(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    response = await respond(on_a, "one")
    await on_b.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await on_a.responses.retrieve(response.id)


async def test_continuations_outlive_a_deleted_response_and_unreferenced_texts_are_deleted(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, keys: Plain, upstream: Echo
) -> None:
    root = await respond(on_a, "root")
    left, right = await respond(on_a, "left", root.id), await respond(on_b, "right", root.id)
    await on_b.responses.delete(root.id)
    await respond(on_b, "leaf", left.id)
    assert said(upstream.messages) == ["root", "root!", "left", "left!", "leaf"]
    assert await items_before(on_a, right.id) == ["root", "root!", "right"]
    await on_a.responses.delete(left.id)
    await on_a.responses.delete(right.id)
    assert b"right" not in texts_in(keys)
    assert b"root" in texts_in(keys)


async def test_deleting_all_responses_of_a_tree_leaves_no_key(on_a: AsyncOpenAI, on_b: AsyncOpenAI, keys: Plain) -> None:
    made = [await respond(on_a, "root")]
    for number in range(12):
        made.append(await respond((on_a, on_b)[number % 2], str(number), made[number // 2].id))
    for response in made[::2] + made[1::2]:
        await on_b.responses.delete(response.id)
    assert kept(keys) == []


async def test_a_foreground_response_cannot_be_deleted_before_it_has_completed(a: Ours, b: Ours, upstream: Echo) -> None:
    """It is stored when it ends; until then there is nothing to delete."""
    go_on = Signal()
    upstream.stream(text("Hel"), go_on, text("lo"), finish(), usage())
    lines: list[str] = []
    async with a.http.stream("POST", "/v1/responses", json={"model": "tiny", "input": "Hi", "stream": True}) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if "response.created" in line and line.startswith("data"):
                response_id = line.split('"id":"')[1].split('"')[0]
                assert (await b.http.delete(f"/v1/responses/{response_id}")).status_code == 404
                assert (await b.http.get(f"/v1/responses/{response_id}")).status_code == 404
                go_on.set()
    assert (await b.http.get(f"/v1/responses/{response_id}")).json()["status"] == "completed"


# -- input items ---------------------------------------------------------------------------------------------------------


async def test_input_items_list_the_whole_history_newest_first(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    first = await respond(on_a, "one")
    second = await respond(on_a, "two", first.id)
    page = await on_b.responses.input_items.list(second.id)
    assert [text_of(item) for item in page.data] == ["two", "one!", "one"]
    assert await items_before(on_b, second.id) == ["one", "one!", "two"]
    assert page.has_more is False


async def test_the_official_client_pages_through_input_items(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    given = [{"role": "user", "content": str(number)} for number in range(45)]
    response = await on_a.responses.create(model="tiny", input=given)  # type: ignore[arg-type]
    for order, expected in (("asc", range(45)), ("desc", range(44, -1, -1))):
        for limit in (1, 7, 45, 100):
            pages = on_b.responses.input_items.list(response.id, order=order, limit=limit)  # type: ignore[arg-type]
            assert [int(text_of(item)) async for item in pages] == list(expected)


async def test_input_items_can_be_limited_by_after_and_before(a: Ours, on_a: AsyncOpenAI) -> None:
    given = [{"role": "user", "content": str(number)} for number in range(10)]
    response = await on_a.responses.create(model="tiny", input=given)  # type: ignore[arg-type]
    path, headers = f"/v1/responses/{response.id}/input_items", {"authorization": "Bearer key"}

    async def listed(**query: str | int) -> tuple[list[str], bool]:
        answer = (await a.http.get(path, params=query, headers=headers)).json()
        assert answer["first_id"] == (answer["data"][0]["id"] if answer["data"] else None)
        assert answer["last_id"] == (answer["data"][-1]["id"] if answer["data"] else None)
        return [item["content"][0]["text"] for item in answer["data"]], answer["has_more"]

    ids = [item["id"] for item in (await a.http.get(path, params={"order": "asc"}, headers=headers)).json()["data"]]
    assert await listed(order="asc", after=ids[2], before=ids[6]) == (["3", "4", "5"], False)
    assert await listed(after=ids[6], before=ids[2]) == (["5", "4", "3"], False)
    assert await listed(order="asc", after=ids[2], limit=2) == (["3", "4"], True)
    assert await listed(order="asc", before=ids[2]) == (["0", "1"], False)
    assert await listed(after=ids[0]) == ([], False)
    assert await listed(order="asc", after=ids[8], limit=1) == (["9"], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": -1}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_nowhere"}, "after"),
        ({"before": "msg_nowhere"}, "before"),
    ],
)
async def test_invalid_page_parameters_are_a_400(on_a: AsyncOpenAI, a: Ours, query: dict[str, str | int], param: str) -> None:
    response = await respond(on_a, "one")
    headers = {"authorization": "Bearer key"}
    answer = await a.http.get(f"/v1/responses/{response.id}/input_items", params=query, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_every_input_item_validates_against_the_official_types(a: Ours, b: Ours, upstream: Echo) -> None:
    upstream.whole(
        completion(
            {
                "content": "Let me look.",
                "reasoning": "Hm.",
                "tool_calls": [{"id": "c9", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "tool_calls",
        )
    )
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    first = await oracle.whole(a, input=EVERY_KIND, tools=tools)
    output = {"type": "function_call_output", "call_id": "c9", "output": "42"}
    second = await oracle.whole(b, input=[output], previous_response_id=first["id"])
    items = (await a.http.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"})).json()["data"]
    for item in items:
        ITEM.validate_python(item, strict=True)

    assert [item["type"] for item in items if item["type"] != "reasoning"] == [
        *["message"] * 6,
        "function_call",
        "function_call_output",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert len({item["id"] for item in items}) == len(items)


EVERY_KIND = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
    {"role": "user", "content": "Hi"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
            {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,SGk="},
        ],
    },
    {"type": "reasoning", "id": "rs_mine", "summary": [{"type": "summary_text", "text": "Look first."}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "41"}]},
]
