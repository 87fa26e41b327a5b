"""Hits and misses of the cache: owners, lifetimes, failures, limits, and round trips."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest

from responses_mw.cache import Entries, Hit, Miss
from responses_mw.crypto import Sealer
from responses_mw.ids import RunIds
from tests.cache.asking import (
    ALICE,
    BOB,
    EXACT,
    SECRET,
    SEMANTIC,
    answered,
    ask,
    granted,
    key,
    settings,
    told,
)
from tests.support.embeddings import EmbeddingServer
from tests.support.valkey import wire

if TYPE_CHECKING:
    from responses_mw.cache import Cache
    from tests.cache.conftest import OpenCache
    from tests.support.valkey import Plain, Server

Q = "What is the capital city of France?"
SAME = "What is the capital-city of France?"


async def test_a_repeated_request_is_an_exact_hit_on_every_replica(open_cache: OpenCache) -> None:
    one, other = open_cache(), open_cache()
    assert await ask(one, key(one), answer="Paris.") == "Paris."
    assert await ask(other, key(other)) == "told again: Paris."
    assert await ask(other, key(other, "What is the capital of Spain?")) == "nothing"


async def test_an_exact_hit_replays_the_answer_with_the_original_usage(cache: Cache) -> None:
    first = answered(("reasoning", "Easy."), ("content", "Paris."))
    miss = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(miss, Miss)
    assert miss.header == "miss; reason=not_found"
    assert await cache.keep(miss, first)
    hit = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(hit, Hit)
    assert hit.header == f"exact; similarity=1.0000; age={hit.age}"
    assert told(hit) == "Paris."
    assert hit.usage == {**first["usage"], "cache": "exact"}


async def test_an_answer_without_usage_is_replayed_without_usage(cache: Cache) -> None:
    miss = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(miss, Miss)
    assert await cache.keep(miss, answered(usage=None))
    hit = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(hit, Hit)
    assert hit.usage is None


async def test_a_similar_question_is_a_semantic_hit_above_the_threshold(
    cache: Cache, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, SAME, 0.97)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    hit = await cache.lookup(key(cache, SAME), SEMANTIC, granted)
    assert told(hit) == "Paris."
    assert isinstance(hit, Hit)
    assert hit.kind == "semantic"
    assert hit.similarity == pytest.approx(0.97, abs=1e-3)
    assert hit.header.startswith("semantic; similarity=0.97")
    assert isinstance(await cache.lookup(key(cache, SAME), replace(SEMANTIC, threshold=0.98, write=False), granted), Miss)
    assert isinstance(await cache.lookup(key(cache, SAME), replace(EXACT, write=False), granted), Miss)


async def test_the_guard_refuses_a_similar_but_different_question(cache: Cache, embedding_server: EmbeddingServer) -> None:
    other = "What was the capital city of France in 1940?"
    embedding_server.near(Q, other, 0.999)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    found = await cache.lookup(key(cache, other), SEMANTIC, granted)
    assert isinstance(found, Miss)
    assert found.reason == "guard:numbers"


async def test_the_second_nearest_entry_is_used_if_the_guard_refuses_the_nearest(
    cache: Cache, embedding_server: EmbeddingServer
) -> None:
    wrong = "What was the capital city of France in 1940?"
    embedding_server.near(SAME, Q, 0.96)
    embedding_server.vectors[wrong] = embedding_server.vectors[SAME]
    await ask(cache, key(cache, wrong), SEMANTIC, answer="Helsinki.")
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    assert told(await cache.lookup(key(cache, SAME), SEMANTIC, granted)) == "Paris."


async def test_an_entry_stored_without_a_vector_is_found_only_by_exact_text(
    cache: Cache, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache), EXACT, answer="Paris.")
    assert isinstance(await cache.lookup(key(cache, SAME), SEMANTIC, granted), Miss)
    assert told(await cache.lookup(key(cache), SEMANTIC, granted)) == "Paris."


async def test_a_text_over_the_maximum_length_is_not_embedded(
    open_cache: OpenCache,
    server: Plain,
    embedding_server: EmbeddingServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("responses_mw.cache.cache.MAX_TEXT_LENGTH", 10)
    cache = open_cache()
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    assert embedding_server.requests == []
    assert await ask(cache, key(cache), SEMANTIC) == "told again: Paris."
    assert server.keys("rmw:*:v:*") == []


# -- owners and partitions -------------------------------------------------------------------------------------------------


async def test_owners_whose_entries_have_expired_are_removed_from_the_list_of_owners(cache: Cache, server: Plain) -> None:
    server.zadd("rmw:{c}:owners", {"gone": 1})
    await ask(cache, key(cache), answer="Paris.")
    assert server.zrange("rmw:{c}:owners", 0, -1) == [ALICE.encode()]


async def test_two_owners_never_share_an_answer(cache: Cache, embedding_server: EmbeddingServer) -> None:
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache, owner=ALICE), SEMANTIC, answer="Alice's")
    assert await ask(cache, key(cache, owner=BOB), SEMANTIC) == "nothing"
    assert await ask(cache, key(cache, SAME, owner=BOB), SEMANTIC, answer="Bob's") == "Bob's"
    assert await ask(cache, key(cache, owner=ALICE), SEMANTIC) == "told again: Alice's"


FIELDS: list[dict[str, Any]] = [
    {"instructions": "Be brief."}, {"temperature": 0}, {"top_p": 0.5}, {"model": "n"}, {"max_output_tokens": 9}, {"seed": 1},
    {"text": {"format": {"type": "json_object"}}}, {"reasoning": {"effort": "low"}}, {"user": "somebody"},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
async def test_each_field_of_the_partition_alone_turns_a_hit_into_a_miss(
    cache: Cache, embedding_server: EmbeddingServer, fields: dict[str, Any]
) -> None:
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    assert await ask(cache, key(cache, SAME), SEMANTIC) == "told again: Paris."
    for text in (Q, SAME):
        assert await ask(cache, key(cache, text, **fields), SEMANTIC) == "nothing"


async def test_a_forged_or_moved_entry_is_a_miss_and_not_an_error(
    cache: Cache, server: Plain, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    (body,) = server.keys("rmw:{c:*}:b:*")
    kept = server.get(body)
    others = key(cache, "Who are you?")
    server.set(body.replace(key(cache).exact.encode(), others.exact.encode()), kept, px=60_000)
    assert await ask(cache, others) == "nothing", "it belongs to another question"
    for forged in (
        b"0:Cjunk",
        b"0:C{}",
        b"0:",
        b"",
        b"0:S123",
        b'0:C{"v":1,"key":"%s","texts":[["x"]]}' % key(cache).exact.encode(),
    ):
        server.set(body, forged, px=60_000)
        assert await ask(cache, key(cache), EXACT) == "nothing"
        assert await ask(cache, key(cache, SAME), SEMANTIC) == "nothing"


async def test_an_entry_copied_from_one_owner_to_another_is_not_used(
    cache: Cache, server: Plain, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache, owner=ALICE), SEMANTIC, answer="Alice's")
    await ask(cache, key(cache, "Who?", owner=BOB), SEMANTIC, answer="Bob's")
    await ask(cache, key(cache, SAME, owner=BOB), SEMANTIC)  # so the partition has been read
    one, other = key(cache, owner=ALICE), key(cache, owner=BOB)
    to = _slot(server, BOB)
    for name in server.keys(f"rmw:{{c:{ALICE}*"):
        moved = name.replace(_slot(server, ALICE), to).replace(one.partition.encode(), other.partition.encode())
        server.restore(moved, 60_000, server.dump(name), replace=True)
        as_asked = moved.replace(one.exact.encode(), other.exact.encode())
        server.restore(as_asked, 60_000, server.dump(name), replace=True)
    for text in (Q, SAME):
        found = await cache.lookup(key(cache, text, owner=BOB), replace(SEMANTIC, write=False), granted)
        assert isinstance(found, Miss)
        assert found.reason == "unreadable", "it was found, and not believed"


def _slot(server: Plain, owner: str) -> bytes:
    name: bytes = server.keys(f"rmw:{{c:{owner}*")[0]
    return name[: name.index(b"}")]


# -- what is stored, and for how long --------------------------------------------------------------------------------------


async def test_an_entry_listed_in_another_partition_is_not_used(
    open_cache: OpenCache, server: Plain, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, SAME, 1.0)
    cache = open_cache(cache__max_owner_bytes=64 * 1024 * 1024)  # all partitions in one shard
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    here, elsewhere = key(cache), key(cache, SAME, instructions="Answer in French.")
    for name in server.keys(f"rmw:*:{here.partition}*"):
        server.copy(name, name.replace(here.partition.encode(), elsewhere.partition.encode()))
    found = await cache.lookup(elsewhere, replace(SEMANTIC, write=False), granted)
    assert isinstance(found, Miss)
    assert found.reason == "unreadable", "it was found, and not believed"


async def test_the_ttl_of_an_entry_is_fixed_when_it_is_stored(cache: Cache, server: Plain) -> None:
    await ask(cache, key(cache), replace(EXACT, ttl=50), answer="Paris.")
    (body,) = server.keys("rmw:{c:*}:b:*")
    server.pexpire(body, 20_000)
    hit = await cache.lookup(key(cache), replace(EXACT, ttl=60), granted)
    assert isinstance(hit, Hit)
    assert hit.age == 30
    assert server.pttl(body) <= 20_000, "a hit does not renew it"


async def test_every_key_but_the_list_of_owners_expires(cache: Cache, url: str, embedding_server: EmbeddingServer) -> None:
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    with connect_plain(url) as looking:
        stay = [one for one in looking.keys("*") if looking.pttl(one) == -1]
    assert stay == [b"rmw:{c}:owners"]


def connect_plain(url: str) -> Plain:
    import redis

    return redis.Redis.from_url(url)


async def test_only_the_semantic_cache_stores_the_question_and_none_stores_the_instructions(
    cache: Cache, server: Plain
) -> None:
    for policy, is_stored in ((EXACT, False), (SEMANTIC, True)):
        server.flushall()
        await ask(cache, key(cache, "A confidential question?", instructions="secret rules"), policy, answer="An answer.")
        everything = b"".join(_dump(server, one) for one in server.keys("*"))
        assert b"An answer." in everything
        assert (b"A confidential question?" in everything) is is_stored
        assert b"secret" not in everything


async def test_answers_are_encrypted_in_redis_if_secret_keys_are_configured(open_cache: OpenCache, server: Plain) -> None:
    cache = open_cache(sealer=Sealer([SECRET]))
    await ask(cache, key(cache), SEMANTIC, answer="An answer.")
    everything = b"".join(_dump(server, one) for one in server.keys("*"))
    assert b"An answer." not in everything
    assert b"capital" not in everything
    assert await ask(cache, key(cache)) == "told again: An answer."


def _dump(server: Plain, name: bytes) -> bytes:
    readers = {b"string": "GET", b"hash": "HGETALL", b"zset": "ZRANGE"}
    kind = server.type(name)
    arguments = (0, -1) if kind == b"zset" else ()
    return name + repr(server.execute_command(readers[kind], name, *arguments)).encode()


async def test_refresh_is_a_miss_and_replaces_the_stored_answer(cache: Cache) -> None:
    await ask(cache, key(cache), answer="Paris.")
    refreshing = replace(EXACT, read=False)
    assert await ask(cache, key(cache), refreshing, answer="Still Paris.") == "Still Paris."
    assert await ask(cache, key(cache)) == "told again: Still Paris."


async def test_refresh_stores_the_embedding_too(cache: Cache, embedding_server: EmbeddingServer) -> None:
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache), replace(SEMANTIC, read=False), answer="Paris.")
    assert await ask(cache, key(cache, SAME), SEMANTIC) == "told again: Paris."


async def test_no_store_reads_the_cache_but_does_not_write(cache: Cache) -> None:
    reading = replace(EXACT, write=False)
    assert await ask(cache, key(cache), reading, answer="Paris.") == "Paris."
    assert await ask(cache, key(cache), answer="Lyon.") == "Lyon."
    assert await ask(cache, key(cache), reading) == "told again: Lyon."


@pytest.mark.parametrize("document", [answered(finish="length"), answered(("refusal", "No."))])
async def test_truncated_and_refused_answers_are_not_stored(cache: Cache, document: dict[str, Any]) -> None:
    miss = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(miss, Miss)
    assert not await cache.keep(miss, document)
    assert await ask(cache, key(cache)) == "nothing"


async def test_an_answer_over_the_maximum_size_is_not_stored(
    open_cache: OpenCache, server: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.cache.cache.MAX_ENTRY_BYTES", 1000)
    cache = open_cache()
    await ask(cache, key(cache), answer="x" * 1000)
    assert server.keys("rmw:{c:*}:b:*") == []
    await ask(cache, key(cache), answer="x" * 100)
    assert len(server.keys("rmw:{c:*}:b:*")) == 1


# -- round trips -----------------------------------------------------------------------------------------------------------


async def test_an_exact_hit_takes_one_round_trip_and_no_embedding(
    open_cache: OpenCache, plain_server: Server, embedding_server: EmbeddingServer
) -> None:
    async with wire(plain_server.port) as counted:
        cache = open_cache(counted.url)
        await ask(cache, key(cache), SEMANTIC, answer="Paris.")
        embedding_server.requests.clear()
        before = counted.trips
        await ask(cache, key(cache), SEMANTIC)
        assert (counted.trips - before, embedding_server.requests) == (1, [])


@pytest.mark.parametrize("policy", [EXACT, SEMANTIC], ids=["exact", "semantic"])
async def test_a_miss_takes_one_round_trip(open_cache: OpenCache, plain_server: Server, policy: Any) -> None:
    async with wire(plain_server.port) as counted:
        cache = open_cache(counted.url)
        await ask(cache, key(cache, "Who?"), policy, answer="Me.")
        before = counted.trips
        assert isinstance(await cache.lookup(key(cache), policy, granted), Miss)
        assert counted.trips - before == 1
        elsewhere = key(cache, model="another")
        assert isinstance(await cache.lookup(elsewhere, policy, granted), Miss)
        assert counted.trips - before == 2, "a partition that was not read yet"


async def test_a_semantic_hit_takes_two_round_trips(
    open_cache: OpenCache, plain_server: Server, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(Q, SAME, 0.97)
    async with wire(plain_server.port) as counted:
        cache = open_cache(counted.url)
        await ask(cache, key(cache), SEMANTIC, answer="Paris.")
        reading = replace(SEMANTIC, write=False)
        assert told(await cache.lookup(key(cache, SAME), reading, granted)) == "Paris.", "the server knows the scripts now"
        await ask(cache, key(cache), replace(SEMANTIC, read=False), answer="Paris!")
        before = counted.trips
        assert told(await cache.lookup(key(cache, SAME), reading, granted)) == "Paris!"
        assert counted.trips - before == 2


# -- failures --------------------------------------------------------------------------------------------------------------


async def test_an_unreachable_redis_is_a_miss(open_cache: OpenCache) -> None:
    cache = open_cache("redis://127.0.0.1:1")
    assert await ask(cache, key(cache), SEMANTIC, answer="Paris.") == "Paris."
    assert await ask(cache, key(cache), replace(SEMANTIC, read=False), answer="Paris.") == "Paris."
    found = await cache.lookup(key(cache), SEMANTIC, granted)
    assert isinstance(found, Miss)
    assert found.reason == "failed"


async def test_a_hanging_redis_is_a_miss_after_the_cache_timeout(open_cache: OpenCache) -> None:
    never = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await never.wait()
        writer.close()

    listener = await asyncio.start_server(hang, "127.0.0.1", 0)
    cache = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}", cache__timeout=0.05)
    async with asyncio.timeout(15):  # less than the timeout of the client
        assert await ask(cache, key(cache)) == "nothing"
    never.set()
    listener.close()


async def test_storing_an_answer_gives_up_on_a_hanging_redis_after_the_cache_timeout(
    open_cache: OpenCache, server: Plain
) -> None:
    cache = open_cache(cache__timeout=0.5)
    miss = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(miss, Miss)
    server.client_pause(20_000, all=False)
    async with asyncio.timeout(15):  # less than the timeout of the client
        assert not await cache.keep(miss, answered())
    server.client_unpause()


JUNK = [b"", b"junk", b"\xff\xfe", b"9999999999999:\xff"]


@pytest.mark.parametrize("junk", JUNK)
async def test_junk_in_the_keys_of_the_cache_raises_no_error(
    open_cache: OpenCache, server: Plain, embedding_server: EmbeddingServer, junk: bytes
) -> None:
    embedding_server.near(Q, SAME, 1.0)
    writer = open_cache()
    await ask(writer, key(writer), SEMANTIC, answer="Paris.")
    for name in server.keys("rmw:{c:*"):
        kind = server.type(name)
        if kind == b"string":
            server.set(name, junk, keepttl=True)
        for member in server.hkeys(name) if kind == b"hash" else ():
            server.hset(name, member, junk)
        if kind == b"zset":
            server.zadd(name, {junk: 1e15, junk + b"x": -5})
    reader = open_cache()
    for cache in (writer, reader):
        for text in (Q, SAME, "What else?"):
            await ask(cache, key(cache, text), SEMANTIC, answer="Paris.")


async def test_if_embedding_fails_the_lookup_misses_and_the_answer_is_stored_for_exact_hits(
    cache: Cache, embedding_server: EmbeddingServer
) -> None:
    embedding_server.status = 503
    assert await ask(cache, key(cache), SEMANTIC, answer="Paris.") == "Paris."
    assert await ask(cache, key(cache), SEMANTIC) == "told again: Paris."
    assert len(embedding_server.requests) == 1


async def test_warnings_about_failing_embeddings_are_rate_limited(
    cache: Cache, embedding_server: EmbeddingServer, caplog: pytest.LogCaptureFixture
) -> None:
    embedding_server.status = 401
    for n in range(3):
        await ask(cache, key(cache, f"A confidential question, {n}?"), SEMANTIC)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["no semantic cache: the embeddings server answered 401: it refused the API key"]


async def test_an_evicted_entry_is_a_miss(cache: Cache, server: Plain, embedding_server: EmbeddingServer) -> None:
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    assert await ask(cache, key(cache), SEMANTIC) == "told again: Paris."
    server.delete(*server.keys("rmw:{c:*}:b:*"))
    assert await ask(cache, key(cache, SAME), SEMANTIC) == "nothing"
    await ask(cache, key(cache), SEMANTIC, answer="Paris!")
    assert await ask(cache, key(cache, SAME), SEMANTIC) == "told again: Paris!"


async def test_an_entry_encrypted_with_other_keys_is_a_miss(open_cache: OpenCache) -> None:
    one, other = open_cache(sealer=Sealer([SECRET])), open_cache(sealer=Sealer(["b" * 40]))
    await ask(one, key(one), answer="Paris.")
    assert await ask(other, key(other)) == "nothing"


# -- deletion and purge ----------------------------------------------------------------------------------------------------


async def test_a_deleted_entry_is_not_a_hit(cache: Cache, embedding_server: EmbeddingServer) -> None:
    embedding_server.near(Q, SAME, 1.0)
    document = answered()
    miss = await cache.lookup(key(cache), SEMANTIC, granted)
    assert isinstance(miss, Miss)
    await cache.keep(miss, document)
    assert not await cache.entries.forget(BOB, document["id"])
    assert not await cache.entries.forget(ALICE, RunIds().response)
    assert await ask(cache, key(cache, SAME), SEMANTIC) == "told again: Paris."
    assert await cache.entries.forget(ALICE, document["id"])
    assert not await cache.entries.forget(ALICE, document["id"])
    assert await ask(cache, key(cache), SEMANTIC) == await ask(cache, key(cache, SAME), SEMANTIC) == "nothing"
    assert (await cache.entries.stats(ALICE)).bytes == 0


async def test_an_entry_deleted_purged_or_replaced_by_another_replica_is_not_used(
    open_cache: OpenCache, embedding_server: EmbeddingServer
) -> None:
    here, another = open_cache(), open_cache()
    embedding_server.near(Q, SAME, 1.0)
    refreshing, reading = replace(SEMANTIC, read=False), replace(SEMANTIC, write=False)
    await ask(another, key(another, "Who wrote Faust?"), SEMANTIC, answer="Goethe.")
    for answer in ("Paris.", "Paris!"):
        document = answered(("content", answer))
        miss = await another.lookup(key(another), refreshing, granted)
        assert isinstance(miss, Miss)
        await another.keep(miss, document)
        assert await ask(here, key(here, SAME), reading) == f"told again: {answer}"
        assert await ask(here, key(here, SAME), reading) == f"told again: {answer}", "it may be held now"
    assert await another.entries.forget(ALICE, document["id"])
    assert await ask(here, key(here, SAME), reading) == "nothing"
    await ask(another, key(another), SEMANTIC, answer="Paris?")
    assert await ask(here, key(here, SAME), reading) == "told again: Paris?"
    await another.entries.purge(ALICE)
    assert await ask(here, key(here, SAME), reading) == "nothing"


async def test_a_purge_removes_the_entries_of_one_or_all_owners_and_counts_them(cache: Cache, url: str) -> None:
    for owner in (ALICE, BOB):
        for n in range(3):
            await ask(cache, key(cache, f"Question {n}?", owner), SEMANTIC, answer="Paris.")
            await ask(cache, key(cache, "Question?", owner, instructions=str(n)), SEMANTIC, answer="Paris.")
    stats = await cache.entries.stats()
    assert (stats.owners, stats.entries, stats.partitions) == (2, 12, 8)
    assert stats.bytes > 0
    assert await cache.entries.purge(ALICE) == 6
    assert (await cache.entries.stats(ALICE)).entries == 0
    assert await ask(cache, key(cache, "Question 1?", BOB)) == "told again: Paris."
    assert await ask(cache, key(cache, "Question 1?", ALICE)) == "nothing"
    assert await cache.entries.purge() == 6
    assert (await cache.entries.stats()).owners == 0
    with connect_plain(url) as looking:
        assert [one for one in looking.keys("*") if b":b:" in one or b":v" in one] == []


def evict(server: Plain, name: str) -> None:
    """Remove one key of each shard, as Redis does when it evicts."""
    server.delete(*server.keys(f"rmw:{{c:*}}:{name}"))


async def test_a_purge_completes_after_redis_evicted_the_metadata_of_entries(cache: Cache, server: Plain) -> None:
    for n in range(3):
        await ask(cache, key(cache, f"Question {n}?"), answer="Paris.")
    evict(server, "e")
    async with asyncio.timeout(60):
        assert await cache.entries.purge(ALICE) == 3
    assert (await cache.entries.stats(ALICE)).entries == 0


async def test_counting_all_entries_holds_at_most_two_replies_in_memory() -> None:
    class Reply(list[list[int]]):
        """A list that can be weakly referenced."""

    replies: list[ref[Reply]] = []
    most = 0

    class Counted:
        async def pipeline(self, _commands: Any) -> list[Any]:
            return [[b"%d" % owner for owner in range(100)]]

        async def scripts(self, _script: Any, calls: Any) -> Reply:
            nonlocal most
            reply = Reply([[1, 20, 1]] * len(calls))
            replies.append(ref(reply))
            most = max(most, sum(one() is not None for one in replies))
            return reply

        async def script(self, *_: Any) -> Any: ...

    stats = await Entries(Counted(), settings().cache).stats()
    assert (stats.owners, stats.entries, stats.bytes, stats.partitions) == (100, 1600, 32_000, 1600)
    assert most <= 2


async def test_an_answer_begun_before_a_purge_is_not_stored_after_it(cache: Cache) -> None:
    miss = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(miss, Miss)
    async with cache.flight(miss):
        await cache.entries.purge(ALICE)
        assert not await cache.keep(miss, answered())
    assert await ask(cache, key(cache), answer="Paris.") == "Paris."
    assert await ask(cache, key(cache)) == "told again: Paris."


async def test_the_generation_counter_of_a_purge_lives_at_least_as_long_as_the_entries(
    open_cache: OpenCache, server: Plain
) -> None:
    cache, month = open_cache(cache__ttl=30 * 24 * 3600), 30 * 24 * 3600 * 1000
    await cache.entries.purge(ALICE)
    await ask(cache, key(cache), answer="Paris.")
    [body] = server.keys("rmw:{c:*}:b:*")
    generation = body.partition(b"b:")[0] + b"g"
    assert server.pttl(generation) >= month  # otherwise, the new entry would be hidden
    await cache.entries.purge(ALICE)
    assert server.pttl(generation) >= month  # otherwise, entries left by an interrupted purge would be found again


async def test_an_answer_begun_before_a_purge_of_all_owners_is_not_stored_for_a_new_owner(open_cache: OpenCache) -> None:
    one, other = open_cache(), open_cache()
    miss = await one.lookup(key(one), EXACT, granted)
    assert isinstance(miss, Miss)
    async with one.flight(miss):
        assert await other.entries.purge() == 0
        assert not await one.keep(miss, answered())
    assert await ask(one, key(one), answer="Paris.") == "Paris."
    assert await ask(other, key(other)) == "told again: Paris."


# -- limits ----------------------------------------------------------------------------------------------------------------


async def test_a_full_partition_removes_its_oldest_entries(
    open_cache: OpenCache, embedding_server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.cache.store.MAX_PARTITION_ENTRIES", 3)
    cache = open_cache()
    for n in range(5):
        await ask(cache, key(cache, f"Question {n}?"), SEMANTIC, answer=str(n))
    assert (await cache.entries.stats()).entries == 3
    for n in range(5):
        assert await ask(cache, key(cache, f"Question {n}?"), SEMANTIC) == (f"told again: {n}" if n >= 2 else "nothing")
    await ask(cache, key(cache, "Question?", instructions="another partition"), SEMANTIC, answer="5")
    assert (await cache.entries.stats()).entries == 4


async def test_bytes_of_a_partition_and_of_an_owner_are_bounded_too(
    open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = open_cache()
    monkeypatch.setattr("responses_mw.cache.store.MAX_PARTITION_BYTES", 3000)
    for n in range(6):
        await ask(narrow, key(narrow, f"Question {n}?"), answer="x" * 1000)
    assert (await narrow.entries.stats(ALICE)).entries == 2
    await narrow.entries.purge()
    monkeypatch.undo()
    owned = open_cache(cache__max_owner_bytes=5000)
    for n in range(9):
        await ask(owned, key(owned, "Question?", instructions=str(n)), answer="x" * 1000)
    stats = await owned.entries.stats(ALICE)
    assert stats.entries == 3
    assert stats.bytes <= 5000


@pytest.mark.parametrize("partitions", ["one", "many"])
async def test_a_small_limit_of_an_owner_is_fully_usable_in_one_or_many_partitions(
    open_cache: OpenCache, partitions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.cache.store.MAX_PARTITION_ENTRIES", 20)
    cache = open_cache(cache__max_owner_bytes="10MiB")
    for n in range(30):
        instructions = str(n) if partitions == "many" else "the same"
        await ask(cache, key(cache, f"Question {n}?", instructions=instructions), answer=str(n))
    assert (await cache.entries.stats(ALICE)).entries == 20


async def test_a_large_limit_of_an_owner_is_divided_into_shards_that_each_hold_a_full_partition(
    open_cache: OpenCache, server: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.cache.store.MAX_PARTITION_ENTRIES", 10)
    cache = open_cache(cache__max_owner_bytes="200MiB")
    for n in range(15):
        await ask(cache, key(cache, f"Question {n}?"), answer=str(n))
    assert (await cache.entries.stats(ALICE)).entries == 10, "a partition has its whole bound"
    for n in range(60):
        await ask(cache, key(cache, "Question?", instructions=str(n)), answer=str(n))
    assert 11 <= (await cache.entries.stats(ALICE)).entries <= 30
    slots = {name.split(b"}")[0] for name in server.keys("rmw:{c:*}:i")}
    assert len(slots) == 3


async def test_storing_an_answer_removes_expired_ones(cache: Cache, server: Plain) -> None:
    await ask(cache, key(cache, "One?"), replace(EXACT, ttl=1), answer="1")
    before = (await cache.entries.stats(ALICE)).bytes
    while server.keys("rmw:{c:*}:b:*"):
        await asyncio.sleep(0.05)
    assert (await cache.entries.stats(ALICE)).entries == 0
    await ask(cache, key(cache, "Two?"), EXACT, answer="2")
    assert (await cache.entries.stats(ALICE)).bytes == pytest.approx(before, abs=2)


async def test_expired_entries_are_removed_after_their_metadata_was_evicted(cache: Cache, server: Plain) -> None:
    for n in range(101):
        await ask(cache, key(cache, f"Question {n}?"), replace(EXACT, ttl=1), answer=str(n))
    evict(server, "e")
    await ask(cache, key(cache, "One?"), replace(EXACT, ttl=1), answer="1")
    while server.keys("rmw:{c:*}:b:*"):
        await asyncio.sleep(0.05)
    for n in range(2):
        await ask(cache, key(cache, f"Two {n}?"), EXACT, answer="2")
    assert sum(server.zcard(name) for name in server.keys("rmw:{c:*}:i")) == 2


@pytest.mark.parametrize(("name", "kept"), [("i", 0), ("p:*", 3)], ids=["shard", "partition"])
async def test_evicted_entries_are_no_longer_counted_in_bytes(
    open_cache: OpenCache, server: Plain, monkeypatch: pytest.MonkeyPatch, name: str, kept: int
) -> None:
    if name == "i":
        cache = open_cache(cache__max_owner_bytes=5000)
    else:
        cache = open_cache()
        monkeypatch.setattr("responses_mw.cache.store.MAX_PARTITION_BYTES", 5000)
    for n in range(3):
        await ask(cache, key(cache, f"Question {n}?"), answer="x" * 1000)
    evict(server, name)
    for n in range(6):
        await ask(cache, key(cache, f"Another {n}?"), answer="x" * 1000)
    assert (await cache.entries.stats(ALICE)).entries == kept + 3


async def test_lookups_and_purges_work_after_redis_flushed_its_scripts(cache: Cache, server: Plain) -> None:
    await ask(cache, key(cache), answer="Paris.")
    server.script_flush()
    assert await ask(cache, key(cache)) == "told again: Paris."
    server.script_flush()
    assert await cache.entries.purge() == 1
