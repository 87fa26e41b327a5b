"""Measure what the cache costs and saves over HTTP on one machine: `python -m benchmarks.cache [--quick]`.

The benchmark runs real processes: a Valkey in memory, a paced upstream, an embeddings server without a model, and
`responses-mw serve`. The time of a request is measured from sending it to the last byte of its answer, on an open connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import numpy as np

from benchmarks.background import valkey
from benchmarks.embeddings import DIMENSIONS, embed
from benchmarks.processes import Server, running, usage
from benchmarks.upstream import MODEL
from responses_mw.auth import ANONYMOUS
from responses_mw.cache import Cache
from responses_mw.cache.entry import Entry, Key, pack
from responses_mw.cache.vectors import Scan, decode_vectors, encode_vector
from responses_mw.cache_models import create_embedder
from responses_mw.crypto import Sealer
from responses_mw.embeddings.vector import unit_vector
from responses_mw.protocol.request.create import parse
from responses_mw.settings import Settings
from responses_mw.state import connect
from responses_mw.upstream.pool import Pool

TOKENS = 256
ENTRIES = 10_000
FILLED_AT_ONCE = 50
ROUNDS = 10
SEARCHES = 200


@dataclass(slots=True)
class Cost:
    """The times of one kind of request in milliseconds, and the server's total CPU time for these requests in seconds."""

    times: list[float] = field(default_factory=list)
    cpu: float = 0.0

    async def add(self, server: Server, requests: AsyncIterator[float]) -> None:
        before = usage(server.pid).cpu_seconds
        self.times += [took async for took in requests]
        self.cpu += usage(server.pid).cpu_seconds - before

    @property
    def ms(self) -> float:
        """Median time in milliseconds."""
        return statistics.median(self.times)

    @property
    def cpu_us(self) -> float:
        """CPU time per request in microseconds."""
        return self.cpu * 1e6 / len(self.times)


@dataclass(frozen=True, slots=True)
class Searched:
    """Searches without HTTP: their median time in milliseconds, and how many agreed with an exhaustive search (`right`)."""

    ms: float
    right: int


@contextlib.contextmanager
def servers() -> Iterator[tuple[str, Server, Server, Server]]:
    """Run a Valkey, an upstream, an embeddings server and the server under test. Yield the Valkey's URL and the other three."""
    with contextlib.ExitStack() as stack:
        _, redis = stack.enter_context(valkey())
        upstream = stack.enter_context(running("benchmarks.upstream", "--tokens-per-second=2000"))
        embeddings = stack.enter_context(running("benchmarks.embeddings"))
        embedding = (
            f"--cache.embedding-url={embeddings.url}",
            "--cache.embedding-model=hashing",
            "--cache.timeout=5",
            "--cache.judge=off",
        )
        own = (f"--upstream={upstream.url}", f"--redis={redis}", "--server.log-level=error")
        yield redis, upstream, embeddings, stack.enter_context(running("responses_mw", "serve", *own, *embedding))


async def ask(http: aiohttp.ClientSession, question: str, cache: Any, told: str, **members: Any) -> float:
    """Send a request, and return the milliseconds until the last byte of its answer.

    `cache` and `members` are fields of the request. The answer's `x-responses-cache` header must start with `told`.
    """
    body = {"model": MODEL, "input": question, "max_output_tokens": TOKENS, "store": False, "cache": cache, **members}
    begun = time.perf_counter()
    async with http.post("/v1/responses", json=body) as response:
        await response.read()
        took = (time.perf_counter() - begun) * 1000
        response.raise_for_status()
        header = response.headers.get("x-responses-cache", "none")
    assert header.startswith(told), f"{header} instead of {told}"
    return took


async def measure(ours: Server, embeddings: Server, repeats: int) -> dict[str, Cost]:
    """Measure each kind of request in several rounds, because the speed of a shared machine changes from second to second.

    A round has `repeats` requests of each kind. Kinds that reach the upstream have a tenth of that number.
    """
    async with aiohttp.ClientSession(ours.url) as http:

        async def asked(texts: list[str], cache: Any, told: str, **members: Any) -> AsyncIterator[float]:
            for text in texts:
                yield await ask(http, text, cache, told, **members)

        streamed: dict[str, Any] = {"stream": True}
        short: dict[str, Any] = {"max_output_tokens": 1}
        reading = {"mode": "semantic", "no_store": True}
        one, near = "What is a cache for?", ["what is a cache-for"] * repeats
        await ask(http, one, "semantic", "miss", **streamed)
        for _ in range(20):  # a warm-up, so that one-time imports and allocations are not measured
            await ask(http, one, "exact", "exact")
            await ask(http, "Explain what a cache is for", reading, "", **streamed)
        costs: dict[str, Cost] = defaultdict(Cost)
        for turn in range(ROUNDS):
            others = [other(number) for number in range(turn * repeats, (turn + 1) * repeats)]
            new = [f"Question {turn}.{number}?" for number in range(max(1, repeats // 10))]
            await costs["streamed, no cache"].add(ours, asked(new, "off", "none", **streamed))
            await costs["exact hit, stream"].add(ours, asked([one] * repeats, "exact", "exact", **streamed))
            await costs["exact hit, JSON"].add(ours, asked([one] * repeats, "exact", "exact"))
            await costs["semantic hit, JSON"].add(ours, asked(near, reading, "semantic"))
            await costs["semantic hit, first of entry"].add(ours, asked(others, reading, "semantic"))
            await costs["embedding, one question"].add(embeddings, embedded(embeddings, near))
            await costs["embedding, many questions"].add(embeddings, embedded(embeddings, others))
            await costs["JSON of 1 token, no cache"].add(ours, asked(new, "off", "none", **short))
            await costs["JSON of 1 token, exact miss"].add(ours, asked(new, "exact", "miss", **short))
        return costs


async def embedded(server: Server, texts: list[str]) -> AsyncIterator[float]:
    async with aiohttp.ClientSession(server.url) as http:
        for text in texts:
            begun = time.perf_counter()
            async with http.post("/v1/embeddings", json={"model": "hashing", "input": text}) as response:
                await response.read()
                yield (time.perf_counter() - begun) * 1000
                response.raise_for_status()


def other(number: int) -> str:
    """Return a variant of a cached question. The first questions are skipped because they may have been evicted."""
    return question(FILLED_AT_ONCE + number).replace(" when ", "-when ")


async def fill(redis: str, upstream: Server, embeddings: Server, entries: int) -> Searched:
    """Store `entries` answers in the partition of the server's requests, as the server would, and measure searches in it."""
    settings = Settings(upstream={"url": upstream.url}, cache={"embedding_url": embeddings.url, "embedding_model": "hashing"})
    client, transport = connect(redis, timeout=60), httpx.AsyncHTTPTransport()
    try:
        embedding = create_embedder(transport, Pool.of(embeddings.url), settings)
        assert embedding is not None
        deployment, room = f"{upstream.url}\0{settings.upstream.think_tag}", settings.limits.memory_bytes
        cache = Cache(client, embedding, UNSEALED, settings.cache, deployment=deployment, memory_bytes=room)
        found = Scan(cache.entries, embedding.space, room)

        def key_of(text: str) -> Key:
            request = parse({"model": MODEL, "input": text, "max_output_tokens": TOKENS})
            key = cache.key(request, request.items, owner=ANONYMOUS, model=f"default\0{MODEL}", headers={})
            assert isinstance(key, Key)
            return key

        async def keep(number: int) -> None:
            text = question(number)
            key = key_of(text)
            vector = found.stored(unit_vector(embed(text)))
            part = {"type": "output_text", "text": "x" * 1000, "annotations": [], "logprobs": []}
            items = [{"type": "message", "status": "completed", "role": "assistant", "content": [part]}]
            entry = Entry(key.owner, key.exact, items, None, 3600, text)
            packed = pack(entry, UNSEALED)
            await cache.entries.keep(key, packed, generation="0", token="", ttl=3600, response=f"resp_{number}", vector=vector)

        for start in range(0, entries, FILLED_AT_ONCE):
            await asyncio.gather(*(keep(number) for number in range(start, min(start + FILLED_AT_ONCE, entries))))
        return await searched(found, key_of("What?"), entries)
    finally:
        await client.aclose()
        await transport.aclose()


UNSEALED = Sealer()


def question(number: int) -> str:
    """Return a question. Different questions have few words in common, like real ones."""
    digest = hashlib.blake2b(str(number).encode(), digest_size=12).digest()
    syllables = [CONSONANTS[byte % 16] + VOWELS[byte // 16 % 4] for byte in digest]
    words = ["".join(syllables[start : start + 3]) for start in range(0, 12, 3)]
    return "How does {} change {} when {} meets {}?".format(*words)


CONSONANTS, VOWELS = "bcdfghjklmnprtvz", "aeiu"


async def searched(found: Scan, key: Key, entries: int) -> Searched:
    """Measure searches in a filled partition."""
    kept = decode_vectors([encode_vector(unit_vector(embed(question(number)))) for number in range(entries)], DIMENSIONS)
    times, right, threshold = [], 0, Settings().cache.threshold
    for number in range(SEARCHES + 1):
        asked = unit_vector(embed(question(number * 37) + " Tell me."))
        begun = time.perf_counter()
        await found.nearest(key, asked, threshold)
        times.append((time.perf_counter() - begun) * 1000)
        near = await found.nearest(key, asked, 0.0)
        # A matrix product would wake threads of BLAS, which would spin while the next search is timed.
        expected = np.sort(np.vecdot(kept, asked))[::-1][: len(near)]
        similar = np.asarray([one.similarity for one in near])
        right += bool(number and len(near) and np.allclose(similar, expected, atol=1e-4))
    return Searched(statistics.median(times[1:]), right)  # the first search also reads the partition


def report(costs: dict[str, Cost], entries: int, alone: Searched) -> None:
    print(f"{'':30}{'ms':>10}{'CPU us':>10}")
    for name, one in costs.items():
        print(f"{name:30}{one.ms:10.2f}{one.cpu_us:10.0f}")
    exact, stream = costs["exact hit, stream"], costs["streamed, no cache"]
    semantic = costs["semantic hit, JSON"].ms - costs["embedding, one question"].ms
    first = costs["semantic hit, first of entry"].ms - costs["embedding, many questions"].ms
    missed = costs["JSON of 1 token, exact miss"].ms - costs["JSON of 1 token, no cache"].ms
    print(f"an exact hit takes {exact.ms:.2f} ms (at most 2)")
    print(f"a streamed answer of {TOKENS} tokens takes {stream.cpu_us / exact.cpu_us:.0f} times the CPU of a hit (at least 20)")
    print(f"a semantic hit among {entries} entries takes {semantic:.2f} ms more than the embedding (at most 3)")
    print(f"the first semantic hit of an entry takes {first:.2f} ms more than the embedding (at most 3)")
    print(f"a search alone takes {alone.ms:.2f} ms; {alone.right} of {SEARCHES} agree with an exhaustive search")
    print(f"an exact miss whose answer is then stored adds {missed:.2f} ms to a request")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description="Measure the cache over HTTP.")
    parser.add_argument("--quick", action="store_true", help="one short round, as a smoke test")
    options = parser.parse_args()
    repeats, entries = (5, 500) if options.quick else (100, ENTRIES)
    with servers() as (redis, upstream, embeddings, ours):
        alone = asyncio.run(fill(redis, upstream, embeddings, entries))
        costs = asyncio.run(measure(ours, embeddings, repeats))
    report(costs, entries, alone)


if __name__ == "__main__":
    main()
