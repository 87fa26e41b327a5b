"""Measures how soon the upstream's connection is closed after a cancel at another replica."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop

from benchmarks.background import replica_flags, valkey
from benchmarks.load import percentile
from benchmarks.processes import free_port, running
from benchmarks.upstream import MODEL, Connection, Wheel, monotonic_us

TOKENS, TOKENS_PER_SECOND = 10_000, 20
PREFILL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in ms from sending the cancel to the closing of the upstream's connection, and to the answer."""

    median_ms: float
    longest_ms: float
    answer_ms: float
    failed: int


class _Watched(Connection):
    """An upstream's connection that records when it is lost. The prompt is the number of the response."""

    def __init__(
        self, wheels: tuple[Wheel, float], asked: dict[int, asyncio.Event], lost: dict[int, asyncio.Future[int]]
    ) -> None:
        super().__init__(*wheels)
        self._asked = asked
        self._lost = lost
        self._number: int | None = None

    def _complete(self, request: dict[str, Any]) -> None:
        self._number = int(request["messages"][-1]["content"])
        self._first_byte_delay = PREFILL_SECONDS if self._number % 2 else 0.0
        super()._complete(request)
        self._asked[self._number].set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._number is not None and not self._lost[self._number].done():
            self._lost[self._number].set_result(monotonic_us())


def measure_cancel(responses: int) -> Figures:
    """Cancel `responses` one at a time, alternately in mid-answer and while the upstream is still silent."""
    return uvloop.run(_measure(responses))


async def _measure(responses: int) -> Figures:
    loop, port, wheel = asyncio.get_running_loop(), free_port(), Wheel(TOKENS_PER_SECOND)
    asked = {number: asyncio.Event() for number in range(responses)}
    lost: dict[int, asyncio.Future[int]] = {number: loop.create_future() for number in range(responses)}
    server = await loop.create_server(lambda: _Watched((wheel, 0.0), asked, lost), "127.0.0.1", port)
    with contextlib.ExitStack() as stack:
        _, redis = stack.enter_context(valkey())
        flags = ("serve", *replica_flags(f"http://127.0.0.1:{port}", redis))
        await asyncio.to_thread(stack.enter_context, running("responses_mw", *flags, f"--jobs.concurrency={responses}"))
        other = await asyncio.to_thread(stack.enter_context, running("responses_mw", *flags, "--jobs.concurrency=0"))
        async with server, aiohttp.ClientSession(other.url, timeout=aiohttp.ClientTimeout(60)) as client:
            cancels = [await _cancel(client, number, asked[number], lost[number]) for number in range(responses)]
    closed = sorted(cancel[0] for cancel in cancels)
    answered = sorted(cancel[1] for cancel in cancels)
    return Figures(
        median_ms=percentile(closed, 0.5) / 1000,
        longest_ms=closed[-1] / 1000,
        answer_ms=percentile(answered, 0.5) / 1000,
        failed=sum(not cancel[2] for cancel in cancels),
    )


async def _cancel(
    client: aiohttp.ClientSession, number: int, asked: asyncio.Event, lost: asyncio.Future[int]
) -> tuple[int, int, bool]:
    """Return the microseconds until the connection was closed and until the answer, and whether the answer was right."""
    body = {"model": MODEL, "input": str(number), "max_output_tokens": TOKENS, "background": True}
    async with client.post("/v1/responses", json=body) as answer:
        path = f"/v1/responses/{(await answer.json())['id']}"
    await asked.wait()
    await asyncio.sleep(0.3)  # some tokens have been written, or the upstream is silent
    began = monotonic_us()
    async with client.post(f"{path}/cancel") as answer:
        document = await answer.json()
    answered = monotonic_us()
    closed = await asyncio.wait_for(asyncio.shield(lost), 60)
    return closed - began, answered - began, document["status"] == "cancelled"
