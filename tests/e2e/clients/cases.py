"""What the programs that try a client have in common. They run where the client is installed, and this project is not."""

from __future__ import annotations

import argparse
import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypedDict

MODEL = "gpt-5"
"""What the scripted model is called: some clients ask for reasoning only of models that they know to reason."""
KEY = "key"
MOST_SHOWN = 600

WEATHER = 'call get_weather {"city": "Oslo"}'
WEATHERS = 'call get_weather {"city": "Oslo"}\ncall get_weather {"city": "Rome"}\nthen\ncall get_weather {"city": "Bonn"}'
SEARCH = 'call web_search {"query": "capital of france"}'
FOUND = "largest city of France"
CODE = 'call python {"code": "print(6 * 7)"}'
BYE = "say bye"


class McpTool(TypedDict):
    type: str
    server_label: str
    server_url: str
    require_approval: str


@dataclass(frozen=True, slots=True)
class Servers:
    """Our server's URL, with `/v1`, and those of the MCP server over its two transports."""

    url: str
    mcp: str
    sse: str

    def mcp_tool(self, *, approval: str = "never", url: str = "") -> McpTool:
        return McpTool(type="mcp", server_label="weather", server_url=url or self.mcp, require_approval=approval)


@dataclass(frozen=True, slots=True)
class Way:
    """How a case is run: in which mode, and streamed or not."""

    mode: str
    streamed: bool

    def __str__(self) -> str:
        return f"{self.mode}, {'streamed' if self.streamed else 'not streamed'}"


@dataclass(frozen=True, slots=True)
class Case:
    """`run` fails by raising."""

    name: str
    run: Callable[[Way], Awaitable[None]]


def expect(expected: str, said: object) -> None:
    """Raises `AssertionError` where `said` has not `expected` in it."""
    if expected not in str(said):
        raise AssertionError(f"there should be {expected!r} in {str(said)[:MOST_SHOWN]!r}")


def expect_farewell(said: object) -> None:
    """The second turn's answer: it tells of the first, which began with a call or another word."""
    expect(BYE, said)
    expect("first: call", said)


def ways(modes: Iterable[str]) -> list[Way]:
    return [Way(mode, streamed) for mode in modes for streamed in (False, True)]


def servers() -> Servers:
    """Where they are, from the command line."""
    parser = argparse.ArgumentParser()
    for name in ("url", "mcp", "sse"):
        parser.add_argument(name)
    given = parser.parse_args()
    return Servers(given.url, given.mcp, given.sse)


async def run(client: str, cases: Iterable[Case], modes: Iterable[str]) -> int:
    """Runs each case in each way, and prints a line for it and one for each way that failed. 1 if any did, else 0."""
    tried, failed = ways(modes), 0
    for case in cases:
        began = time.monotonic()
        faults = [fault for way in tried if (fault := await _fault(case, way))]
        word = "FAILED" if faults else "ok"
        print(f"{word:<7}{client:<15}{case.name:<30}{len(tried)} ways {time.monotonic() - began:5.1f} s", flush=True)
        for fault in faults:
            print(f"       - {fault}", flush=True)
        failed += bool(faults)
    return int(failed > 0)


async def _fault(case: Case, way: Way) -> str:
    try:
        async with asyncio.timeout(60):
            await case.run(way)
    except Exception as error:  # noqa: BLE001 (a client may raise anything, and the other cases shall run)
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{way}: {type(error).__name__} at {where.name}:{where.lineno}: {str(error)[:MOST_SHOWN]}"
    return ""
