"""Responses are completed on one replica, and each is continued at once on another. None may be missing.

Real processes: two replicas, a Valkey, and the benchmarks' chat server.
"""

from __future__ import annotations

import asyncio

import openai
import pytest

from benchmarks.processes import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

AT_A_TIME = 16


async def continued(a: openai.AsyncOpenAI, b: openai.AsyncOpenAI, number: int) -> list[str]:
    """Continue, on `b`, a response that has just completed on `a`, and return the roles in its history. Every other one is streamed."""
    first = await a.responses.create(model="tiny", input=f"first {number}", stream=True) if number % 2 else None
    if first is None:
        response = await a.responses.create(model="tiny", input=f"first {number}")
    else:
        async for event in first:
            if event.type == "response.completed":
                response = event.response
                break
    try:
        second = await b.responses.create(model="tiny", input="second", previous_response_id=response.id)
    finally:
        if first is not None:
            await first.close()
    return [str(getattr(item, "role", "")) async for item in a.responses.input_items.list(second.id, order="asc")]


async def test_a_response_can_be_continued_on_another_replica_at_once(redis_url: str, request: pytest.FixtureRequest) -> None:
    free = asyncio.Semaphore(AT_A_TIME)
    with running("benchmarks.upstream") as upstream:
        serve = ("responses_mw", "serve", f"--upstream={upstream.url}", f"--redis={redis_url}")
        with running(*serve) as first, running(*serve) as second:
            a, b = (
                openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="key", max_retries=0, timeout=60)
                for one in (first, second)
            )

            async def one(number: int) -> list[str]:
                async with free:
                    return await continued(*((a, b) if number % 4 < 2 else (b, a)), number)

            async with a, b:
                pairs = request.config.getoption("--pairs")
                histories = await asyncio.gather(*(one(number) for number in range(pairs)))
    assert histories == [["user", "assistant", "user"]] * pairs
