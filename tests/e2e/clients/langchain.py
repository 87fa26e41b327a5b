"""LangChain's `ChatOpenAI` over the Responses API: `python -m tests.e2e.clients.langchain URL MCP SSE STORE`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, custom_tool
from pydantic import BaseModel

from tests.e2e.clients.cases import (
    BYE,
    CODE,
    FILES,
    FOUND,
    IN_FILE,
    KEY,
    MODEL,
    SEARCH,
    SIGNED,
    WEATHER,
    Case,
    Servers,
    Way,
    expect,
    expect_farewell,
    run,
    servers,
)

SEALED: dict[str, Any] = {
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "previous_response_id": {"use_previous_response_id": True},
    "store=False": SEALED,
    "store=False, content v1": {**SEALED, "output_version": "v1"},
}


class Answer(BaseModel):
    answer: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}"


def run_code(code: str) -> str:
    """Run Python code."""
    return f"{code} is 27"


async def ask(model: Any, told: Any, way: Way) -> Any:
    """Return the message, or the result of the model's parser."""
    if not way.streamed:
        return await model.ainvoke(told)
    whole = None
    async for chunk in model.astream(told):
        whole = chunk if whole is None or not hasattr(chunk, "content") else whole + chunk
    return whole


Try = Callable[[Any, Way], Awaitable[None]]


async def functions(model: Any, way: Way) -> None:
    weather = tool(get_weather)
    bound = model.bind_tools([weather])
    said: list[Any] = [HumanMessage('call get_weather {"city": "Oslo"}\ncall get_weather {"city": "Rome"}')]
    asked = await ask(bound, said, way)
    assert [call["args"] for call in asked.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    said += [asked, *(weather.invoke(call) for call in asked.tool_calls)]
    said.append(await ask(bound, said, way))
    expect("Sunny in Oslo | Sunny in Rome", said[-1].text)
    expect_farewell((await ask(bound, [*said, HumanMessage(BYE)], way)).text)


async def signed(model: Any, way: Way) -> None:
    if way.mode == "plain":
        return  # what LangChain streams lacks members that OpenAI's API does not have
    weather = tool(get_weather)
    bound = model.bind_tools([weather])
    said: list[Any] = [HumanMessage(SIGNED)]
    for _ in range(2):
        asked = await ask(bound, said, way)
        said += [asked, *(weather.invoke(call) for call in asked.tool_calls)]
    said.append(await ask(bound, said, way))
    expect("Sunny in Oslo | Sunny in Rome | Sunny in Bonn", said[-1].text)
    expect_farewell((await ask(bound, [*said, HumanMessage(BYE)], way)).text)


async def one_function(model: Any, way: Way) -> None:
    bound = model.bind_tools([tool(get_weather)], tool_choice="get_weather", parallel_tool_calls=False, strict=True)
    assert [call["args"] for call in (await ask(bound, WEATHER, way)).tool_calls] == [{"city": "Oslo"}]


async def structured(model: Any, way: Way) -> None:
    assert await ask(model.with_structured_output(Answer), "yes", way) == Answer(answer="yes")
    by_call = model.with_structured_output(Answer, method="function_calling")
    assert await ask(by_call, 'call Answer {"answer": "yes"}', way) == Answer(answer="yes")


async def custom(model: Any, way: Way) -> None:
    code = custom_tool(run_code)
    bound = model.bind_tools([code])
    said: list[Any] = [HumanMessage('call run_code {"input": "3 ** 3"}')]
    asked = await ask(bound, said, way)
    assert asked.tool_calls, asked.content
    expect("3 ** 3 is 27", (await ask(bound, [*said, asked, *(code.invoke(call) for call in asked.tool_calls)], way)).text)


async def hosted(tools: dict[str, Any], told: str, expected: str, model: Any, way: Way) -> None:
    bound = model.bind_tools([tools])
    said: list[Any] = [HumanMessage(told)]
    said.append(await ask(bound, said, way))
    if tools.get("require_approval") == "always":
        response = {"type": "mcp_approval_response", "approve": True, "approval_request_id": _request(said[-1])}
        said.append(HumanMessage([response]))
        said.append(await ask(bound, said, way))
    expect(expected, said[-1].text)
    if way.mode.startswith("store=False"):
        expect("encrypted_content", said[-1].content)
    expect_farewell((await ask(bound, [*said, HumanMessage(BYE)], way)).text)


def _request(message: Any) -> str:
    """Return the id of the approval request, which content v1 wraps."""
    blocks = [block.get("value", block) for block in message.content]
    return next(str(block["id"]) for block in blocks if block["type"] == "mcp_approval_request")


def tries(place: Servers) -> dict[str, Try]:
    container = {"type": "code_interpreter", "container": {"type": "auto"}}
    asking = place.mcp_tool(approval="always")
    return {
        "functions in parallel": functions,
        "functions with signatures": signed,
        "one function, by name": one_function,
        "structured output": structured,
        "custom tool": custom,
        "MCP server": partial(hosted, dict(place.mcp_tool()), WEATHER, "Sunny in Oslo"),
        "MCP server, approved": partial(hosted, dict(asking), WEATHER, "Sunny in Oslo"),
        "web search": partial(hosted, {"type": "web_search"}, SEARCH, FOUND),
        "file search": partial(hosted, {"type": "file_search", "vector_store_ids": [place.store]}, FILES, IN_FILE),
        "code interpreter": partial(hosted, container, CODE, "42"),
    }


async def main() -> int:
    place = servers()

    def case(name: str, attempt: Try) -> Case:
        async def run_case(way: Way) -> None:
            given: dict[str, Any] = {"model": MODEL, "base_url": place.url, "api_key": KEY, "max_retries": 0}
            await attempt(ChatOpenAI(**given, use_responses_api=True, **MODES[way.mode]), way)

        return Case(name, run_case)

    return await run("langchain", [case(name, attempt) for name, attempt in tries(place).items()], MODES)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
