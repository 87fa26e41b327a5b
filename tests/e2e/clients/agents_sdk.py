"""The OpenAI Agents SDK: `python -m tests.e2e.clients.agents_sdk URL MCP SSE STORE`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import agents
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
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
    WEATHERS,
    Case,
    Servers,
    Way,
    expect,
    expect_farewell,
    run,
    servers,
)

MODES = ("plain", "previous_response_id", "store=False")
SEALED = agents.ModelSettings(
    store=False,
    response_include=["reasoning.encrypted_content"],
    reasoning=Reasoning(effort="low", summary="auto"),
)
PATCH = 'call apply_patch {"type": "update_file", "path": "a.txt", "diff": "@@\\n one\\n-two\\n+three"}'


class Answer(BaseModel):
    answer: str


class Files:
    """Files that patches are applied to."""

    def __init__(self) -> None:
        self._files = {"a.txt": "one\ntwo\n"}

    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        raise NotImplementedError

    def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        patched = agents.apply_diff(self._files[operation.path], operation.diff)
        self._files[operation.path] = patched
        return ApplyPatchResult(status="completed", output=f"it is now {patched.split()}")

    def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        raise NotImplementedError


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}"


async def shouted(_: Any, text: str) -> str:
    return text.upper()


def in_shell(request: Any) -> agents.ShellResult:
    outcome = agents.ShellCallOutcome(type="exit", exit_code=0)
    commands = request.data.action.commands
    return agents.ShellResult(
        output=[
            agents.ShellCommandOutput(command=one, stdout=_run("sh", "-c", one), stderr="", outcome=outcome) for one in commands
        ]
    )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True, slots=True)
class Play:
    """The prompts and options of an agent, and the expected result."""

    told: str
    expected: str
    agent: Callable[[], dict[str, Any]] = dict
    settings: dict[str, Any] = field(default_factory=dict)


def plays(place: Servers) -> dict[str, Play]:
    weather = agents.function_tool(get_weather)
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    asks = 'call get_weather {"city": "Oslo"}'

    def tools(*given: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"tools": list(given)}

    def hosted(*, approve: bool | None = None) -> Callable[[], dict[str, Any]]:
        config = place.mcp_tool(approval="never" if approve is None else "always")
        return tools(agents.HostedMCPTool(tool_config=config, on_approval_request=lambda _: {"approve": bool(approve)}))

    return {
        "functions in turn": Play(WEATHERS, "Sunny in Rome | Sunny in Bonn", tools(weather)),
        "a tool required": Play(asks, "Sunny", tools(weather), {"tool_choice": "required", "parallel_tool_calls": False}),
        "structured output": Play(asks, "Sunny", lambda: {"tools": [weather], "output_type": Answer}),
        "structured output, MCP server": Play(asks, "Sunny in Oslo", lambda: {**hosted()(), "output_type": Answer}),
        "handoff": Play(
            f"call transfer {{}}\nthen\n{asks}",
            "Sunny in Oslo",
            lambda: {"handoffs": [agents.Agent(name="other", model=MODEL, tools=[weather])]},
        ),
        "functions with signatures": Play(SIGNED, "Sunny in Rome | Sunny in Bonn", tools(weather)),
        "function and MCP server": Play(
            f'call local_weather {{"city": "Rome"}}\n{asks}\nthen\n{asks}\nthen\ncall local_weather {{"city": "Bonn"}}',
            "Sunny in Bonn",
            tools(
                agents.function_tool(get_weather, name_override="local_weather"),
                agents.HostedMCPTool(tool_config=place.mcp_tool()),
            ),
        ),
        "MCP server": Play(asks, "Sunny in Oslo", hosted()),
        "MCP server, approved": Play(asks, "Sunny in Oslo", hosted(approve=True)),
        "MCP server, declined": Play(asks, "did not approve", hosted(approve=False)),
        "web search": Play(SEARCH, FOUND, tools(agents.WebSearchTool()), {"tool_choice": "web_search"}),
        "file search": Play(
            FILES,
            IN_FILE,
            tools(agents.FileSearchTool(vector_store_ids=[place.store], max_num_results=5, include_search_results=True)),
            {"tool_choice": "file_search"},
        ),
        "code interpreter": Play(
            CODE,
            "42",
            tools(agents.CodeInterpreterTool(tool_config={"type": "code_interpreter", "container": {"type": "auto"}})),
        ),
        "custom tool with a grammar": Play(
            'call shout {"input": "abc"}',
            "ABC",
            tools(agents.CustomTool(name="shout", description="d", on_invoke_tool=shouted, format=grammar)),
        ),
        "apply_patch": Play(PATCH, "['one', 'three']", lambda: {"tools": [agents.ApplyPatchTool(editor=Files())]}),
        "shell": Play('call shell {"commands": ["echo $((40 + 2))"]}', "42", tools(agents.ShellTool(executor=in_shell))),
        "local_shell": Play(
            'call local_shell {"command": ["echo", "hello"], "env": {}}',
            "hello",
            tools(agents.LocalShellTool(executor=lambda request: _run(*request.data.action.command))),
        ),
        "namespace": Play(
            'call crm__get_weather {"city": "Oslo"}',
            "Sunny in Oslo",
            lambda: {"tools": agents.tool_namespace(name="crm", description="d", tools=[weather])},
        ),
    }


async def go(agent: Any, told: Any, way: Way, **options: Any) -> Any:
    """Return the result of a run."""
    if not way.streamed:
        return await agents.Runner.run(agent, told, **options)
    result = agents.Runner.run_streamed(agent, told, **options)
    async for _ in result.stream_events():
        pass
    return result


async def two_turns(play: Play, way: Way) -> None:
    sealed, chained = way.mode == "store=False", way.mode == "previous_response_id"
    settings = agents.ModelSettings(**play.settings)
    agent = agents.Agent(name="tried", model=MODEL, instructions="Obey.", model_settings=settings, **play.agent())
    # those of the run hold for the agent that takes over too
    config = agents.RunConfig(model_settings=SEALED if sealed else None)
    result = await go(agent, play.told, way, run_config=config, auto_previous_response_id=chained)
    expect(play.expected, result.final_output)
    if sealed:
        thoughts = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
        assert thoughts, "there should be reasoning"
        assert all(thought.encrypted_content for thought in thoughts), "the reasoning should be encrypted"
    if chained:
        more = await go(agent, BYE, way, run_config=config, previous_response_id=result.last_response_id)
    else:
        more = await go(agent, [*result.to_input_list(), {"role": "user", "content": BYE}], way, run_config=config)
    if agent.output_type is None:
        expect_farewell(more.final_output)


async def conversation(client: AsyncOpenAI, place: Servers, way: Way) -> None:
    """Run a conversation that is stored on the server, and a session of the SDK that uses one."""
    tool = agents.HostedMCPTool(tool_config=place.mcp_tool())
    agent = agents.Agent(name="tried", model=MODEL, tools=[tool])
    session = agents.OpenAIConversationsSession(openai_client=client)
    kept = await client.conversations.create()
    for options in ({"conversation_id": kept.id}, {"session": session}):
        result = await go(agent, 'call get_weather {"city": "Oslo"}', way, **options)
        expect("Sunny in Oslo", result.final_output)
        expect_farewell((await go(agent, BYE, way, **options)).final_output)


async def main() -> int:
    place = servers()
    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=place.url, api_key=KEY, max_retries=0) as client:
        agents.set_default_openai_client(client)
        cases = [Case(name, partial(two_turns, play)) for name, play in plays(place).items()]
        status = await run("openai-agents", cases, MODES)
        kept = Case("conversations", partial(conversation, client, place))
        return max(status, await run("openai-agents", [kept], ["conversation"]))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
