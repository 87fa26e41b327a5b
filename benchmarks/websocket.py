"""Compare the CPU per token and the lag of WebSockets and server-sent events: `python -m benchmarks.websocket`.

In both cases, the same clients (aiohttp) request the same answers at the same rate. One plan also has many idle WebSockets.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import aiohttp
import uvloop

from benchmarks.load import PROMPT, percentile
from benchmarks.processes import Server, raise_open_files, running, usage
from benchmarks.upstream import MODEL, STAMPED_DELTA, monotonic_us

STREAMS, TOKENS, TOKENS_PER_SECOND = 100, 200, 20
OPEN = 1000
BODY = {"model": MODEL, "input": PROMPT, "store": False, "max_output_tokens": TOKENS}


async def by_sse(client: aiohttp.ClientSession, seen: list[int]) -> bool:
    """Request one streamed answer. Return whether the answer was complete."""
    async with client.post("/v1/responses", json={**BODY, "stream": True}) as answer:
        last = b""
        async for data in answer.content.iter_any():
            _note(data, seen)
            last = data
        return b"response.completed" in last or b"[DONE]" in last


async def by_websocket(socket: aiohttp.ClientWebSocketResponse, seen: list[int]) -> bool:
    """Request one answer on a WebSocket. Return whether the answer was complete."""
    await socket.send_str(json.dumps({"type": "response.create", **BODY}))
    async for message in socket:
        data: bytes = message.data.encode()
        _note(data, seen)
        if data.startswith((b'{"type":"response.completed"', b'{"type":"response.failed"', b'{"type":"error"')):
            return data.startswith(b'{"type":"response.completed"')
    return False


def _note(data: bytes, seen: list[int]) -> None:
    now = monotonic_us()
    seen.extend(now - int(stamp) for stamp in STAMPED_DELTA.findall(data))


@contextlib.asynccontextmanager
async def sockets(client: aiohttp.ClientSession, count: int) -> AsyncIterator[list[aiohttp.ClientWebSocketResponse]]:
    """Open `count` WebSockets, and close them on exit."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client.ws_connect("/v1/responses", max_msg_size=0)) for _ in range(count)]


async def measure(ours: Server, *, websockets: int) -> str:
    """Measure `STREAMS` concurrent answers, each on one of `websockets` open WebSockets, or over HTTP if `websockets` is 0.

    Return the CPU of the server, the clients' lag behind the upstream, and the server's memory per open WebSocket, as text.
    """
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(ours.url, timeout=timeout, connector=connector) as client:
        memory = usage(ours.pid).rss_bytes
        async with sockets(client, websockets) as opened:
            grown = (usage(ours.pid).rss_bytes - memory) / 1000 / max(websockets, 1)
            seen: list[int] = []
            before = usage(ours.pid).cpu_seconds
            answers = []
            for number in range(STREAMS):
                answers.append(asyncio.create_task(by_websocket(opened[number], seen) if opened else by_sse(client, seen)))
                await asyncio.sleep(1 / TOKENS_PER_SECOND / STREAMS)
            good = await asyncio.gather(*answers)
            used = usage(ours.pid).cpu_seconds - before
    seen.sort()
    return (
        f"{used * 1e6 / (STREAMS * TOKENS):8.1f} us/token, lag {percentile(seen, 0.5) / 1000:.1f} ms, "
        f"p99 {percentile(seen, 0.99) / 1000:.1f} ms, {STREAMS - sum(good)} failed, {grown:.0f} kB per connection"
    )


def main() -> None:
    """Measure all plans twice, alternating, and print the figures."""
    raise_open_files()
    with (
        running("benchmarks.upstream", f"--tokens-per-second={TOKENS_PER_SECOND}") as upstream,
        running(
            "responses_mw",
            "serve",
            f"--upstream={upstream.url}",
            "--server.log-level=error",
            "--server.max-websockets=10000",
        ) as ours,
    ):
        plans = {"server-sent events": 0, f"{STREAMS} WebSockets": STREAMS, f"{OPEN} WebSockets": OPEN}
        for name, count in [*plans.items()] * 2:
            began = time.monotonic()
            figures = uvloop.run(measure(ours, websockets=count))
            print(f"{name:20}{figures}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
