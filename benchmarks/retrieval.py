"""Searches of vector stores: `python -m benchmarks.retrieval quality DIRECTORY` and `... speed`.

`quality` searches the answers to the questions of `benchmarks.questions` by words only, by vectors only and by both. `speed`
measures searches of stores with 10,000 and 100,000 chunks of 800 tokens in an embedded Valkey, cold (the first search of a
process) and warm.

On two busy cores of 2026, 491 questions, 7,357 documents, 12,937 chunks, built-in vectors; in brackets, the half of the
questions with which the way to fuse the rankings was chosen, and the other half:

    words only    nDCG@10 0.316 (0.318 0.313), recall@10 0.450
    vectors only  nDCG@10 0.332 (0.354 0.311), recall@10 0.491
    both          nDCG@10 0.431 (0.439 0.424), recall@10 0.607

    10,000 chunks    cold 300 ms, warm 12 ms (at best 6), memory 29 MiB
    100,000 chunks   cold 4.2 s, warm 18 ms (at best 11), memory 278 MiB

`module` compares searches by a search module with those in memory, of random texts or, with `--texts`, of the real texts of
all packages in the directory. With 508,000 chunks of such texts, the questions of `benchmarks.questions`, and the same cores,
busy with other work: 7 kB for each chunk; 45 ms for a search, of which the server computes for 24 ms and the process for 18 ms;
recall@10 0.976, by vectors only 0.978.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from responses_mw.embeddings.static import DIMENSION, StaticEmbedder, count_tokens
from responses_mw.files.chunks import split
from responses_mw.files.indexing import Indexing
from responses_mw.files.ranking import Ranking, Weights
from responses_mw.files.retrieval import Retrieval
from responses_mw.files.search import Index, Query, Segment, search
from responses_mw.files.words import count_words, encode_words
from responses_mw.state import State, connect, open_embedded
from responses_mw.state.blocks import StoredBlock
from responses_mw.state.files import File, new_file_id
from responses_mw.state.store_file_records import NewFile
from responses_mw.state.store_files import new_generation
from responses_mw.state.vector_stores import VectorStore, new_store_id

from . import questions

OWNER = "benchmark"
WEIGHTS = {"words only": Weights(0, 1), "vectors only": Weights(1, 0), "both": Weights(1, 1)}
DEPTH = 10


# -- quality -------------------------------------------------------------------------------------------------------------


class Quality(NamedTuple):
    """The means over questions: nDCG and recall of the ten best documents. Each question has one right document."""

    ndcg: float
    recall: float

    @classmethod
    def of(cls, ranks: Sequence[int | None]) -> Quality:
        gains = [0.0 if rank is None else 1 / math.log2(rank + 2) for rank in ranks]
        return cls(sum(gains) / len(ranks), sum(rank is not None for rank in ranks) / len(ranks))


async def measure_quality(directory: Path) -> None:
    found = questions.load(directory)
    chunks = [(number, one.text) for number, document in enumerate(found.documents) for one in split(document, count_tokens)]
    embedder = StaticEmbedder()
    texts = [text for _, text in chunks]
    vectors = np.stack(await embedder.embed([text if text.strip() else "-" for text in texts])).astype(np.float16)
    index = Index((Segment.of_texts("all", texts, vectors),))
    queries = await embedder.embed([question.text for question in found.questions])
    print(f"{len(found.questions)} questions, {len(found.documents)} documents, {len(chunks)} chunks")
    for name, weights in WEIGHTS.items():
        ranks = list[int | None]()
        for question, vector in zip(found.questions, queries, strict=True):
            hits = search([(index, index.blocks)], [Query(vector, question.text)], 20 * DEPTH, weights)
            documents = list(dict.fromkeys(chunks[hit.chunk][0] for hit in hits))[:DEPTH]
            ranks.append(documents.index(question.document) if question.document in documents else None)
        # The way to fuse the rankings was chosen with the odd ones.
        all_of, odd, even = Quality.of(ranks), Quality.of(ranks[1::2]), Quality.of(ranks[::2])
        print(f"{name:13} nDCG@10 {all_of.ndcg:.3f} ({odd.ndcg:.3f} {even.ndcg:.3f}), recall@10 {all_of.recall:.3f}")


# -- speed ---------------------------------------------------------------------------------------------------------------

_WORDS = 550  # of a chunk with 800 tokens
_FILE_CHUNKS = 100
_VOCABULARY = 50_000
_SEARCHES = 40
_TOPICS = 1000  # the vectors are near those of topics


class Times(NamedTuple):
    """Seconds of searches: the median and the best, and the median of the CPU time of the process."""

    median: float
    best: float
    cpu: float

    def __str__(self) -> str:
        return f"median {self.median * 1e3:.1f} ms, best {self.best * 1e3:.1f} ms, CPU {self.cpu * 1e3:.1f} ms"


async def measure_speed(sizes: Sequence[int]) -> None:
    async with open_embedded(None, timeout=30) as client:
        state = State(client)
        for size in sizes:
            store_id, _ = await _fill(state, size, _blocks())
            retrieval = Retrieval(state, StaticEmbedder(), 2**32)
            await retrieval.search([(await _fill(state, 1, _blocks()))[0]], OWNER, ["warm up the embedder"])
            queries = [_query(number) for number in range(_SEARCHES)]
            cold = await _measure(retrieval, store_id, queries[:1])
            warm = await _measure(retrieval, store_id, queries)
            print(f"{size} chunks: cold {cold}; warm {warm}; memory {retrieval.memory.nbytes / 2**20:.0f} MiB", flush=True)


async def measure_module(url: str, size: int, directory: Path | None) -> None:
    state = State(connect(url, timeout=60))
    blocks = _blocks() if directory is None else _real_blocks(directory)
    queries = [_query(number) for number in range(_SEARCHES)]
    if directory is not None:
        queries = [question.text for question in Random(1).sample(questions.load(directory).questions, _SEARCHES)]
    store_id, size = await _fill(state, size, blocks)
    retrieval = Retrieval(state, StaticEmbedder(), 2**34)
    samples = [(query, weights) for query in queries for weights in (Weights(), Weights(1, 0))]
    before = int((await state.check()).used_memory)
    await _measure(retrieval, store_id, queries[:1])
    exact = await _measure(retrieval, store_id, queries)
    expected = [await _scores(retrieval, store_id, query, weights) for query, weights in samples]
    began = time.perf_counter()
    await Indexing(state).build(store_id, OWNER)
    rate = size / (time.perf_counter() - began)
    memory = (int((await state.check()).used_memory) - before) / size
    first = await _measure(retrieval, store_id, queries)
    indexed = await _measure(retrieval, store_id, queries)
    found = [await _scores(retrieval, store_id, query, weights) for query, weights in samples]
    # What counts is the score, because many chunks of real documents are alike. The module estimates how frequent words are.
    pairs = zip(found, expected, strict=True)
    recalls = [sum(score > other[-1] - 0.005 for score in one[: len(other)]) / len(other) for one, other in pairs]
    both, vectors = np.mean(recalls[::2]), np.mean(recalls[1::2])
    print(f"{size} chunks: {rate:.0f} chunks/s, {memory / 1000:.1f} kB for each chunk")
    print(f"  in memory   {exact}")
    print(f"  by module   {indexed}; recall@10 {both:.3f}, by vectors only {vectors:.3f}")
    print(f"  by module   {first} with words that have not been counted")
    await state.aclose()


async def _scores(retrieval: Retrieval, store_id: str, query: str, weights: Weights) -> list[float]:
    return [one.score for one in await retrieval.search([store_id], OWNER, [query], ranking=Ranking(weights=weights))]


def _query(number: int) -> str:
    return " ".join(f"word{word}" for word in _random_words(number, 12))


async def _measure(retrieval: Retrieval, store_id: str, queries: Sequence[str]) -> Times:
    walls, cpus = list[float](), list[float]()
    for query in queries:
        wall, cpu = time.perf_counter(), time.process_time()
        found = await retrieval.search([store_id], OWNER, [query], maximum=10, ranking=Ranking())
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        assert found
    return Times(sorted(walls)[len(walls) // 2], min(walls), sorted(cpus)[len(cpus) // 2])


async def _fill(state: State, size: int, blocks: AsyncIterator[StoredBlock]) -> tuple[str, int]:
    """Create a store with about `size` chunks, or with all blocks if there are fewer. Return its id and size."""
    now, found = int(time.time()), 0
    store = VectorStore(new_store_id(), "benchmark", now, now)
    await state.vector_stores.create(store, OWNER)
    async for block in blocks:
        if found >= size:
            break
        file = File(new_file_id(), f"{found}.txt", "assistants", 1, now, None, "")
        await state.files.create(file, OWNER)
        await state.store_files.attach(store.id, OWNER, [NewFile(file.id, file.filename, {}, {})], new_generation())
        record = await state.store_files.get(store.id, OWNER, file.id)
        await state.store_files.publish(record, OWNER, block)
        found += len(block.texts)
    return store.id, found


async def _real_blocks(directory: Path) -> AsyncIterator[StoredBlock]:
    embedder, count = StaticEmbedder(), cache(count_tokens)
    chunks = (chunk.text for text in questions.texts(directory) for chunk in split(text, count))
    while texts := list(islice((text for text in chunks if text.strip()), _FILE_CHUNKS)):
        vectors = np.stack(await embedder.embed(texts)).astype("<f2").tobytes()
        words = encode_words(count_words(texts))
        yield StoredBlock(StaticEmbedder.space, DIMENSION, texts, [0] * len(texts), vectors, words)


async def _blocks() -> AsyncIterator[StoredBlock]:
    """Yield blocks with random vectors, whose texts repeat after a while."""
    random = np.random.default_rng(1)
    topics = random.standard_normal((_TOPICS, DIMENSION)).astype(np.float32)
    number = 0
    while True:
        texts, words = _texts(number % 50)
        vectors = topics[random.integers(0, _TOPICS, len(texts))]
        vectors = vectors + random.standard_normal(vectors.shape).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        starts = [0] * len(texts)
        yield StoredBlock(StaticEmbedder.space, DIMENSION, texts, starts, vectors.astype("<f2").tobytes(), words)
        number += 1


@cache
def _texts(seed: int) -> tuple[list[str], bytes]:
    texts = [" ".join(f"word{word}" for word in _random_words(1000 * seed + one, _WORDS)) for one in range(_FILE_CHUNKS)]
    return texts, encode_words(count_words(texts))


def _random_words(seed: int, count: int) -> list[int]:
    """Return random words, which are as frequent as those of a language (Zipf's law)."""
    places = np.random.default_rng(seed).random(count)
    words: list[int] = (_VOCABULARY**places).astype(int).tolist()
    return words


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrieval", description="Measure searches of vector stores.")
    commands = parser.add_subparsers(dest="command", required=True)
    quality = commands.add_parser("quality", help="nDCG and recall")
    quality.add_argument("directory", type=Path, help="where the packages with the questions are or will be downloaded")
    speed = commands.add_parser("speed", help="times of searches")
    speed.add_argument("--chunks", type=int, action="append", help="chunks of a store (10,000 and 100,000)")
    module = commands.add_parser("module", help="times and recall of searches by the search module")
    module.add_argument("url", help="URL of an empty Redis server with a search module (see scripts/search-module)")
    module.add_argument("--chunks", type=int, default=100_000, help="chunks of the store (100,000)")
    module.add_argument("--texts", type=Path, help="directory of `quality`, to search real texts of all packages in it")
    options = parser.parse_args()
    if options.command == "quality":
        asyncio.run(measure_quality(options.directory))
    elif options.command == "module":
        asyncio.run(measure_module(options.url, options.chunks, options.texts))
    else:
        asyncio.run(measure_speed(options.chunks or [10_000, 100_000]))


if __name__ == "__main__":
    main()
