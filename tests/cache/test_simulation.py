"""Many requests in other words on three replicas that are killed at times, with a judge that is right 98 % of the time.

The suite simulates 1,000 requests. CACHE_SIMULATION=10000 simulates as many as docs/inside/cache-evaluation.md reports.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from responses_mw.cache import Cache, Hit, Miss, Policy, create_judge
from responses_mw.crypto import Sealer
from responses_mw.embeddings import Embedder
from responses_mw.embeddings.vector import Vector, unit_vector
from responses_mw.errors import Unavailable
from responses_mw.state import connect
from tests.cache.asking import answered, granted, key, settings, told
from tests.support.judges import ScriptedJudge

REQUESTS = int(os.environ.get("CACHE_SIMULATION", "1000"))
TOPICS, PHRASINGS, REPLICAS, CONCURRENT = REQUESTS // 40, 8, 3, 24
KILL_EVERY = 250
LOST = 0.02
"""Share of the races that the upstream wins although the judge would approve."""
POLICY = Policy("semantic", 3600, 0.5)


def question(topic: int, phrasing: int) -> str:
    """Return a question whose words tell nothing about its topic to the guard."""
    letters = "abcdefghij"
    return "Ask " + "".join(letters[int(digit)] for digit in f"{topic:05}") + " " + "so " * phrasing + "please"


def topic_of(text: str) -> str:
    return text.split()[1]


class TopicEmbedder(Embedder):
    """Vectors of phrasings are near their topic's, and each topic is near another topic, which is its trap."""

    model, space, dimension = "topics", "topics", 64

    async def embed(self, texts: Sequence[str], caller: Any = None) -> list[Vector]:
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> Vector:
        topic = topic_of(text)
        number = int("".join(str("abcdefghij".index(letter)) for letter in topic))
        shared, own, wording = (
            np.random.default_rng([seed, kind]) for kind, seed in enumerate((number // 2, number, crc32(text.encode())))
        )
        parts = shared.normal(size=64), 0.35 * own.normal(size=64), 0.3 * wording.normal(size=64)
        return unit_vector(sum(parts))


class Connection:
    """A connection to Redis that is cut when its process is killed."""

    def __init__(self, url: str) -> None:
        self.client = connect(url, timeout=20.0)
        self.is_cut = False
        self.lost_verdicts = 0

    async def script(self, script: Any, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        if self.is_cut:
            self.lost_verdicts += args[0] == "settle"
            raise Unavailable("The process was killed.")
        return await self.client.script(script, keys, args)

    def __getattr__(self, name: str) -> Any:
        if self.is_cut:
            raise Unavailable("The process was killed.")
        return getattr(self.client, name)


@dataclass
class Replica:
    """A process with its own connection to Redis. `kill` ends it before it can send anything to Redis."""

    url: str
    judge: ScriptedJudge
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.connection = Connection(self.url)
        chosen = settings(
            cache__judge="race", cache__judge_timeout=20, cache__timeout=20, cache__judge_max_per_minute=10**6
        ).cache
        judge = create_judge(self.judge.post, self.judge.dialect, chosen)
        self.cache = Cache(
            self.connection, TopicEmbedder(), Sealer([]), chosen, deployment="d", memory_bytes=10**8, judge=judge
        )

    async def kill(self) -> None:
        self.connection.is_cut = True
        for task in self.tasks:
            task.cancel()
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.cache.aclose()
        await self.connection.client.aclose()


@dataclass
class Simulation:
    url: str
    rng: random.Random = field(default_factory=lambda: random.Random(17))
    approved: set[tuple[str, str]] = field(default_factory=set)
    lost_verdicts: int = 0
    """Number of judgements whose process was killed before it stored the verdict."""
    hits: int = 0
    false_hits: int = 0
    unapproved: int = 0
    possible: int = 0
    found: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    """The reasons of misses although the judge would have approved an entry."""
    known: dict[str, set[str]] = field(default_factory=dict)
    """The questions of each topic that have an entry."""

    def __post_init__(self) -> None:
        self.judge = ScriptedJudge(same=self._verdict)
        self.judge.post = self._judged  # type: ignore[method-assign]
        self.replicas = [Replica(self.url, self.judge) for _ in range(REPLICAS)]

    def would_approve(self, one: str, other: str) -> bool:
        is_wrong = random.Random(f"{one}|{other}").random() < 0.02
        return (topic_of(one) == topic_of(other)) is not is_wrong

    def _verdict(self, one: str, other: str) -> bool:
        is_approved = self.would_approve(one, other)
        if is_approved:
            self.approved.add((one, other))
        return is_approved

    async def _judged(self, path: str, body: dict[str, Any], caller: Any) -> Any:
        try:
            await asyncio.sleep(self.rng.uniform(0.001, 0.004))
            return await ScriptedJudge.post(self.judge, path, body, caller)
        except asyncio.CancelledError:
            self.lost_verdicts += 1
            raise

    async def run(self, count: int) -> None:
        slots = asyncio.Semaphore(CONCURRENT)
        for number in range(count):
            if number and number % KILL_EVERY == 0:
                at = self.rng.randrange(REPLICAS)
                await self.replicas[at].kill()
                self.lost_verdicts += self.replicas[at].connection.lost_verdicts
                self.replicas[at] = Replica(self.url, self.judge)
            await slots.acquire()
            replica = self.rng.choice(self.replicas)
            # Some topics are asked often, most of them rarely.
            topic = (
                min(int(self.rng.paretovariate(0.7)) - 1, TOPICS - 1) if self.rng.random() < 0.5 else self.rng.randrange(TOPICS)
            )
            task = asyncio.create_task(self._ask(replica, question(topic, self.rng.randrange(PHRASINGS))))
            replica.tasks.add(task)
            task.add_done_callback(replica.tasks.discard)
            task.add_done_callback(lambda _: slots.release())
        for replica in self.replicas:
            await replica.close()

    async def _ask(self, replica: Replica, text: str) -> None:
        known = set(self.known.get(topic_of(text), ()))
        is_possible = text in known or any(self.would_approve(one, text) for one in known)
        found = await replica.cache.lookup(key(replica.cache, text), POLICY, granted, model="m")
        hit = found if isinstance(found, Hit) else await self._race(replica, found, text)
        self.possible += is_possible
        if hit is None and is_possible:
            self.missed[found.reason if isinstance(found, Miss) else "?"] += 1
        if hit is None:
            return
        self.found += is_possible
        self.hits += 1
        self.false_hits += told(hit) != f"about {topic_of(text)}"
        if hit.kind != "exact":
            assert hit.source is not None
            self.unapproved += (hit.source.entry.text, text) not in self.approved

    async def _race(self, replica: Replica, miss: Miss, text: str) -> Hit | None:
        """Race the judge against an upstream, as runs do. Chance decides who is first, not the load of this machine."""
        async with replica.cache.flight(miss):
            if miss.judging is not None and self.rng.random() >= LOST:
                await asyncio.wait([miss.judging])
            if miss.approved is not None:
                return miss.approved
            await asyncio.sleep(self.rng.uniform(0.005, 0.01))
            if await replica.cache.keep(miss, answered(("content", f"about {topic_of(text)}"))):
                self.known.setdefault(topic_of(text), set()).add(text)
        return None


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_replicas_find_what_the_judge_approves_and_nothing_else(url: str) -> None:
    simulation = Simulation(url)
    await simulation.run(REQUESTS)
    asked = simulation.judge.asked
    repeated = sum(asked.values()) - len(asked)
    recall = simulation.found / simulation.possible
    print(
        f"requests {REQUESTS}, hits {simulation.hits}, false hits {simulation.false_hits}, not approved {simulation.unapproved}, "
        f"recall of the judge's {recall:.4f} of {simulation.possible}, judged {sum(asked.values())}, repeated {repeated}, "
        f"missed {dict(simulation.missed)}, lost verdicts {simulation.lost_verdicts}"
    )
    assert simulation.unapproved == 0
    assert recall >= 0.95
    assert repeated <= simulation.lost_verdicts
    assert simulation.hits > REQUESTS / 2
