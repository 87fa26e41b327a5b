"""Put load on a running deployment: open streams, run a part of them as background responses, and print latencies and results.

    pip install httpx
    python deploy/load.py                                             # 20 streams at a time for 30 s
    python deploy/load.py --streams 200 --seconds 120 --background 10 --url https://responses.example.com --model my-model

OPENAI_API_KEY sets the credential. The exit status is 1 if any response did not complete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import quantiles

import httpx

_ENDS = {"response.completed", "response.incomplete", "response.failed"}


@dataclass(slots=True)
class Seen:
    """Measurements of all clients. Times are in seconds, `ends` counts results."""

    first_events: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)


async def main(given: argparse.Namespace) -> int:
    headers = {"authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(600, connect=10)
    seen = Seen()
    begun = time.monotonic()
    async with httpx.AsyncClient(
        base_url=given.url, headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as client:
        model = given.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        async with asyncio.TaskGroup() as clients:
            for number in range(given.streams):
                body = {"model": model, "input": given.input, "stream": True, "background": number < given.background}
                clients.create_task(ask_until(client, body, begun + given.seconds, seen))
    tell(model, seen, time.monotonic() - begun)
    return int(seen.ends.keys() != {"response.completed"})


async def ask_until(client: httpx.AsyncClient, body: dict[str, object], end: float, seen: Seen) -> None:
    """Send requests one after another until the monotonic time `end`, but at least one. Results are added to `seen`."""
    while True:
        try:
            seen.ends[await ask(client, body, seen)] += 1
        except httpx.HTTPError as error:
            seen.ends[type(error).__name__] += 1
            await asyncio.sleep(0.5)
        if time.monotonic() >= end:
            return


async def ask(client: httpx.AsyncClient, body: dict[str, object], seen: Seen) -> str:
    """Request one response and add its measurements to `seen`.

    Return its result: the terminal event, "interrupted" if there was none, or the HTTP status of an error. After an HTTP
    error, wait as long as `Retry-After` says before returning.
    """
    begun = time.monotonic()
    event, tokens = "interrupted", 0
    async with client.stream("POST", "/v1/responses", json=body) as answer:
        if answer.is_error:
            await asyncio.sleep(float(answer.headers.get("retry-after", 0.5)))
            return f"HTTP {answer.status_code}"
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])["type"]
            if event == "response.created":
                seen.first_events.append(time.monotonic() - begun)
            elif event.endswith(".delta"):
                tokens += 1
                if tokens == 1:
                    seen.first_tokens.append(time.monotonic() - begun)
    seen.tokens += tokens
    seen.durations.append(time.monotonic() - begun)
    return event if event in _ENDS else "interrupted"


def tell(model: str, seen: Seen, seconds: float) -> None:
    print(f"{model}: {seen.ends.total()} responses, {seen.tokens / seconds:.0f} deltas/s over {seconds:.0f} s")
    for name, times in (("first event", seen.first_events), ("first token", seen.first_tokens), ("whole", seen.durations)):
        if len(times) > 1:
            cuts = [cut * 1000 for cut in quantiles(times, n=100, method="inclusive")]
            print(f"  {name:11}  median {cuts[49]:7.0f} ms   95 % {cuts[94]:7.0f} ms   99 % {cuts[98]:7.0f} ms")
    for end, count in seen.ends.most_common():
        print(f"  {end:20} {count}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Put load on a running deployment of responses-mw.")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="URL of the deployment, without /v1")
    parser.add_argument("--model", help="model name (default: the first model that the deployment lists)")
    parser.add_argument("--input", default="Tell me a story of a lighthouse.")
    parser.add_argument("--streams", type=int, default=20, help="streams at a time")
    parser.add_argument("--background", type=int, default=0, help="number of streams that are background responses")
    parser.add_argument("--seconds", type=float, default=30, help="seconds after which no new request is sent")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(arguments())))
