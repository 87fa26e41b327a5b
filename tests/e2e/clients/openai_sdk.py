"""The official openai client: `python -m tests.e2e.clients.openai_sdk URL MCP SSE STORE`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from openai import AsyncOpenAI
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseFileSearchToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseStreamEvent,
)
from openai.types.responses.response_output_text import AnnotationFileCitation
from pydantic import BaseModel, TypeAdapter

from tests.e2e.clients.cases import (
    BYE,
    CODE,
    FILES,
    FOUND,
    IN_FILE,
    KEY,
    MODEL,
    SEARCH,
    Case,
    Servers,
    Way,
    expect,
    expect_farewell,
    run,
    servers,
)

MODES = ("previous_response_id", "store=False")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CONTAINER = {"type": "code_interpreter", "container": {"type": "auto"}}
FINDER = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"goal": {"type": "string"}}, "required": ["goal"]},
}


class Answer(BaseModel):
    answer: str


class Talk:
    """A conversation, with `previous_response_id` or with all items and encrypted reasoning in each turn."""

    def __init__(self, client: AsyncOpenAI, way: Way, **settings: Any) -> None:
        self._client, self._way = client, way
        self._settings = settings | {"model": MODEL}
        self._items: list[Any] = []
        if way.mode == "store=False":
            self._settings |= {"store": False, "include": ["reasoning.encrypted_content"]}

    async def say(self, text: str) -> Response:
        return await self.send({"role": "user", "content": text})

    async def send(self, *items: dict[str, Any]) -> Response:
        self._items += items
        response = await self._response(self._items)
        assert response.status == "completed", response.error
        if self._way.mode == "store=False":
            sealed = [item.encrypted_content for item in response.output if item.type == "reasoning"]
            assert sealed, "there should be reasoning"
            assert all(sealed), "the reasoning should be encrypted"
            self._items += [item.to_dict() for item in response.output]
        else:
            self._settings["previous_response_id"] = response.id
            self._items = []
        return response

    async def _response(self, items: list[Any]) -> Response:
        if not self._way.streamed:
            response: Response = await self._client.responses.create(input=items, **self._settings)
            return response
        events = [event async for event in await self._client.responses.create(input=items, stream=True, **self._settings)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for event in events:
            assert type(EVENT.validate_python(event.model_dump())) is type(event)
        last: Response = events[-1].response
        return last


def kinds(response: Response) -> list[str]:
    return [item.type for item in response.output if item.type not in ("reasoning", "mcp_list_tools")]


Open = Callable[..., Talk]
Try = Callable[[Open, Servers], Awaitable[None]]


async def functions(talk: Open, _: Servers) -> None:
    chat = talk(tools=[WEATHER])
    asked = await chat.say('call get_weather {"city": "Oslo"}\ncall get_weather {"city": "Rome"}')
    calls = [item for item in asked.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    results = ({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"} for call in calls)
    expect("Sunny | Sunny", (await chat.send(*results)).output_text)
    expect_farewell((await chat.say(BYE)).output_text)


async def one_function(talk: Open, _: Servers) -> None:
    forced = talk(tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"}, parallel_tool_calls=False)
    asked = await forced.say('call get_weather {"city": "Oslo"}\ncall get_weather {"city": "Rome"}')
    assert kinds(asked) == ["function_call"]


async def mcp(talk: Open, place: Servers, *, sse: bool = False) -> None:
    chat = talk(tools=[place.mcp_tool(url=place.sse if sse else place.mcp)])
    said = await chat.say('call get_weather {"city": "Oslo"}')
    assert kinds(said) == ["mcp_call", "message"], kinds(said)
    expect("Sunny in Oslo", said.output_text)
    expect_farewell((await chat.say(BYE)).output_text)


async def approval(talk: Open, place: Servers, *, approve: bool) -> None:
    chat = talk(tools=[place.mcp_tool(approval="always")])
    asked = (await chat.say('call get_weather {"city": "Oslo"}')).output[-1]
    assert asked.type == "mcp_approval_request"
    said = await chat.send({"type": "mcp_approval_response", "approve": approve, "approval_request_id": asked.id})
    assert kinds(said) == (["mcp_call", "message"] if approve else ["message"]), kinds(said)
    expect("Sunny in Oslo" if approve else "did not approve", said.output_text)


async def web_search(talk: Open, _: Servers) -> None:
    chat = talk(tools=[{"type": "web_search", "user_location": {"type": "approximate", "country": "FR"}}])
    said = await chat.say(SEARCH)
    assert kinds(said) == ["web_search_call", "message"], kinds(said)
    expect(FOUND, said.output_text)
    expect_farewell((await chat.say(BYE)).output_text)


async def file_search(talk: Open, place: Servers) -> None:
    chat = talk(tools=[{"type": "file_search", "vector_store_ids": [place.store], "max_num_results": 5}])
    said = await chat.say(FILES)
    assert kinds(said) == ["file_search_call", "message"], kinds(said)
    searched = next(item for item in said.output if isinstance(item, ResponseFileSearchToolCall))
    assert (searched.queries, searched.status) == (["days of leave"], "completed")
    expect(IN_FILE, said.output_text)
    parts = (part for item in said.output if isinstance(item, ResponseOutputMessage) for part in item.content)
    cited = [one for part in parts if isinstance(part, ResponseOutputText) for one in part.annotations]
    assert "handbook.md" in [one.filename for one in cited if isinstance(one, AnnotationFileCitation)], cited
    expect_farewell((await chat.say(BYE)).output_text)


async def code(talk: Open, _: Servers) -> None:
    chat = talk(tools=[CONTAINER])
    said = await chat.say(CODE)
    assert kinds(said) == ["code_interpreter_call", "message"], kinds(said)
    expect("42", said.output_text)
    expect_farewell((await chat.say(BYE)).output_text)


async def custom(talk: Open, _: Servers) -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": r"\d+ \+ \d+"}
    chat = talk(tools=[{"type": "custom", "name": "sum", "format": grammar}])
    call = (await chat.say('call sum {"input": "4 + 4"}')).output[-1]
    assert isinstance(call, ResponseCustomToolCall), call
    assert call.input == "4 + 4"
    said = await chat.send({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "it is 8"})
    expect("it is 8", said.output_text)


async def apply_patch(talk: Open, _: Servers) -> None:
    chat = talk(tools=[{"type": "apply_patch"}])
    call = (await chat.say('call apply_patch {"type": "update_file", "path": "a.txt", "diff": "@@\\n-a\\n+b"}')).output[-1]
    assert call.type == "apply_patch_call", call
    assert call.operation.to_dict() == {"type": "update_file", "path": "a.txt", "diff": "@@\n-a\n+b"}
    output = {"type": "apply_patch_call_output", "call_id": call.call_id, "status": "completed", "output": "patched"}
    expect("patched", (await chat.send(output)).output_text)


async def shell(talk: Open, _: Servers) -> None:
    chat = talk(tools=[{"type": "shell", "environment": {"type": "local"}}])
    call = (await chat.say('call shell {"commands": ["ls -l"], "timeout_ms": 1000}')).output[-1]
    assert call.type == "shell_call", call
    assert call.action.commands == ["ls -l"]
    result = {"stdout": "listed", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    said = await chat.send({"type": "shell_call_output", "call_id": call.call_id, "output": [result]})
    expect("listed", said.output_text)


async def tool_search(talk: Open, _: Servers) -> None:
    chat = talk(tools=[FINDER])
    call = (await chat.say('call tool_search {"goal": "weather"}')).output[-1]
    assert call.type == "tool_search_call", call
    found = {"type": "namespace", "name": "outside", "description": "d", "tools": [{**WEATHER, "defer_loading": True}]}
    output = {"type": "tool_search_output", "execution": "client", "call_id": call.call_id, "status": "completed"}
    wish = {"role": "user", "content": 'call outside__get_weather {"city": "Oslo"}'}
    asked = (await chat.send({**output, "tools": [found]}, wish)).output[-1]
    assert asked.type == "function_call", asked
    assert (asked.namespace, asked.name) == ("outside", "get_weather")
    said = await chat.send({"type": "function_call_output", "call_id": asked.call_id, "output": "Sunny"})
    expect("Sunny", said.output_text)


async def stream_helper(client: AsyncOpenAI, place: Servers, way: Way) -> None:
    """Use the SDK's own helper, which builds the response from the events and parses structured output."""
    tools: list[Any] = [place.mcp_tool(), CONTAINER]
    told = f'call get_weather {{"city": "Oslo"}}\n{CODE}'
    settings: dict[str, Any] = {"model": MODEL, "input": told, "tools": tools, "store": way.mode != "store=False"}
    if way.streamed:
        async with client.responses.stream(**settings, text_format=Answer) as stream:
            response = await stream.get_final_response()
    else:
        response = await client.responses.parse(**settings, text_format=Answer)
    assert response.output_parsed is not None
    expect("Sunny in Oslo", response.output_parsed.answer)
    expect("42", response.output_parsed.answer)


async def background(client: AsyncOpenAI, place: Servers, way: Way) -> None:
    settings: dict[str, Any] = {"model": MODEL, "background": True, "tools": [place.mcp_tool()]}
    response = None
    if way.streamed:
        async for event in await client.responses.create(stream=True, input='call get_weather {"city": "Oslo"}', **settings):
            response = getattr(event, "response", response)
    else:
        response = await client.responses.create(input='call get_weather {"city": "Oslo"}', **settings)
    assert response is not None
    while (kept := await client.responses.retrieve(response.id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
    expect("Sunny in Oslo", kept.output_text)


async def vector_store(client: AsyncOpenAI, _way: Way) -> None:
    stores = client.vector_stores
    store = await stores.create(name="handbook")
    leave = ("leave.md", b"Every employee has 28 days of annual leave.")
    file = await stores.files.upload_and_poll(vector_store_id=store.id, file=leave)
    assert (file.status, file.last_error) == ("completed", None), file
    batch = await stores.file_batches.upload_and_poll(
        store.id, files=[("pay.md", b"Salaries are paid at the end of the month.")]
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", 1), batch
    again = await stores.files.create_and_poll(file.id, vector_store_id=store.id, attributes={"year": 2026})
    assert (again.status, again.attributes) == ("completed", {"year": 2026}), again
    found = await stores.search(store.id, query="How many days of leave do I have?")
    assert found.data[0].filename == "leave.md"
    expect("28 days", found.data[0].content[0].text)
    await stores.delete(store.id)


TRIES: dict[str, Try] = {
    "functions in parallel": functions,
    "one function, by name": one_function,
    "MCP server": mcp,
    "MCP server, over SSE": partial(mcp, sse=True),
    "MCP server, approved": partial(approval, approve=True),
    "MCP server, declined": partial(approval, approve=False),
    "web search": web_search,
    "file search": file_search,
    "code interpreter": code,
    "custom tool with a grammar": custom,
    "apply_patch": apply_patch,
    "shell": shell,
    "tool search": tool_search,
}


async def main() -> int:
    place = servers()
    async with AsyncOpenAI(base_url=place.url, api_key=KEY, max_retries=0) as client:

        def case(name: str, attempt: Try) -> Case:
            return Case(name, lambda way: attempt(partial(Talk, client, way), place))

        cases = [case(name, attempt) for name, attempt in TRIES.items()]
        cases.append(Case("stream and parse helpers", partial(stream_helper, client, place)))
        status = await run("openai", cases, MODES)
        # these are stored by their nature
        stored = [
            Case("background", partial(background, client, place)),
            Case("vector store", partial(vector_store, client)),
        ]
        return max(status, await run("openai", stored, MODES[:1]))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
