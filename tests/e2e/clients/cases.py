"""Shared code of the programs that test a client. They run in an environment that has the client but not this project."""

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
SIGNED = WEATHERS.replace("call", "sign")
SEARCH = 'call web_search {"query": "capital of france"}'
FOUND = "largest city of France"
FILES = 'call file_search {"queries": ["days of leave"]}'
IN_FILE = "28 days of annual leave"
"""What the file `handbook.md` in the vector store says."""
CODE = 'call python {"code": "print(6 * 7)"}'
BYE = "say bye"


class McpTool(TypedDict):
    type: str
    server_label: str
    server_url: str
    require_approval: str


@dataclass(frozen=True, slots=True)
class Servers:
    """The URL of our server, with `/v1`, the URLs of the MCP server for its two transports, and the id of a vector store."""

    url: str
    mcp: str
    sse: str
    store: str

    def mcp_tool(self, *, approval: str = "never", url: str = "") -> McpTool:
        return McpTool(type="mcp", server_label="weather", server_url=url or self.mcp, require_approval=approval)


@dataclass(frozen=True, slots=True)
class Way:
    """How a case is run: its mode, and whether it is streamed."""

    mode: str
    streamed: bool

    def __str__(self) -> str:
        return f"{self.mode}, {'streamed' if self.streamed else 'not streamed'}"


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a client. `run` raises an exception if the case fails."""

    name: str
    run: Callable[[Way], Awaitable[None]]


def expect(expected: str, said: object) -> None:
    """Raise `AssertionError` if `said` does not contain `expected`."""
    if expected not in str(said):
        raise AssertionError(f"there should be {expected!r} in {str(said)[:MOST_SHOWN]!r}")


def expect_farewell(said: object) -> None:
    """Check the answer of the second turn, which mentions the first turn. That one began with a call or another word."""
    expect(BYE, said)
    expect("first: ", said)


def ways(modes: Iterable[str]) -> list[Way]:
    return [Way(mode, streamed) for mode in modes for streamed in (False, True)]


def servers() -> Servers:
    """Return the URLs from the command line."""
    parser = argparse.ArgumentParser()
    for name in ("url", "mcp", "sse", "store"):
        parser.add_argument(name)
    given = parser.parse_args()
    return Servers(given.url, given.mcp, given.sse, given.store)


async def run(client: str, cases: Iterable[Case], modes: Iterable[str]) -> int:
    """Run each case in each way. Print a line for each case and for each failure. Return 1 if any case failed, otherwise 0."""
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
