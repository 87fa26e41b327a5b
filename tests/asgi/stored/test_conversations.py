"""Conversations: created, retrieved, updated and deleted on any replica, and extended by responses."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.conversations import ConversationItem
from pydantic import TypeAdapter

from responses_mw.state import StateOptions
from tests.asgi.stored.test_responses import EVERY_KIND, respond
from tests.support import oracle
from tests.support.echo import said, text_of
from tests.support.scripted import BrokenOff, Signal, call, completion, finish, text, usage
from tests.support.stored import everything

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.support.echo import Echo
    from tests.support.servers import Ours, Start
    from tests.support.valkey import Plain

ITEM: TypeAdapter[ConversationItem] = TypeAdapter(ConversationItem)


def asked(*texts: str) -> list[Any]:
    return [{"type": "message", "role": "user", "content": text} for text in texts]


async def texts_of(client: AsyncOpenAI, conversation_id: str) -> list[str]:
    """The texts of a conversation's items, oldest first."""
    pages = client.conversations.items.list(conversation_id, order="asc", limit=100)
    return [text_of(item) async for item in pages]


async def respond_in(client: AsyncOpenAI, given: str, conversation_id: str) -> openai.types.responses.Response:
    return await client.responses.create(model="tiny", input=given, conversation=conversation_id)


async def test_items_nested_too_deep_or_with_too_many_tools_are_refused(a: Ours) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    response = await a.http.post("/v1/conversations", json={"items": [{"role": "user", "content": "Hi", "x": deep}]})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_deep")
    tools = {"type": "additional_tools", "tools": [{"type": "function", "name": "f"}] * 2000}
    response = await a.http.post("/v1/conversations", json={"items": [tools]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


# -- conversations -------------------------------------------------------------------------------------------------------


async def test_the_official_client_creates_updates_and_deletes_a_conversation_on_any_replica(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI
) -> None:
    made = await on_a.conversations.create(items=asked("Hello"), metadata={"topic": "demo"})
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
    assert await on_b.conversations.retrieve(made.id) == made
    updated = await on_b.conversations.update(made.id, metadata={"topic": "other"})
    assert (updated.id, updated.created_at, updated.metadata) == (made.id, made.created_at, {"topic": "other"})
    assert await on_a.conversations.retrieve(made.id) == updated
    assert (await on_a.conversations.update(made.id, metadata=None)).metadata == {}
    deleted = await on_a.conversations.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    with pytest.raises(openai.NotFoundError, match=made.id):
        await on_b.conversations.retrieve(made.id)


async def test_deleting_a_conversation_deletes_all_its_keys(on_a: AsyncOpenAI, on_b: AsyncOpenAI, keys: Plain) -> None:
    conversation = await on_a.conversations.create(items=asked("Hello"))
    assert everything(keys)
    await on_b.conversations.delete(conversation.id)
    assert everything(keys) == {}


@pytest.mark.parametrize("conversation_id", ["conv_", "conv_1", "conv_" + "0" * 25, "conv_{x}*", "conv_" + "0" * 500])
async def test_an_unknown_conversation_is_a_404_on_every_route(on_a: AsyncOpenAI, conversation_id: str) -> None:
    for operation in operations(on_a, conversation_id):
        with pytest.raises(openai.NotFoundError) as error:
            await operation
        assert conversation_id in error.value.message


@pytest.mark.parametrize("conversation_id", ["nonsense", "resp_1", "CONV_1"])
async def test_a_malformed_conversation_id_is_a_400_naming_the_prefix(on_a: AsyncOpenAI, conversation_id: str) -> None:
    for operation in operations(on_a, conversation_id):
        with pytest.raises(openai.BadRequestError, match="conv_"):
            await operation


def operations(client: AsyncOpenAI, conversation_id: str, item_id: str = "msg_1") -> list[Any]:
    """One call of each operation on a conversation."""
    return [
        client.conversations.retrieve(conversation_id),
        client.conversations.update(conversation_id, metadata={}),
        client.conversations.delete(conversation_id),
        client.conversations.items.create(conversation_id, items=asked("Hello")),
        first_page(client, conversation_id),
        client.conversations.items.retrieve(item_id, conversation_id=conversation_id),
        client.conversations.items.delete(item_id, conversation_id=conversation_id),
        respond_in(client, "Hello", conversation_id),
    ]


async def first_page(client: AsyncOpenAI, conversation_id: str) -> object:
    return await client.conversations.items.list(conversation_id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": "Hello"}, "items"),
        ({"items": [{"role": "nobody", "content": "Hello"}]}, "items[0].role"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"topic": "demo"}, "topic"),
    ],
)
async def test_an_invalid_conversation_is_a_400(a: Ours, keys: Plain, body: dict[str, Any], param: str) -> None:
    answer = await a.http.post("/v1/conversations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert everything(keys) == {}


async def test_null_clears_the_metadata_and_missing_or_invalid_metadata_is_a_400(a: Ours, on_a: AsyncOpenAI) -> None:
    made = await on_a.conversations.create(metadata={"k" * 64: "v" * 512})
    for body, param in (
        ({}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ):
        answer = await a.http.post(f"/v1/conversations/{made.id}", json=body, headers={"authorization": "Bearer key"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert await on_a.conversations.retrieve(made.id) == made
    assert (await on_a.conversations.update(made.id, metadata=None)).metadata == {}


# -- items ---------------------------------------------------------------------------------------------------------------


async def test_items_are_added_read_and_deleted_by_the_official_client(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    conversation = await on_a.conversations.create(metadata={"topic": "demo"})
    added = await on_a.conversations.items.create(conversation.id, items=asked("one", "two", "three"))
    assert [text_of(item) for item in added.data] == ["one", "two", "three"]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[2].id, False)
    second = added.data[1]
    assert second.id is not None
    assert await on_b.conversations.items.retrieve(second.id, conversation_id=conversation.id) == second
    assert await on_b.conversations.items.delete(second.id, conversation_id=conversation.id) == conversation
    assert await texts_of(on_a, conversation.id) == ["one", "three"]
    with pytest.raises(openai.NotFoundError, match=second.id):
        await on_a.conversations.items.retrieve(second.id, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError, match=second.id):
        await on_a.conversations.items.delete(second.id, conversation_id=conversation.id)


async def test_at_most_twenty_items_are_added_per_request(on_a: AsyncOpenAI) -> None:
    numbers = [str(number) for number in range(21)]
    conversation = await on_a.conversations.create(items=asked(*numbers[:20]))
    await on_a.conversations.items.create(conversation.id, items=asked(*numbers[:20]))
    with pytest.raises(openai.BadRequestError) as error:
        await on_a.conversations.items.create(conversation.id, items=asked(*numbers))
    assert error.value.param == "items"
    with pytest.raises(openai.BadRequestError):
        await on_a.conversations.create(items=asked(*numbers))
    assert await texts_of(on_a, conversation.id) == numbers[:20] * 2


async def test_the_official_client_pages_through_items(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    conversation = await on_a.conversations.create()
    for start in range(0, 45, 15):
        await on_a.conversations.items.create(conversation.id, items=asked(*map(str, range(start, start + 15))))
    for order, expected in (("asc", range(45)), ("desc", range(44, -1, -1))):
        for limit in (1, 7, 45, 100):
            pages = on_b.conversations.items.list(conversation.id, order=order, limit=limit)  # type: ignore[arg-type]
            assert [int(text_of(item)) async for item in pages] == list(expected)
    page = await on_b.conversations.items.list(conversation.id)
    assert [text_of(item) for item in page.data] == [str(n) for n in range(44, 24, -1)]
    assert page.has_more


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"order": "up"}, "order"), ({"after": "msg_1"}, "after")],
)
async def test_invalid_page_parameters_are_a_400(a: Ours, query: dict[str, str | int], param: str) -> None:
    conversation = (await a.http.post("/v1/conversations", json={})).json()
    answer = await a.http.get(f"/v1/conversations/{conversation['id']}/items", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_every_returned_item_validates_against_the_official_types(a: Ours, b: Ours, upstream: Echo) -> None:
    made = (await a.http.post("/v1/conversations", json={"items": EVERY_KIND})).json()
    tool_call = {"id": "c9", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    upstream.whole(completion({"content": "Look.", "reasoning": "Hm.", "tool_calls": [tool_call]}, "tool_calls"))
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    await oracle.whole(b, input="And?", tools=tools, conversation=made["id"])
    output = {"type": "function_call_output", "call_id": "c9", "output": "42"}
    added = (await a.http.post(f"/v1/conversations/{made['id']}/items", json={"items": [output]})).json()
    listed = (await b.http.get(f"/v1/conversations/{made['id']}/items", params={"order": "asc"})).json()
    assert [item["type"] for item in listed["data"]] == [
        *["message"] * 6,
        *["reasoning", "function_call", "function_call_output"],
        *["message", "reasoning", "message", "function_call", "function_call_output"],
    ]
    for item in [*listed["data"], *added["data"]]:
        ITEM.validate_python(item, strict=True)
        assert (await a.http.get(f"/v1/conversations/{made['id']}/items/{item['id']}")).json() == item


async def test_an_added_item_gets_a_new_id_instead_of_the_callers(on_a: AsyncOpenAI) -> None:
    mine: Any = {"type": "message", "id": "msg_mine", "role": "assistant", "status": "completed"}
    item: Any = {**mine, "content": [{"type": "output_text", "text": "Hello", "annotations": []}]}
    conversation = await on_a.conversations.create(items=[item])
    added = await on_a.conversations.items.create(conversation.id, items=[item])
    assert added.data[0].id != "msg_mine"
    assert await texts_of(on_a, conversation.id) == ["Hello", "Hello"]


async def test_an_item_referenced_many_times_is_added_once(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    response = await on_a.responses.create(model="tiny", input="hi")
    references: list[Any] = [{"type": "item_reference", "id": response.output[0].id}] * 20
    conversation = await on_b.conversations.create(items=references)
    assert len((await on_a.conversations.items.list(conversation.id)).data) == 1
    added = await on_b.conversations.items.create(conversation.id, items=references)
    assert len(added.data) == 1


async def test_an_item_reference_adds_the_referenced_item_and_an_unknown_one_is_a_400(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI
) -> None:
    response = await respond(on_a, "one")
    references: list[Any] = [{"type": "item_reference", "id": response.output[0].id}]
    conversation = await on_b.conversations.create(items=references)
    await on_b.conversations.items.create(conversation.id, items=references)
    assert await texts_of(on_a, conversation.id) == ["one!", "one!"]
    for reference in ("msg_nowhere", f"msg_{'0' * 50}0"):
        with pytest.raises(openai.BadRequestError, match=reference):
            await on_a.conversations.items.create(conversation.id, items=[{"type": "item_reference", "id": reference}])
        with pytest.raises(openai.BadRequestError, match=reference):
            await on_a.conversations.create(items=[{"type": "item_reference", "id": reference}])


# -- responses in a conversation -----------------------------------------------------------------------------------------


async def test_a_response_continues_its_conversation_and_adds_to_it(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    conversation = await on_a.conversations.create(items=asked("zero"))
    first = await respond_in(on_a, "one", conversation.id)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    await on_b.responses.create(model="tiny", input="two", conversation={"id": conversation.id})
    assert said(upstream.messages) == ["zero", "one", "one!", "two"]
    assert await texts_of(on_b, conversation.id) == ["zero", "one", "one!", "two", "two!"]
    assert (await on_b.responses.retrieve(first.id)) == first


async def test_the_items_are_stored_when_the_client_receives_response_completed(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    conversation = await on_a.conversations.create()
    async with await on_a.responses.create(model="tiny", input="Hi", conversation=conversation.id, stream=True) as stream:
        async for event in stream:
            if event.type == "response.completed":
                assert await texts_of(on_b, conversation.id) == ["Hi", "Hi!"]


async def test_a_conversation_together_with_a_previous_response_is_a_400(on_a: AsyncOpenAI, upstream: Echo) -> None:
    conversation = await on_a.conversations.create()
    response = await respond(on_a, "one")
    with pytest.raises(openai.BadRequestError):
        await on_a.responses.create(model="tiny", input="two", conversation=conversation.id, previous_response_id=response.id)
    assert len(upstream.requests) == 1


async def test_an_unstored_response_adds_no_items_to_its_conversation(on_a: AsyncOpenAI, upstream: Echo) -> None:
    conversation = await on_a.conversations.create(items=asked("zero"))
    await on_a.responses.create(model="tiny", input="one", conversation=conversation.id, store=False)
    assert said(upstream.messages) == ["zero", "one"]
    assert await texts_of(on_a, conversation.id) == ["zero"]


async def test_a_full_conversation_is_a_413_before_the_upstream_is_called(
    start_at: Start, keys: Plain, upstream: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.state_opening.StateOptions", partial(StateOptions, chain_items=4))
    client = start_at("proxy").client
    conversation = await client.conversations.create(items=asked("zero"))
    await respond_in(client, "one", conversation.id)
    with pytest.raises(openai.APIStatusError, match="is full") as error:
        await respond_in(client, "two", conversation.id)
    assert error.value.status_code == 413
    assert len(upstream.requests) == 1
    await client.responses.create(model="tiny", input="two", conversation=conversation.id, store=False)
    assert await texts_of(client, conversation.id) == ["zero", "one", "one!"]


async def test_concurrent_responses_add_their_items_in_contiguous_blocks(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    conversation = await on_a.conversations.create()
    names = [str(number) for number in range(20)]
    await asyncio.gather(*(respond_in((on_a, on_b)[n % 2], name, conversation.id) for n, name in enumerate(names)))
    texts = await texts_of(on_a, conversation.id)
    assert sorted(texts[::2]) == sorted(names)
    assert texts[1::2] == [f"{name}!" for name in texts[::2]]


async def test_a_conversation_deleted_during_a_run_is_not_created_again(
    a: Ours, on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    conversation = await on_a.conversations.create(items=asked("zero"))
    go_on = Signal()
    upstream.stream(text("Hel"), go_on, text("lo"), finish(), usage())
    async with on_a.responses.stream(model="tiny", input="one", conversation=conversation.id) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta" and not go_on.is_set():
                await on_b.conversations.delete(conversation.id)
                go_on.set()
        response = await stream.get_final_response()
    assert response.status == "completed"
    with pytest.raises(openai.NotFoundError):
        await on_b.conversations.retrieve(conversation.id)
    assert (await on_b.responses.retrieve(response.id)).output_text == "Hello"


async def test_continuing_a_response_of_a_conversation_uses_the_history_it_had(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    conversation = await on_a.conversations.create(items=asked("zero"))
    first = await respond_in(on_a, "one", conversation.id)
    await respond_in(on_a, "elsewhere", conversation.id)
    await respond(on_b, "two", first.id)
    assert said(upstream.messages) == ["zero", "one", "one!", "two"]
    assert "two" not in await texts_of(on_a, conversation.id)


async def test_a_conversation_continues_without_the_items_of_a_response_that_failed_after_a_call(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    conversation = await on_a.conversations.create(items=asked("zero"))
    first, second = call("{}", name="f", call_id="c1"), call("{", name="f", call_id="c2", index=1)
    upstream.stream(first, second, BrokenOff(), done=False)
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    events = await on_a.responses.create(model="tiny", input="one", conversation=conversation.id, tools=tools, stream=True)
    assert [event.type async for event in events][-1] == "response.failed"
    await respond_in(on_b, "two", conversation.id)
    assert said(upstream.messages) == ["zero", "two"]
