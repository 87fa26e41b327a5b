"""Conversations, their items, and their responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from responses_mw.errors import BadRequest
from responses_mw.ids import TAG_LENGTH, RunIds, new_tag, random_part
from responses_mw.state import Conversation, Damaged, Missing, NewerRecord, OverBound, State, StateOptions
from tests.support.stored import ALICE, BOB, continued, everything, history, kept, made, message, respond, texts

if TYPE_CHECKING:
    from responses_mw.protocol.types import Item
    from tests.support.valkey import Plain


def some_items(conversation_id: str, *said: str) -> list[Item]:
    tag = conversation_id.removeprefix("conv_")
    return [message(RunIds(tag).item("msg"), "user", text) for text in said]


async def converse(state: State, *said: str, owner: str = ALICE) -> str:
    """Create a conversation with these texts, and return its id."""
    conversation = Conversation(f"conv_{new_tag()}", 1_700_000_000, {"topic": "tea"})
    await state.conversations.create(conversation, some_items(conversation.id, *said), owner)
    return conversation.id


async def listed(state: State, conversation_id: str) -> list[str]:
    return texts((await state.conversations.items(conversation_id, ALICE, limit=100, order="asc")).items)


async def test_get_returns_a_conversation_as_it_was_created(state: State) -> None:
    conversation_id = await converse(state, "one", "two")
    conversation = await state.conversations.get(conversation_id, ALICE)
    assert conversation == Conversation(conversation_id, 1_700_000_000, {"topic": "tea"})
    assert await listed(state, conversation_id) == ["one", "two"]


async def test_decoding_a_conversation_of_many_small_values_stops_at_its_memory_limit(state: State) -> None:
    conversation_id = await converse(state, "hi")
    for _ in range(10):
        [item] = some_items(conversation_id, "more")
        await state.conversations.append(conversation_id, [{**item, "more": [[]] * 10_000}], ALICE)
    bounded = State(state.client, StateOptions(chain_memory=5_000_000))
    with pytest.raises(OverBound):
        await bounded.conversations.chain(conversation_id, ALICE)
    assert len((await bounded.conversations.items(conversation_id, ALICE, limit=2)).items) == 2
    assert len((await state.conversations.chain(conversation_id, ALICE)).items) == 11


async def test_a_repeated_create_changes_nothing(state: State, server: Plain) -> None:
    conversation = Conversation(f"conv_{new_tag()}", 1, {})
    items = some_items(conversation.id, "one", "two")
    bounded = State(state.client, StateOptions(chain_items=2))
    await bounded.conversations.create(conversation, items, ALICE)
    before = everything(server)
    await bounded.conversations.create(conversation, items, ALICE)
    await bounded.conversations.append(conversation.id, items, ALICE)
    assert everything(server) == before


async def test_an_update_replaces_only_the_metadata(state: State) -> None:
    conversation_id = await converse(state, "one")
    updated = await state.conversations.update(conversation_id, {"topic": "coffee"}, ALICE)
    assert updated == await state.conversations.get(conversation_id, ALICE)
    assert updated == Conversation(conversation_id, 1_700_000_000, {"topic": "coffee"})
    assert await listed(state, conversation_id) == ["one"]


async def test_deleting_a_conversation_deletes_all_its_items(state: State, server: Plain) -> None:
    conversation_id = await converse(state, "one", "two")
    await state.conversations.delete(conversation_id, ALICE)
    assert server.keys("*") == []
    with pytest.raises(Missing) as missing:
        await state.conversations.get(conversation_id, ALICE)
    assert missing.value.message == f"Conversation with id '{conversation_id}' not found."


@pytest.mark.parametrize("conversation_id", ["", "x", "conv_", "conv_}", "conv_" + "a" * TAG_LENGTH])
async def test_an_unknown_conversation_id_is_missing_in_every_operation(state: State, conversation_id: str) -> None:
    await refused_everywhere(state, conversation_id, "msg_1", ALICE)


async def test_a_conversation_of_another_owner_is_missing_in_every_operation(state: State, server: Plain) -> None:
    conversation_id = await converse(state, "secret")
    item_id = (await state.conversations.items(conversation_id, ALICE)).items[0]["id"]
    before = everything(server)
    await refused_everywhere(state, conversation_id, item_id, BOB)
    with pytest.raises(Missing):
        await state.conversations.create(Conversation(conversation_id, 1, {}), [], BOB)
    with pytest.raises(Missing):
        await state.responses.resolve([item_id], BOB)
    assert everything(server) == before


async def refused_everywhere(state: State, conversation_id: str, item_id: str, owner: str) -> None:
    """Assert that every operation on the conversation fails as if it did not exist."""
    store = state.conversations
    for asking in (
        store.get(conversation_id, owner),
        store.update(conversation_id, {}, owner),
        store.delete(conversation_id, owner),
        store.chain(conversation_id, owner),
        store.append(conversation_id, [], owner),
        store.items(conversation_id, owner),
        store.items(conversation_id, owner, after=item_id),
        store.item(conversation_id, item_id, owner),
        store.delete_item(conversation_id, item_id, owner),
    ):
        with pytest.raises(Missing) as missing:
            await asking
        assert missing.value.message == f"Conversation with id '{conversation_id}' not found."


async def test_items_are_listed_in_pages_newest_first(state: State) -> None:
    conversation_id = await converse(state, *"abcde")
    pages, after = [], None
    for _ in range(3):
        page = await state.conversations.items(conversation_id, ALICE, after=after, limit=2)
        pages.append((texts(page.items), page.has_more))
        after = page.items[-1]["id"]
    assert pages == [(["e", "d"], True), (["c", "b"], True), (["a"], False)]


async def test_items_are_listed_oldest_first_with_order_asc(state: State) -> None:
    conversation_id = await converse(state, *"abc")
    first = await state.conversations.items(conversation_id, ALICE, limit=2, order="asc")
    rest = await state.conversations.items(conversation_id, ALICE, after=first.items[-1]["id"], order="asc")
    assert (texts(first.items), first.has_more) == (["a", "b"], True)
    assert (texts(rest.items), rest.has_more) == (["c"], False)


async def test_an_unknown_cursor_is_a_bad_request_naming_it(state: State) -> None:
    conversation_id = await converse(state, "a")
    with pytest.raises(BadRequest) as refused:
        await state.conversations.items(conversation_id, ALICE, after="msg_nowhere")
    assert refused.value.param == "after"
    assert "msg_nowhere" in refused.value.message


async def test_an_item_can_be_read_and_deleted_by_its_id(state: State) -> None:
    conversation_id = await converse(state, "a", "b", "c")
    item_id = (await state.conversations.items(conversation_id, ALICE)).items[1]["id"]
    assert texts([await state.conversations.item(conversation_id, item_id, ALICE)]) == ["b"]
    assert (await state.conversations.delete_item(conversation_id, item_id, ALICE)).id == conversation_id
    assert await listed(state, conversation_id) == ["a", "c"]
    for asking in (
        state.conversations.item(conversation_id, item_id, ALICE),
        state.conversations.delete_item(conversation_id, item_id, ALICE),
    ):
        with pytest.raises(Missing) as missing:
            await asking
        assert missing.value.message == f"Item with id '{item_id}' not found."


async def test_deleting_an_item_frees_its_space(state: State) -> None:
    bounded = State(state.client, StateOptions(chain_bytes=12_000))
    conversation_id = await converse(bounded, "x" * 10_000)
    (item,) = (await bounded.conversations.items(conversation_id, ALICE)).items
    again = some_items(conversation_id, "y" * 10_000)
    with pytest.raises(OverBound):
        await bounded.conversations.append(conversation_id, again, ALICE)
    await bounded.conversations.delete_item(conversation_id, item["id"], ALICE)
    await bounded.conversations.append(conversation_id, again, ALICE)
    assert await listed(state, conversation_id) == ["y" * 10_000]


async def test_items_beyond_the_maximum_of_a_conversation_are_refused_and_not_written(state: State, server: Plain) -> None:
    bounded = State(state.client, StateOptions(chain_items=2))
    with pytest.raises(OverBound):
        await converse(bounded, *"abc")
    assert server.keys("*") == []
    conversation_id = await converse(bounded, "a")
    before = everything(server)
    with pytest.raises(OverBound):
        await bounded.conversations.append(conversation_id, some_items(conversation_id, "b", "c"), ALICE)
    with pytest.raises(OverBound):
        await respond(bounded, await bounded.conversations.chain(conversation_id, ALICE), "b")
    assert everything(server) == before


async def test_check_room_refuses_a_run_in_a_full_conversation(state: State) -> None:
    bounded = State(state.client, StateOptions(chain_items=10))
    conversation_id = await converse(bounded, "a", "b", "c")
    chain = await bounded.conversations.chain(conversation_id, ALICE)
    bounded.conversations.check_room(chain, 6)
    with pytest.raises(OverBound, match=conversation_id):
        bounded.conversations.check_room(chain, 7)


async def test_a_conversation_expires_and_a_write_extends_its_time_to_live(state: State, server: Plain) -> None:
    conversation_id = await converse(State(state.client, StateOptions(ttl_seconds=100)), "a")
    assert {server.ttl(key) for key in server.keys("*")} <= {99, 100}
    await state.conversations.update(conversation_id, {}, ALICE)
    assert all(server.ttl(key) > 1000 for key in server.keys("*"))


@pytest.mark.parametrize(("field", "value"), [("v", "new"), ("created_at", "now"), ("metadata", "[]"), ("metadata", "x")])
async def test_an_invalid_value_in_a_conversation_is_reported_as_damaged(
    state: State, server: Plain, field: str, value: str
) -> None:
    conversation_id = await converse(state, "a")
    server.hset(next(key for key in server.keys("*:c")), field, value)
    with pytest.raises(Damaged):
        await state.conversations.get(conversation_id, ALICE)


async def test_an_item_without_a_size_is_reported_as_damaged(state: State, server: Plain) -> None:
    conversation_id = await converse(state, "a")
    items = next(key for key in server.keys("*:c:items"))
    server.hset(items, server.hkeys(items)[0], "Zstandard:")
    with pytest.raises(Damaged):
        await state.conversations.chain(conversation_id, ALICE)


async def test_a_conversation_of_a_newer_release_is_refused_and_not_changed(state: State, server: Plain) -> None:
    conversation_id = await converse(state, "a")
    server.hset(next(key for key in server.keys("*:c")), "v", 2)
    before = everything(server)
    for asking in (
        state.conversations.get(conversation_id, ALICE),
        state.conversations.update(conversation_id, {}, ALICE),
        state.conversations.delete(conversation_id, ALICE),
        state.conversations.chain(conversation_id, ALICE),
        state.conversations.delete_item(conversation_id, "msg_1", ALICE),
    ):
        with pytest.raises(NewerRecord):
            await asking
    assert everything(server) == before


@pytest.mark.parametrize("lost", [":c", ":c:items", ":c:order", ":c:[io]*"])
async def test_a_conversation_that_redis_lost_in_part_is_missing_and_not_shortened(
    state: State, server: Plain, lost: str
) -> None:
    conversation_id = await converse(state, "one", "two")
    running = await state.conversations.chain(conversation_id, ALICE)
    server.delete(*server.keys(f"*{lost}"))
    for asking in (
        state.conversations.chain(conversation_id, ALICE),
        state.conversations.items(conversation_id, ALICE),
        state.conversations.update(conversation_id, {}, ALICE),
        state.conversations.append(conversation_id, some_items(conversation_id, "three"), ALICE),
    ):
        with pytest.raises(Missing):
            await asking
    response = await respond(state, running, "a run that began before")
    assert (await state.responses.get(response, ALICE)).document["id"] == response
    with pytest.raises(Missing):
        await state.conversations.chain(conversation_id, ALICE)


async def test_a_conversation_that_redis_lost_in_part_can_be_deleted(state: State, server: Plain) -> None:
    conversation_id = await converse(state, "one")
    server.delete(*server.keys("*:c:order"))
    await state.conversations.delete(conversation_id, ALICE)
    assert server.keys("*") == []


async def test_a_response_reads_its_conversation_and_is_appended_to_it(state: State) -> None:
    conversation_id = await converse(state, "a")
    chain = await state.conversations.chain(conversation_id, ALICE)
    assert texts(chain.items) == ["a"]
    response = await respond(state, chain, "b")
    assert await listed(state, conversation_id) == ["a", "b", "b!"]
    assert texts((await state.responses.input_items(response, ALICE, order="asc")).items) == ["a", "b"]


async def test_a_repeated_commit_appends_its_items_to_the_conversation_once(state: State) -> None:
    conversation_id = await converse(state, "a")
    chain = await state.conversations.chain(conversation_id, ALICE)
    document, given = made(chain, "b")
    token = random_part()
    for _ in range(2):
        await state.responses.commit(chain, document, given, ALICE, token)
    assert await listed(state, conversation_id) == ["a", "b", "b!"]


async def test_concurrent_responses_are_appended_to_a_conversation_without_interleaving(state: State) -> None:
    conversation_id = await converse(state)

    async def one(text: str) -> None:
        await respond(state, await state.conversations.chain(conversation_id, ALICE), text)

    await asyncio.gather(*(one(str(number)) for number in range(20)))
    said = await listed(state, conversation_id)
    assert sorted(said[::2], key=int) == [str(number) for number in range(20)]
    assert said[1::2] == [f"{text}!" for text in said[::2]]


async def test_a_continued_response_of_a_conversation_has_only_the_items_up_to_that_response(state: State) -> None:
    conversation_id = await converse(state, "a")
    response = await respond(state, await state.conversations.chain(conversation_id, ALICE), "b")
    await state.conversations.append(conversation_id, some_items(conversation_id, "later"), ALICE)
    assert await history(state, response) == ["a", "b", "b!"]
    child = await continued(state, response, "c")
    await state.conversations.delete(conversation_id, ALICE)
    assert await history(state, child) == ["a", "b", "b!", "c", "c!"]


async def test_a_conversation_deleted_during_a_run_stays_deleted_and_the_response_is_stored(
    state: State, server: Plain
) -> None:
    conversation_id = await converse(state, "a")
    chain = await state.conversations.chain(conversation_id, ALICE)
    await state.conversations.delete(conversation_id, ALICE)
    response = await respond(state, chain, "b")
    assert (await state.responses.get(response, ALICE)).document["status"] == "completed"
    assert [key for key in server.keys("*") if b"}:c" in key] == []
    assert texts((await state.responses.input_items(response, ALICE)).items) == ["b"]
    with pytest.raises(Missing):
        await state.responses.chain(response, ALICE)


async def test_deleting_a_response_keeps_its_items_in_the_conversation(state: State, server: Plain) -> None:
    conversation_id = await converse(state, "a")
    response = await respond(state, await state.conversations.chain(conversation_id, ALICE), "b")
    await state.responses.delete(response, ALICE)
    assert await listed(state, conversation_id) == ["a", "b", "b!"]
    await state.conversations.delete(conversation_id, ALICE)
    assert kept(server) == []
