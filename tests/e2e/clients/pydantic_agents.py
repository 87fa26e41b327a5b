"""Pydantic AI's `OpenAIResponsesModel`: `python -m tests.e2e.clients.pydantic_agents URL MCP SSE STORE`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.native_tools import CodeExecutionTool, FileSearchTool, MCPServerTool, WebSearchTool
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.cases import (
    BYE,
    CODE,
    FILES,
    FOUND,
    IN_FILE,
    KEY,
    MODEL,
    SEARCH,
    WEATHER,
    WEATHERS,
    Case,
    Servers,
    Way,
    expect,
    expect_farewell,
    run,
    servers,
)

MODES: dict[str, dict[str, Any]] = {
    "plain": {"openai_include_web_search_sources": True, "openai_include_code_execution_outputs": True},
    "previous_response_id": {"openai_previous_response_id": "auto"},
    "store=False": {"openai_store": False, "openai_reasoning_effort": "low", "openai_reasoning_summary": "auto"},
}


class Answer(BaseModel):
    answer: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}"


@dataclass(frozen=True, slots=True)
class Play:
    """The prompts and options of an agent, and the expected result."""

    told: str
    expected: str
    agent: dict[str, Any]


def plays(place: Servers) -> dict[str, Play]:
    result = f'{WEATHER}\nthen\ncall final_result {{"answer": "it is nice"}}'
    mcp = NativeTool(MCPServerTool(id="weather", url=place.mcp))
    return {
        "functions in turn": Play(WEATHERS, "Bonn", {"tools": [get_weather]}),
        "output by a tool": Play(result, "it is nice", {"tools": [get_weather], "output_type": Answer}),
        "structured output": Play(WEATHER, "Sunny in Oslo", {"tools": [get_weather], "output_type": NativeOutput(Answer)}),
        "MCP server": Play(WEATHER, "Sunny in Oslo", {"capabilities": [mcp]}),
        "web search": Play(SEARCH, FOUND, {"capabilities": [NativeTool(WebSearchTool(search_context_size="low"))]}),
        "file search": Play(FILES, IN_FILE, {"capabilities": [NativeTool(FileSearchTool(file_store_ids=[place.store]))]}),
        "code interpreter": Play(CODE, "42", {"capabilities": [NativeTool(CodeExecutionTool())]}),
    }


async def go(agent: Any, told: str, way: Way, history: list[Any] | None = None) -> tuple[Any, list[Any]]:
    """Return the output and all messages."""
    if not way.streamed:
        result = await agent.run(told, message_history=history)
        return result.output, result.all_messages()
    async with agent.run_stream(told, message_history=history) as result:
        async for _ in result.stream_output():
            pass
        return await result.get_output(), result.all_messages()


async def two_turns(model: Any, play: Play, way: Way) -> None:
    settings = OpenAIResponsesModelSettings(**MODES[way.mode])
    output, messages = await go(Agent(model, model_settings=settings, **play.agent), play.told, way)
    expect(play.expected, output)
    if way.mode == "store=False":
        thoughts = [part for message in messages for part in message.parts if isinstance(part, ThinkingPart)]
        assert thoughts, "there should be reasoning"
        assert all(thought.signature for thought in thoughts), "the reasoning should be encrypted"
    others = {name: given for name, given in play.agent.items() if name != "output_type"}
    output, _ = await go(Agent(model, model_settings=settings, **others), BYE, way, messages)
    expect_farewell(output)


async def main() -> int:
    place = servers()
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=place.url, api_key=KEY))
    return await run("pydantic-ai", [Case(name, partial(two_turns, model, play)) for name, play in plays(place).items()], MODES)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
