"""How often the prefix cache of real vLLM servers is hit by interleaved chains: one server, several behind us, and round robin.

    python -m benchmarks.prefix_cache http://127.0.0.1:8000 http://127.0.0.1:8001

The servers must run with prefix caching. Each chain is a first question and follow-ups with `previous_response_id`. Each
arrangement gets chains of its own, so that no cache has seen them. The rates are those that the servers report.
"""

import argparse
import asyncio
import itertools
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from .processes import free_port, running

_WORDS = ["river", "stone", "cloud", "amber", "forest", "winter", "candle", "harbour", "meadow", "silver", "thunder", "valley"]
_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{[^}]*\} (\S+)$", re.MULTILINE)


def round_robin(upstreams: Sequence[str]) -> Starlette:
    """Create an app that sends each request to the next of `upstreams`, as a Service without affinity does."""
    following = itertools.cycle(upstreams)
    client = httpx.AsyncClient(timeout=None, trust_env=False)

    async def relay(request: Request) -> StreamingResponse:
        headers = [(name, value) for name, value in request.headers.raw if name not in (b"host", b"content-length")]
        url = next(following) + request.url.path
        answer = await client.send(
            client.build_request(request.method, url, headers=headers, content=await request.body()), stream=True
        )
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, answer.headers, background=BackgroundTask(answer.aclose)
        )

    return Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])])


@asynccontextmanager
async def _serving(app: Starlette) -> AsyncIterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    task = asyncio.create_task(server.serve())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def _ours(*upstreams: str) -> AsyncIterator[str]:
    serving = running("responses_mw", "serve", f"--upstream={','.join(upstreams)}", "--server.log-level=warning")
    with ExitStack() as stack:
        server = await asyncio.to_thread(stack.enter_context, serving)  # the balancer must answer while it starts
        yield server.url


async def _counters(servers: Sequence[str]) -> dict[str, float]:
    total = {"queries": 0.0, "hits": 0.0}
    async with httpx.AsyncClient() as client:
        for server in servers:
            for name, value in _COUNTER.findall((await client.get(f"{server}/metrics")).text):
                total[name] += float(value)
    return total


async def _chain(client: httpx.AsyncClient, url: str, turns: int, words: random.Random) -> None:
    previous: dict[str, str] = {}
    for turn in range(turns):
        text = " ".join(words.choices(_WORDS, k=150 if turn == 0 else 40))
        body = {"model": "tiny", "input": text, "max_output_tokens": 30, "temperature": 0, **previous}
        answer = await client.post(f"{url}/v1/responses", json=body)
        answer.raise_for_status()
        previous = {"previous_response_id": answer.json()["id"]}


async def _measure(url: str, servers: Sequence[str], chains: int, turns: int, parallel: int) -> float:
    """Return the share of prompt tokens that the servers found in their caches."""
    before = await _counters(servers)
    limit = asyncio.Semaphore(parallel)
    async with httpx.AsyncClient(timeout=None) as client:

        async def run() -> None:
            async with limit:
                await _chain(client, url, turns, random.Random())

        await asyncio.gather(*(run() for _ in range(chains)))
    after = await _counters(servers)
    return (after["hits"] - before["hits"]) / (after["queries"] - before["queries"])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--chains", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--parallel", type=int, default=10, help="chains in progress at a time")
    options = parser.parse_args()
    measured = options.chains, options.turns, options.parallel
    servers = options.servers
    async with _ours(servers[0]) as url:
        one = await _measure(url, servers[:1], *measured)
    async with _ours(*servers) as url:
        several = await _measure(url, servers, *measured)
    async with _serving(round_robin(servers)) as balancer, _ours(balancer) as url:
        rotating = await _measure(url, servers, *measured)
    print(f"one server           {one:.3f}")
    print(f"{len(servers)} servers            {several:.3f}  ({several / one:.3f} of one server)")
    print(f"{len(servers)}, round robin      {rotating:.3f}  ({rotating / one:.3f} of one server)")


if __name__ == "__main__":
    asyncio.run(main())
