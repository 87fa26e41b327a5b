"""Encrypted reasoning, kept by the client: `include: ["reasoning.encrypted_content"]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.responses import ResponseReasoningItem

from tests.asgi.stored.test_meaning import TOOLS, answer
from tests.support import oracle
from tests.support.scripted import completion, finish, reasoning, text, usage
from tests.support.stored import everything, texts_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from openai import AsyncOpenAI

    from tests.support.echo import Echo
    from tests.support.servers import Ours, Start
    from tests.support.valkey import Plain

    Replica = Callable[..., Ours]

OLD, NEW, OTHER = ("old" * 11, "new" * 11, "other" * 7)
SEALED: Any = ["reasoning.encrypted_content"]
TURN = {
    "content": None,
    "reasoning": "The answer hides in a drawer.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.fixture
def replica(start_at: Start, keys: Plain) -> Replica:
    """Start a replica with secret keys."""
    return lambda *secret_keys: start_at("proxy", auth__secret_keys=list(secret_keys))


async def thought(client: AsyncOpenAI, upstream: Echo, *, store: bool = False) -> list[Any]:
    """Input and output of a turn with reasoning and a tool call, as a client keeps them."""
    upstream.whole(completion(TURN, "tool_calls"))
    response = await client.responses.create(model="tiny", input="Look.", tools=TOOLS, include=SEALED, store=store)
    output = [item.model_dump(exclude_none=True) for item in response.output]
    assert output[0]["encrypted_content"].startswith("rmw1.")
    return [{"role": "user", "content": "Look."}, *output]


def without_text(items: list[Any]) -> list[Any]:
    """The items as sent by a client that keeps only the envelope."""
    return [{**item, "content": None, "summary": []} if item.get("type") == "reasoning" else item for item in items]


async def go_on(client: AsyncOpenAI, items: list[Any]) -> openai.types.responses.Response:
    given: Any = [*items, *answer("c1")]
    return await client.responses.create(model="tiny", input=given, tools=TOOLS, store=False)


async def test_another_replica_decrypts_reasoning_for_the_model_and_nothing_is_stored(
    replica: Replica, upstream: Echo, keys: Plain
) -> None:
    items = await thought(replica(NEW).client, upstream)
    await go_on(replica(NEW).client, without_text(items))
    assert [message.get("reasoning") for message in upstream.messages] == [None, TURN["reasoning"], None]
    assert everything(keys) == {}


async def test_a_stream_returns_encrypted_reasoning(replica: Replica, upstream: Echo) -> None:
    upstream.stream(reasoning("Hm."), text("Hello"), finish(), usage())
    async with replica(NEW).client.responses.stream(model="tiny", input="Hi", include=SEALED, store=False) as stream:
        sealed = (await stream.get_final_response()).output[0]
    assert isinstance(sealed, ResponseReasoningItem)
    item: Any = {"type": "reasoning", "id": sealed.id, "summary": [], "encrypted_content": sealed.encrypted_content}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    await go_on(replica(NEW).client, [{"role": "user", "content": "Hi"}, item, call])
    assert upstream.messages[1]["reasoning"] == "Hm."


async def test_encrypted_content_is_omitted_unless_included(replica: Replica, upstream: Echo) -> None:
    upstream.whole(completion({"content": "Hello", "reasoning": "Hm."}))
    response = await oracle.whole(replica(NEW), input="Hi")
    assert "encrypted_content" not in response["output"][0]


async def test_secret_keys_can_be_rotated_without_rejecting_an_envelope(replica: Replica, upstream: Echo) -> None:
    """Deploy old,new first, then new,old, then new alone."""
    before, half, turned, after = replica(OLD), replica(OLD, NEW), replica(NEW, OLD), replica(NEW)
    for sealing, opening in ((before, half), (half, before), (half, turned), (turned, half), (turned, after), (after, half)):
        items = await thought(sealing.client, upstream)
        await go_on(opening.client, without_text(items))
        assert upstream.messages[1]["reasoning"] == TURN["reasoning"]


async def test_an_envelope_of_a_removed_key_is_a_400(replica: Replica, upstream: Echo) -> None:
    items = await thought(replica(OLD).client, upstream)
    asked = len(upstream.requests)
    with pytest.raises(openai.BadRequestError) as error:
        await go_on(replica(NEW).client, without_text(items))
    assert (error.value.param, error.value.code) == ("input[1].encrypted_content", "invalid_encrypted_content")
    assert len(upstream.requests) == asked


@pytest.mark.parametrize("envelope", ["gAAAAABmabc=", "rmw1.", "rmw1.00000000.AAAA", "rmw1.x.é", "", "." * 99])
async def test_a_foreign_envelope_without_plain_text_is_a_400(replica: Replica, upstream: Echo, envelope: str) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": envelope}
    with pytest.raises(openai.BadRequestError) as error:
        await replica(NEW).client.responses.create(model="tiny", input=[item, {"role": "user", "content": "Hi"}])  # type: ignore[list-item]
    assert error.value.param == "input[0].encrypted_content"
    assert upstream.requests == []


async def test_a_foreign_envelope_with_plain_text_is_ignored(replica: Replica, upstream: Echo) -> None:
    client = replica(NEW).client
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    for plain in (
        {"summary": [{"type": "summary_text", "text": "In short."}]},
        {"summary": [], "content": [{"type": "reasoning_text", "text": "At length."}]},
    ):
        item = {"type": "reasoning", "id": "rs_1", "encrypted_content": "gAAAAABmabc=", **plain}
        await go_on(client, [{"role": "user", "content": "Look."}, item, call])
        assert upstream.messages[1]["reasoning"] in ("In short.", "At length.")


async def test_a_tampered_envelope_is_a_400(replica: Replica, upstream: Echo) -> None:
    client = replica(NEW).client
    items = without_text(await thought(client, upstream))
    envelope = items[1]["encrypted_content"]
    middle = len(envelope) // 2
    items[1]["encrypted_content"] = envelope[:middle] + ("A" if envelope[middle] != "A" else "B") + envelope[middle + 1 :]
    with pytest.raises(openai.BadRequestError):
        await go_on(client, items)


async def test_an_envelope_of_another_owner_is_a_400(replica: Replica, upstream: Echo) -> None:
    client = replica(NEW).client
    items = without_text(await thought(client, upstream))
    with pytest.raises(openai.BadRequestError) as error:
        await go_on(client.with_options(api_key="somebody else"), items)
    assert error.value.code == "invalid_encrypted_content"


async def test_reasoning_received_encrypted_is_not_stored_in_plain_text(replica: Replica, upstream: Echo, keys: Plain) -> None:
    client = replica(NEW).client
    items = without_text(await thought(client, upstream))
    given: Any = [*items, *answer("c1")]
    stored = await client.responses.create(model="tiny", input=given, tools=TOOLS)
    assert upstream.messages[1]["reasoning"] == TURN["reasoning"]
    assert b"drawer" not in texts_in(keys)
    await client.responses.create(
        model="tiny", input="And?", previous_response_id=stored.id, reasoning={"context": "all_turns"}
    )
    assert upstream.messages[1]["reasoning"] == TURN["reasoning"]
    listed = [item async for item in client.responses.input_items.list(stored.id, order="asc")]
    assert listed[1].encrypted_content == items[1]["encrypted_content"]  # type: ignore[union-attr]


async def test_a_stored_envelope_of_a_removed_key_does_not_prevent_continuation(replica: Replica, upstream: Echo) -> None:
    old = replica(OLD).client
    given: Any = [*without_text(await thought(old, upstream)), *answer("c1")]
    stored = await old.responses.create(model="tiny", input=given, tools=TOOLS)
    answered = await replica(NEW).client.responses.create(model="tiny", input="And?", previous_response_id=stored.id)
    assert answered.output_text == "And?!"


async def test_without_secret_keys_only_the_replica_that_made_an_envelope_opens_it(replica: Replica, upstream: Echo) -> None:
    here, elsewhere = replica(), replica()
    items = without_text(await thought(here.client, upstream))
    await go_on(here.client, items)
    assert upstream.messages[1]["reasoning"] == TURN["reasoning"]
    with pytest.raises(openai.BadRequestError):
        await go_on(elsewhere.client, items)
