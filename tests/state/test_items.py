"""Items of a response: pagination, and resolution of item references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.errors import BadRequest
from responses_mw.ids import RunIds, random_part
from responses_mw.state import Batch, Chain, Missing, OverBound, State, StateOptions, connect
from responses_mw.state.schema import item_address
from tests.state.test_conversations import converse, some_items
from tests.support.stored import ALICE, BOB, continued, made, message, respond, texts

if TYPE_CHECKING:
    from tests.support.valkey import Plain, Server


async def five(state: State) -> str:
    """Store a response with five input items: a, a!, b, b!, c."""
    first = await respond(state, Chain.new(), "a")
    return await continued(state, await continued(state, first, "b"), "c")


async def test_input_items_are_the_whole_input_of_the_model_newest_first(state: State) -> None:
    page = await state.responses.input_items(await five(state), ALICE)
    assert (texts(page.items), page.has_more) == (["c", "b!", "b", "a!", "a"], False)


async def test_input_items_are_listed_in_pages(state: State) -> None:
    response = await five(state)
    pages, after = [], None
    for _ in range(3):
        page = await state.responses.input_items(response, ALICE, after=after, limit=2, order="asc")
        pages.append((texts(page.items), page.has_more))
        after = page.items[-1]["id"]
    assert pages == [(["a", "a!"], True), (["b", "b!"], True), (["c"], False)]


async def test_input_items_with_before_end_before_that_item(state: State) -> None:
    response = await five(state)
    everything = (await state.responses.input_items(response, ALICE, order="asc")).items
    page = await state.responses.input_items(
        response, ALICE, after=everything[0]["id"], before=everything[3]["id"], limit=1, order="asc"
    )
    assert (texts(page.items), page.has_more) == (["a!"], True)
    page = await state.responses.input_items(response, ALICE, before=everything[3]["id"], order="asc")
    assert (texts(page.items), page.has_more) == (["a", "a!", "b"], False)


async def test_a_page_with_before_is_the_last_one_before_that_item(state: State) -> None:
    response = await five(state)
    pages, before = [], (await state.responses.input_items(response, ALICE)).items[0]["id"]
    for _ in range(2):
        page = await state.responses.input_items(response, ALICE, before=before, limit=2, order="asc")
        pages.append((texts(page.items), page.has_more))
        before = page.items[0]["id"]
    assert pages == [(["b", "b!"], True), (["a", "a!"], False)]
    page = await state.responses.input_items(response, ALICE, before=before, limit=2, order="asc")
    assert (page.items, page.has_more) == ([], False)


async def test_the_input_of_a_queued_response_is_listed_even_if_the_previous_one_was_deleted(state: State) -> None:
    parent = await respond(state, Chain.new(), "a")
    ids = RunIds()
    document = {"id": ids.response, "status": "queued", "background": True, "output": [], "conversation": None}
    given = [message(ids.item("msg"), "user", "b")]
    start = Batch(0, 1, b"data: 0\n\ndata: 1\n\n")
    await state.jobs.create({**document, "previous_response_id": parent}, {}, given, ALICE, "sealed", start)
    assert texts((await state.responses.input_items(ids.response, ALICE)).items) == ["b", "a!", "a"]
    await state.responses.delete(parent, ALICE)
    assert texts((await state.responses.input_items(ids.response, ALICE)).items) == ["b"]


@pytest.mark.parametrize("param", ["after", "before"])
async def test_an_unknown_cursor_is_a_bad_request_naming_the_parameter(state: State, param: str) -> None:
    response = await five(state)
    with pytest.raises(BadRequest) as refused:
        await state.responses.input_items(response, ALICE, **{param: "msg_nowhere"})  # type: ignore[arg-type]
    assert refused.value.param == param


async def test_references_to_items_of_responses_and_conversations_are_resolved(state: State) -> None:
    response = await respond(state, Chain.new(), "a")
    other = await respond(state, Chain.new(), "b")
    conversation_id = await converse(state, "c")
    joined = await respond(state, await state.conversations.chain(conversation_id, ALICE), "d")
    ids = [item["id"] for found in (response, other, joined) for item in await items_of(state, found)]
    ids += [item["id"] for item in (await state.conversations.items(conversation_id, ALICE)).items]
    found = await state.responses.resolve(ids, ALICE)
    assert texts([found[item_id] for item_id in ids]) == ["a", "a!", "b", "b!", "d", "d!", "d!", "d", "c"]


async def items_of(state: State, response: str) -> list[dict[str, str]]:
    stored = await state.responses.get(response, ALICE)
    return [*stored.input, *stored.document["output"]]


async def test_many_references_are_read_in_small_batches(state: State, server: Plain) -> None:
    responses = [await respond(state, Chain.new(), f"{number}") for number in range(150)]
    ids = [item["id"] for response in responses for item in await items_of(state, response)]
    address = item_address(ids[0])
    before = server.info("stats")["total_connections_received"]
    found = await state.responses.resolve([*ids, *reversed(ids)], ALICE)
    assert list(found) == ids
    assert [found[item_id]["id"] for item_id in ids] == ids
    assert server.info("stats")["total_connections_received"] - before < 10
    nowhere = [f"msg_{address.tag}{address.random}{number}" for number in range(1000, 9000)]
    with pytest.raises(Missing, match=nowhere[0]):
        await state.responses.resolve([*ids[:2], *nowhere], ALICE)


async def test_references_to_all_items_of_a_long_conversation_are_resolved(state: State) -> None:
    conversation_id = await converse(state)
    made = RunIds(conversation_id.removeprefix("conv_"))
    items = [message(made.item("msg"), "user", f"{number}") for number in range(350)]
    await state.conversations.append(conversation_id, items, ALICE)
    found = await state.responses.resolve([item["id"] for item in items], ALICE)
    assert list(found.values()) == items


@pytest.mark.parametrize("most", [2500, 20_000])
async def test_references_to_more_bytes_than_a_history_may_have_are_refused(open_state: Any, valkey: Server, most: int) -> None:
    roomy = open_state(valkey.url)
    ids = [(await items_of(roomy, await respond(roomy, Chain.new(), "x" * 700)))[0]["id"] for _ in range(20)]
    bounded = State(connect(valkey.url), StateOptions(chain_bytes=most))
    try:
        assert await bounded.responses.resolve(ids[:1], ALICE)
        with pytest.raises(OverBound, match=f"more than {most} bytes"):
            await bounded.responses.resolve(ids, ALICE)
    finally:
        await bounded.aclose()


async def test_references_to_items_with_many_small_values_beyond_the_memory_limit_are_refused(state: State) -> None:
    bounded, ids = State(state.client, StateOptions(chain_memory=5_000_000)), []
    conversation_id = await converse(state, "hi")
    for _ in range(3):
        document, given = made(Chain.new(), "x")
        given[0]["more"] = [[]] * 10_000
        await state.responses.commit(Chain.new(), document, given, ALICE, random_part())
        [item] = some_items(conversation_id, "x")
        await state.conversations.append(conversation_id, [{**item, "more": [[]] * 10_000}], ALICE)
        ids.append([given[0]["id"], item["id"]])
    for some in zip(*ids, strict=True):
        assert len(await bounded.responses.resolve(some[:2], ALICE)) == 2
        with pytest.raises(OverBound, match="too many small values"):
            await bounded.responses.resolve(some, ALICE)


async def test_an_item_of_a_deleted_response_is_resolved_from_its_conversation(state: State) -> None:
    conversation_id = await converse(state)
    response = await respond(state, await state.conversations.chain(conversation_id, ALICE), "a")
    ids = [item["id"] for item in await items_of(state, response)]
    await state.responses.delete(response, ALICE)
    assert set(await state.responses.resolve(ids, ALICE)) == set(ids)
    await state.conversations.delete_item(conversation_id, ids[0], ALICE)
    with pytest.raises(Missing) as missing:
        await state.responses.resolve(ids, ALICE)
    assert missing.value.object_id == ids[0]


async def test_a_reference_to_an_unknown_item_is_missing_and_named(state: State) -> None:
    response = await respond(state, Chain.new(), "a")
    known = [item["id"] for item in await items_of(state, response)]
    for unknown in (f"msg_{known[0][4:-1]}7", RunIds().item("msg"), "msg_1", "", "msg_{}"):
        with pytest.raises(Missing) as missing:
            await state.responses.resolve([*known, unknown], ALICE)
        assert missing.value.message == f"Item with id '{unknown}' not found."


async def test_a_reference_to_an_item_of_another_owner_is_missing(state: State) -> None:
    response = await respond(state, Chain.new(), "a")
    item_id = (await items_of(state, response))[0]["id"]
    with pytest.raises(Missing) as missing:
        await state.responses.resolve([item_id], BOB)
    assert missing.value.message == f"Item with id '{item_id}' not found."


async def test_an_item_of_a_deleted_response_is_missing_even_if_a_continuation_includes_it(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    item_id = (await items_of(state, root))[0]["id"]
    await continued(state, root, "child")
    await state.responses.delete(root, ALICE)
    with pytest.raises(Missing):
        await state.responses.resolve([item_id], ALICE)
