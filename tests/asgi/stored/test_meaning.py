"""The messages that the upstream receives for a stored history."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from tests.asgi.stored.test_responses import items_before, respond
from tests.support import oracle
from tests.support.echo import said
from tests.support.scripted import call, completion, finish, reasoning, text, usage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.support.echo import Echo
    from tests.support.servers import Ours

TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


def answer(call_id: str, output: str = "42") -> Any:
    return [{"type": "function_call_output", "call_id": call_id, "output": output}]


def tool_call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return completion(
        {"content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}, "tool_calls"
    )


async def calls(client: AsyncOpenAI, given: str = "Look.", previous: str | None = None) -> openai.types.responses.Response:
    """Create a response that ends in a call."""
    return await client.responses.create(model="tiny", input=given, tools=TOOLS, previous_response_id=previous)


def call_of(response: openai.types.responses.Response) -> ResponseFunctionToolCall:
    (found,) = (item for item in response.output if isinstance(item, ResponseFunctionToolCall))
    return found


# -- parameters of earlier responses -------------------------------------------------------------------------------------


async def test_instructions_and_tools_are_not_inherited_from_the_previous_response(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    first = await on_a.responses.create(
        model="tiny", input="one", instructions="Be kind.", tools=TOOLS, temperature=0.5, max_output_tokens=99
    )
    assert said(upstream.messages) == ["Be kind.", "one"]
    await respond(on_b, "two", first.id)
    assert said(upstream.messages) == ["one", "one!", "two"]
    assert upstream.requests[-1].json.keys() & {"tools", "temperature", "max_tokens", "max_completion_tokens"} == set()
    await on_b.responses.create(model="tiny", input="two", instructions="Be brief.", previous_response_id=first.id)
    assert said(upstream.messages) == ["Be brief.", "one", "one!", "two"]


async def test_system_and_developer_messages_of_the_input_are_part_of_the_history(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    given: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}]
    first = await on_a.responses.create(model="tiny", input=given)
    await respond(on_b, "two", first.id)
    assert said(upstream.messages) == ["Be kind.", "one", "one!", "two"]


# -- calls and their outputs ---------------------------------------------------------------------------------------------


async def test_a_function_call_output_is_sent_after_its_stored_call(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    upstream.whole(tool_call("call_1", '{"x":1}'))
    first = await calls(on_a)
    second = await on_b.responses.create(model="tiny", input=answer("call_1"), previous_response_id=first.id)
    asked, called, answered = upstream.messages
    assert asked["content"] == "Look."
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert (answered["role"], answered["tool_call_id"]) == ("tool", "call_1")
    assert second.output_text == "42!"


async def test_an_output_without_a_call_is_a_400_naming_the_call_id(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    first = await respond(on_a, "one")
    with pytest.raises(openai.BadRequestError, match="call_stray") as error:
        await on_b.responses.create(model="tiny", input=answer("call_stray"), previous_response_id=first.id)
    assert error.value.param == "input[0]"
    assert len(upstream.requests) == 1


async def test_a_call_without_an_output_is_a_400_naming_the_call_id(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    upstream.whole(tool_call("call_1"))
    first = await calls(on_a)
    with pytest.raises(openai.BadRequestError, match="call_1"):
        await respond(on_b, "never mind", first.id)


async def test_an_output_cannot_answer_a_call_of_another_branch(on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo) -> None:
    root = await respond(on_a, "root")
    upstream.whole(tool_call("call_left"))
    await calls(on_a, "left", root.id)
    right = await respond(on_b, "right", root.id)
    with pytest.raises(openai.BadRequestError, match="call_left"):
        await on_b.responses.create(model="tiny", input=answer("call_left"), previous_response_id=right.id)


async def test_a_call_id_already_used_in_the_history_is_replaced_for_the_client_only(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    """TGI gives every call the id "0"."""
    upstream.whole(tool_call("0"))
    first = await calls(on_a)
    assert call_of(first).call_id == "0"
    upstream.whole(tool_call("0"))
    second = await on_b.responses.create(model="tiny", input=answer("0", "41"), tools=TOOLS, previous_response_id=first.id)
    renamed = call_of(second).call_id
    assert renamed != "0"
    await on_a.responses.create(model="tiny", input=answer(renamed, "42"), previous_response_id=second.id)
    _, called, answered, called_again, answered_again = upstream.messages
    assert (called["tool_calls"][0]["id"], answered["tool_call_id"], answered["content"]) == ("0", "0", "41")
    assert called_again["tool_calls"][0]["id"] == answered_again["tool_call_id"] == "0"
    assert answered_again["content"] == "42"


async def test_a_call_id_used_only_in_another_branch_is_not_replaced(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    root = await respond(on_a, "root")
    for client in (on_a, on_b):
        upstream.whole(tool_call("0"))
        assert call_of(await calls(client, "Look.", root.id)).call_id == "0"


# -- branches ------------------------------------------------------------------------------------------------------------


async def test_branches_do_not_leak_into_each_other(on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo) -> None:
    root = await respond(on_a, "root")
    left, right = await respond(on_a, "left", root.id), await respond(on_b, "right", root.id)
    await respond(on_b, "left leaf", left.id)
    assert said(upstream.messages) == ["root", "root!", "left", "left!", "left leaf"]
    await respond(on_a, "right leaf", right.id)
    assert said(upstream.messages) == ["root", "root!", "right", "right!", "right leaf"]
    await respond(on_b, "middle", root.id)
    assert said(upstream.messages) == ["root", "root!", "middle"]


async def test_a_response_is_continued_many_times_concurrently_on_both_replicas(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    root = await respond(on_a, "root")
    names = [str(number) for number in range(20)]
    forks = await asyncio.gather(*(respond((on_a, on_b)[n % 2], name, root.id) for n, name in enumerate(names)))
    leaves = await asyncio.gather(*(respond((on_b, on_a)[n % 2], "leaf", fork.id) for n, fork in enumerate(forks)))
    for name, leaf in zip(names, leaves, strict=True):
        assert await items_before(on_a, leaf.id) == ["root", "root!", name, f"{name}!", "leaf"]


# -- references ----------------------------------------------------------------------------------------------------------


async def test_item_references_are_resolved_without_a_previous_response_id(a: Ours, on_b: AsyncOpenAI, upstream: Echo) -> None:
    """The Vercel AI SDK sends earlier steps this way: reasoning and messages by reference, calls in full."""
    upstream.whole(
        {
            **tool_call("call_1"),
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "tool_calls",
                    "message": {"role": "assistant", "content": "I look.", "reasoning": "Hm.", **_calls("call_1")},
                }
            ],
        }
    )
    key = {"authorization": "Bearer key"}
    body = {"model": "tiny", "input": "Look.", "tools": TOOLS}
    first = (await a.http.post("/v1/responses", json=body, headers=key)).json()
    thought, message, called = first["output"]
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "item_reference", "id": thought["id"]},
        {"type": "item_reference", "id": message["id"]},
        {"type": "function_call", "call_id": called["call_id"], "name": "f", "arguments": "{}"},
        *answer("call_1"),
    ]
    second = await on_b.responses.create(model="tiny", input=given, tools=TOOLS)
    asked, said_before, answered = upstream.messages
    assert asked["content"] == "Look."
    assert said_before["content"] == "I look."
    assert said_before["reasoning"] == "Hm."
    assert said_before["tool_calls"][0]["id"] == answered["tool_call_id"] == "call_1"
    listed = [item async for item in on_b.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in listed] == ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert thought["id"] not in {item.id for item in listed}


def _calls(call_id: str) -> dict[str, Any]:
    return {"tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}]}


async def test_references_resolve_to_items_of_several_responses_and_conversations(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    first, second = await respond(on_a, "one"), await respond(on_b, "two")
    conversation = await on_a.conversations.create(items=[{"role": "user", "content": "three"}])
    (item,) = (await on_a.conversations.items.list(conversation.id)).data
    (given,) = (await on_a.responses.input_items.list(first.id)).data
    ids = [second.output[0].id, item.id, given.id, first.output[0].id]
    references: Any = [{"type": "item_reference", "id": item_id} for item_id in ids]
    await on_b.responses.create(model="tiny", input=[*references, {"role": "user", "content": "four"}])
    assert said(upstream.messages) == ["two!", "three", "one", "one!", "four"]


async def test_a_reference_to_an_item_already_in_the_history_adds_nothing(
    on_a: AsyncOpenAI, on_b: AsyncOpenAI, upstream: Echo
) -> None:
    first = await respond(on_a, "one")
    conversation = await on_a.conversations.create(items=[{"role": "user", "content": "zero"}])
    (zero,) = (await on_a.conversations.items.list(conversation.id)).data
    two: Any = {"role": "user", "content": "two"}
    one: Any = {"type": "item_reference", "id": first.output[0].id}
    second = await on_b.responses.create(model="tiny", input=[one, two], previous_response_id=first.id)
    assert said(upstream.messages) == ["one", "one!", "two"]
    assert await items_before(on_a, second.id) == ["one", "one!", "two"]
    await on_b.responses.create(model="tiny", input=[one, one, two])
    assert said(upstream.messages) == ["one!", "two"]
    given: Any = [{"type": "item_reference", "id": zero.id}, two]
    await on_b.responses.create(model="tiny", input=given, conversation=conversation.id)
    assert said(upstream.messages) == ["zero", "two"]


async def test_an_item_with_only_an_id_is_an_item_reference(on_a: AsyncOpenAI, upstream: Echo) -> None:
    first = await respond(on_a, "one")
    given: Any = [{"id": first.output[0].id}, {"role": "user", "content": "two"}]
    await on_a.responses.create(model="tiny", input=given)
    assert said(upstream.messages) == ["one!", "two"]


@pytest.mark.parametrize("reference", ["msg_1", "nonsense", "msg_" + "0" * 51, "msg_{x}", "*"])
async def test_an_unknown_item_reference_is_a_400_naming_it(on_a: AsyncOpenAI, upstream: Echo, reference: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await on_a.responses.create(model="tiny", input=[{"type": "item_reference", "id": reference}])
    assert f"'{reference}'" in error.value.message
    assert error.value.param == "input"
    assert upstream.requests == []


async def test_a_reference_to_an_item_of_a_deleted_response_is_a_400(on_a: AsyncOpenAI, on_b: AsyncOpenAI) -> None:
    first = await respond(on_a, "one")
    await on_a.responses.delete(first.id)
    item_id = first.output[0].id
    assert item_id
    with pytest.raises(openai.BadRequestError, match=item_id):
        await on_b.responses.create(model="tiny", input=[{"type": "item_reference", "id": item_id}])


# -- reasoning -----------------------------------------------------------------------------------------------------------


async def test_stored_reasoning_is_resent_only_within_a_tool_loop_or_with_context_all_turns(
    a: Ours, b: Ours, upstream: Echo
) -> None:
    upstream.stream(reasoning("Hm."), call("{}", name="f", call_id="c1"), finish("tool_calls"), usage())
    first = (await oracle.stream(a, input="Look.", tools=TOOLS)).response
    upstream.stream(reasoning("Aha."), text("It is 42."), finish(), usage())
    second = (await oracle.stream(b, input=answer("c1"), tools=TOOLS, previous_response_id=first["id"])).response
    assert upstream.messages[1]["reasoning"] == "Hm."
    await oracle.stream(a, input="Sure?", previous_response_id=second["id"])
    assert all("reasoning" not in message for message in upstream.messages)
    await oracle.stream(a, input="Sure?", previous_response_id=second["id"], reasoning={"context": "all_turns"})
    assert [message.get("reasoning") for message in upstream.messages] == [None, "Hm.", None, "Aha.", None]
