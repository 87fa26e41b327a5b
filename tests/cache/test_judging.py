"""Each pair is judged once for all replicas, and the judge never gets the texts of another owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.cache import Cache, Hit, Miss, Policy
from responses_mw.cache.judging import MAX_CONCURRENT
from responses_mw.crypto import Sealer
from responses_mw.errors import UpstreamError
from responses_mw.upstream import Caller
from tests.cache.asking import ALICE, BOB, EXACT, SECRET, answered, ask, granted, key, told
from tests.support.embeddings import EmbeddingServer
from tests.support.judges import ScriptedJudge
from tests.support.metrics import sample_value
from tests.support.valkey import Server, wire

if TYPE_CHECKING:
    from tests.cache.conftest import OpenCache
    from tests.support.valkey import Plain

SEMANTIC = Policy("semantic", 60, 0.6)
Q, OTHER, FAR = "How do I reset my password?", "I forgot my password, what now?", "How do I change my password?"


@pytest.fixture
def scripted(embedding_server: EmbeddingServer) -> ScriptedJudge:
    """A judge that approves `Q` and `OTHER`, which are similar."""
    embedding_server.near(Q, OTHER, 0.8)
    return ScriptedJudge(same=lambda one, other: {one, other} == {Q, OTHER})


@pytest.fixture
def open_judged(open_cache: OpenCache, scripted: ScriptedJudge) -> Callable[..., Cache]:
    def open_judged(**given: Any) -> Cache:
        return open_cache(judge=scripted, **{"cache__judge": "before", "cache__judge_timeout": 20.0, **given})

    return open_judged


def count(name: str, **labels: str) -> float:
    return sample_value(f"responses_mw_cache_{name}_total", labels) or 0.0


async def settled(found: Hit | Miss) -> Hit | None:
    """Wait for the judgement that races against the upstream, and return its result."""
    assert isinstance(found, Miss)
    assert found.judging is not None
    return await found.judging


async def test_an_approved_question_is_a_hit_and_then_an_alias_at_the_cost_of_an_exact_hit(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge, embedding_server: EmbeddingServer
) -> None:
    cache, other_replica = open_judged(), open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    hit = await cache.lookup(key(cache, OTHER), SEMANTIC, granted, model="m")
    assert isinstance(hit, Hit)
    assert (told(hit), hit.kind) == ("Click here.", "semantic")
    assert hit.similarity == pytest.approx(0.8, abs=1e-3)
    embedded = len(embedding_server.requests)
    for one in (cache, other_replica):
        again = await one.lookup(key(one, OTHER + "??"), SEMANTIC, granted, model="m")
        assert isinstance(again, Hit)
        assert (told(again), again.kind) == ("Click here.", "alias")
        assert again.header.startswith("alias; similarity=0.80")
        assert again.usage is not None
        assert again.usage["cache"] == "alias"
    assert scripted.asked == {(Q, OTHER): 1}
    assert len(embedding_server.requests) == embedded


async def test_an_alias_takes_one_round_trip(
    open_judged: Callable[..., Cache], plain_server: Server, scripted: ScriptedJudge
) -> None:
    async with wire(plain_server.port) as counted:
        cache = open_judged(url=counted.url, cache__judge="race")
        await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
        scripted.go = asyncio.Event()
        before = counted.trips
        found = await cache.lookup(key(cache, OTHER), SEMANTIC, granted)
        assert counted.trips - before == 2  # the lookup, and the records of the candidates
        scripted.go.set()
        await settled(found)
        assert counted.trips - before == 4  # the claim, and the verdict
        assert isinstance(found, Miss)
        async with cache.flight(found):
            pass
        await cache.aclose()
        before = counted.trips
        assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
        assert counted.trips - before == 1


async def test_an_alias_is_found_only_in_semantic_mode(open_judged: Callable[..., Cache]) -> None:
    cache = open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
    assert await ask(cache, key(cache, OTHER), EXACT) == "nothing"


async def test_an_alias_must_reach_the_threshold_of_the_request(open_judged: Callable[..., Cache]) -> None:
    cache = open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
    found = await cache.lookup(key(cache, OTHER), replace(SEMANTIC, threshold=0.9), granted, model="m")
    assert isinstance(found, Miss)
    assert found.header.startswith("miss; reason=below_threshold; similarity=0.8")


async def test_a_refused_pair_is_not_judged_again_on_any_replica(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, FAR, 0.9)
    cache, other_replica = open_judged(), open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    for one in (cache, other_replica, cache):
        found = await one.lookup(key(one, FAR), replace(SEMANTIC, write=False), granted, model="m")
        assert isinstance(found, Miss)
        assert found.header.startswith("miss; reason=not_approved; similarity=0.9")
    assert scripted.asked == {(Q, FAR): 1}


async def test_the_second_nearest_entry_is_judged_by_the_next_request_if_the_nearest_was_refused(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(OTHER, Q, 0.8)
    embedding_server.vectors[FAR] = embedding_server.vectors[OTHER]
    cache = open_judged()
    for question, answer in ((Q, "Click here."), (FAR, "Log in.")):
        await ask(cache, key(cache, question), replace(SEMANTIC, read=False), answer=answer)
    reading = replace(SEMANTIC, write=False)
    assert await ask(cache, key(cache, OTHER), reading) == "nothing"
    assert scripted.asked == {(FAR, OTHER): 1}  # at most one request to the judge for a lookup
    assert await ask(cache, key(cache, OTHER), reading) == "told again: Click here."


async def test_the_judge_is_not_asked_about_a_pair_that_the_guard_refuses(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, "How do I not reset my password?", 0.99)
    cache = open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    found = await cache.lookup(key(cache, "How do I not reset my password?"), SEMANTIC, granted)
    assert isinstance(found, Miss)
    assert found.reason == "guard:negations"
    assert not scripted.asked


async def test_concurrent_requests_on_two_replicas_judge_a_pair_once(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge
) -> None:
    caches = [open_judged(cache__judge="race") for _ in range(2)]
    await ask(caches[0], key(caches[0], Q), SEMANTIC, answer="Click here.")
    scripted.go = asyncio.Event()
    reading = replace(SEMANTIC, write=False)  # these requests do not wait for one another
    found = [await cache.lookup(key(cache, OTHER), reading, granted) for cache in caches * 3]
    first = asyncio.create_task(settled(found[0]))
    rest = [await settled(one) for one in found[1:]]
    scripted.go.set()
    assert rest == [None] * 5
    hit = await first
    assert hit is not None
    assert told(hit) == "Click here."
    assert scripted.asked == {(Q, OTHER): 1}


async def test_a_waiting_request_gets_the_alias_made_by_the_first_one(open_judged: Callable[..., Cache]) -> None:
    cache = open_judged(cache__judge="race")
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    first = await cache.lookup(key(cache, OTHER), SEMANTIC, granted)
    assert isinstance(first, Miss)
    async with cache.flight(first):
        second = await cache.lookup(key(cache, OTHER), SEMANTIC, granted)
    assert isinstance(second, Hit)
    assert second.kind == "alias"


async def test_a_slow_judge_is_a_miss_whose_verdict_serves_the_next_request(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge
) -> None:
    cache = open_judged(cache__judge="race")
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    scripted.go = asyncio.Event()
    found = await cache.lookup(key(cache, OTHER), replace(SEMANTIC, write=False), granted)
    scripted.go.set()
    await settled(found)
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."


async def test_before_does_not_wait_longer_than_the_timeout(open_judged: Callable[..., Cache], scripted: ScriptedJudge) -> None:
    cache = open_judged(cache__judge_timeout=0.05)
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    scripted.go, before = asyncio.Event(), count("judged", verdict="failed")
    assert await ask(cache, key(cache, OTHER), replace(SEMANTIC, write=False)) == "nothing"
    await cache.aclose()
    assert count("judged", verdict="failed") - before in (0, 1)  # the judgement may have been ended instead


@pytest.mark.parametrize("answer", [{}, {"choices": []}])
async def test_a_failing_judge_is_a_miss_and_is_not_asked_again_at_once(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge, answer: dict[str, Any]
) -> None:
    cache = open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    if answer:
        scripted.answer = answer
    else:
        scripted.error = UpstreamError("Overloaded.", status=503)
    reading, before = replace(SEMANTIC, write=False), count("judged", verdict="failed")
    assert await ask(cache, key(cache, OTHER), reading) == "nothing"
    found = await cache.lookup(key(cache, OTHER), reading, granted)
    assert isinstance(found, Miss)
    assert found.reason == "not_judged"
    assert sum(scripted.asked.values()) == 1
    assert count("judged", verdict="failed") == before + 1


async def test_the_judge_is_not_asked_while_it_is_paused_or_over_its_limit(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge
) -> None:
    cache = open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    cache.pause_judge()
    limited = open_judged(cache__judge_max_per_minute=0)
    for one in (cache, limited):
        assert await ask(one, key(one, OTHER), replace(SEMANTIC, write=False)) == "nothing"
    assert not scripted.asked


@pytest.mark.parametrize(("per_minute", "allowed"), [(600, MAX_CONCURRENT), (3, 3)])
async def test_the_number_of_concurrent_judgements_is_limited(
    open_judged: Callable[..., Cache],
    scripted: ScriptedJudge,
    embedding_server: EmbeddingServer,
    per_minute: int,
    allowed: int,
) -> None:
    cache = open_judged(cache__judge="race", cache__judge_max_per_minute=per_minute)
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    scripted.go = asyncio.Event()
    questions = [OTHER + " please" * (number + 1) for number in range(allowed + 2)]
    embedding_server.vectors.update(dict.fromkeys(questions, embedding_server.vectors[OTHER]))
    found = await asyncio.gather(*(cache.lookup(key(cache, question), SEMANTIC, granted) for question in questions))
    assert sum(isinstance(one, Miss) and one.judging is not None for one in found) == allowed
    await cache.aclose()
    assert all(one.judging is None or one.judging.done() for one in found if isinstance(one, Miss))
    assert all(one.approved is None for one in found if isinstance(one, Miss))


async def test_verdicts_of_another_judge_are_not_used(open_judged: Callable[..., Cache], scripted: ScriptedJudge) -> None:
    cache, new = open_judged(), open_judged(cache__judge_min_probability=0.99)
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    for one in (cache, new):
        assert await ask(one, key(one, OTHER), SEMANTIC) == "told again: Click here."
    assert scripted.asked == {(Q, OTHER): 2}


async def test_the_judge_gets_the_caller_and_never_sees_another_owners_text(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge
) -> None:
    cache, bob = open_judged(), Caller(owner=BOB, headers={"authorization": "Bearer bob"})
    await ask(cache, key(cache, Q, owner=ALICE), SEMANTIC, answer="Alice's")
    assert await ask(cache, key(cache, OTHER, owner=BOB), SEMANTIC, answer="Bob's", caller=bob) == "Bob's"
    assert not scripted.asked
    assert await ask(cache, key(cache, Q, owner=BOB), SEMANTIC, caller=bob) == "told again: Bob's"
    assert scripted.callers == [bob]


@pytest.mark.parametrize("secrets", [[], [SECRET]])
async def test_deleted_purged_and_replaced_answers_have_no_aliases(
    open_judged: Callable[..., Cache], server: Plain, secrets: list[str]
) -> None:
    cache = open_judged(sealer=Sealer(secrets))

    async def alias() -> None:
        miss = await cache.lookup(key(cache, Q), replace(SEMANTIC, read=False), granted)
        assert isinstance(miss, Miss)
        assert await cache.keep(miss, {**answered(("content", "Click here.")), "id": "resp_1"})
        assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
        assert len(server.keys("rmw:*:a:*")) == len(server.keys("rmw:*:j:*")) == 1

    await alias()
    assert await cache.entries.forget(ALICE, "resp_1")
    assert server.keys("rmw:*:a:*") == server.keys("rmw:*:j:*") == []
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "nothing"
    await alias()
    assert await cache.entries.purge() == 1
    assert server.keys("rmw:*:a:*") == server.keys("rmw:*:j:*") == []
    await alias()
    await ask(cache, key(cache, Q), replace(SEMANTIC, read=False), answer="Click there.")
    assert server.keys("rmw:*:a:*") == []
    assert await cache.entries.purge() == 1
    assert server.hgetall(server.keys("rmw:*:t")[0]) == {} if server.keys("rmw:*:t") else True


async def test_an_answer_that_is_deleted_while_it_is_judged_is_not_served(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge, server: Plain
) -> None:
    cache = open_judged(cache__judge="race")
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    scripted.go = asyncio.Event()
    found = await cache.lookup(key(cache, OTHER), SEMANTIC, granted)
    while not scripted.asked:
        await asyncio.sleep(0.01)
    await cache.entries.purge()
    scripted.go.set()
    assert await settled(found) is None
    assert server.keys("rmw:*:a:*") == []


async def test_an_alias_lives_as_long_as_its_entry(open_judged: Callable[..., Cache], server: Plain) -> None:
    cache = open_judged()
    await ask(cache, key(cache, Q), replace(SEMANTIC, ttl=30), answer="Click here.")
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
    [alias], [verdicts] = server.keys("rmw:*:a:*"), server.keys("rmw:*:j:*")
    assert 0 < server.pttl(alias) <= 30_000
    assert 0 < server.pttl(verdicts) <= 30_000


async def test_verdicts_count_as_part_of_their_entry_and_are_limited(
    open_judged: Callable[..., Cache], scripted: ScriptedJudge, server: Plain
) -> None:
    cache = open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    size = (await cache.entries.stats()).bytes
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
    assert (await cache.entries.stats()).bytes == size + 160
    [verdicts] = server.keys("rmw:*:j:*")
    server.hset(verdicts, mapping={f"judge:{number}": "n" for number in range(200)})
    server.delete(*server.keys("rmw:*:a:*"))
    server.hdel(verdicts, *[field for field in server.hkeys(verdicts) if not field.startswith(b"judge:")])
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "nothing"
    assert scripted.asked == {(Q, OTHER): 1}


@pytest.mark.parametrize("secrets", [[], [SECRET]])
async def test_an_alias_of_an_entry_in_another_partition_is_not_used(
    open_judged: Callable[..., Cache], server: Plain, secrets: list[str]
) -> None:
    cache = open_judged(sealer=Sealer(secrets), cache__max_owner_bytes=64 * 1024 * 1024)  # all partitions in one shard
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
    [alias] = server.keys("rmw:*:a:*")
    elsewhere = key(cache, OTHER, instructions="Answer in French.")
    server.copy(alias, alias.replace(key(cache, OTHER).exact.encode(), elsewhere.exact.encode()))
    found = await cache.lookup(elsewhere, replace(SEMANTIC, write=False), granted)
    assert isinstance(found, Miss)
    assert found.reason == "unreadable", "it was found, and not believed"


@pytest.mark.parametrize("similarity", [b"nan", b"-1e300", b"2", b"inf"])
async def test_an_alias_with_an_impossible_similarity_is_not_used(
    open_judged: Callable[..., Cache], server: Plain, similarity: bytes
) -> None:
    cache = open_judged()
    await ask(cache, key(cache, Q), SEMANTIC, answer="Click here.")
    assert await ask(cache, key(cache, OTHER), SEMANTIC) == "told again: Click here."
    [alias] = server.keys("rmw:*:a:*")
    generation, judge, _, target = server.get(alias).split(b"|")
    server.set(alias, b"|".join([generation, judge, similarity, target]), keepttl=True)
    found = await cache.lookup(key(cache, OTHER), SEMANTIC, granted)
    assert isinstance(found, Miss)
    assert found.reason == "failed"
