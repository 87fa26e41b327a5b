"""Vector stores: counts are always right, chunks become visible atomically, and no change leaves orphaned chunks."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import orjson
import pytest

from responses_mw.errors import BadRequest
from responses_mw.state import Damaged, Missing, NewerRecord, OverBound, OverQuota, State, StateFull
from responses_mw.state.blocks import BlockName, SearchedBlock, StoredBlock
from responses_mw.state.files import File, new_file_id
from responses_mw.state.schema import compress
from responses_mw.state.store_file_records import NewFile, OtherSpace, StoreFile
from responses_mw.state.store_files import new_batch_id, new_generation
from responses_mw.state.store_keys import DAY, Range
from responses_mw.state.vector_stores import FileCounts, VectorStore, new_store_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.valkey import OpenState, Plain, Server

OWNER, OTHER = "anonymous", "other"


async def new_store(state: State, **members: object) -> VectorStore:
    now = int(time.time())
    store = VectorStore(new_store_id(), "handbook", now, now, **members)  # type: ignore[arg-type]
    await state.vector_stores.create(store, OWNER)
    return store


async def new_file(state: State, name: str = "a.txt") -> NewFile:
    file = File(new_file_id(), name, "assistants", 5, int(time.time()), None, "")
    await state.files.create(file, OWNER)
    return NewFile(file.id, name, {"year": 2026}, {"type": "auto"})


def block(*texts: str, space: str = "builtin", dimension: int = 2) -> StoredBlock:
    return StoredBlock(space, dimension, texts, range(len(texts)), bytes(2 * dimension * len(texts)))


async def attached(state: State, store: VectorStore, *files: NewFile, batch: str = "") -> list[StoreFile]:
    files = files or (await new_file(state),)
    await state.store_files.attach(store.id, OWNER, files, new_generation(), batch)
    return [await state.store_files.get(store.id, OWNER, one.file_id) for one in files]


async def counts(state: State, store: VectorStore) -> FileCounts:
    return (await state.vector_stores.get(store.id, OWNER)).counts


def block_keys(server: Plain) -> list[bytes]:
    return sorted(server.keys("rmw:{v*"))


async def test_a_store_is_returned_as_it_was_created(state: State) -> None:
    store = await new_store(state, description="All rules", metadata={"team": "hr"}, days=3)
    assert await state.vector_stores.get(store.id, OWNER) == store
    assert store.expires_at == store.active_at + 3 * 24 * 3600


async def test_a_store_of_another_owner_is_not_found(state: State) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    for call in (
        state.vector_stores.get(store.id, OTHER),
        state.vector_stores.update(store.id, OTHER, {"name": "mine"}),
        state.store_files.get(store.id, OTHER, file.id),
        state.store_files.describe(store.id, OTHER, file.id, {}),
    ):
        with pytest.raises(Missing):
            await call
    await state.vector_stores.delete(store.id, OTHER)
    assert (await state.vector_stores.get(store.id, OWNER)).name == "handbook"


@pytest.mark.parametrize("store_id", ["vs_x", "file-" + "a" * 25, "vs_" + "a" * 25 + "}", ""])
async def test_a_malformed_id_is_not_found(state: State, store_id: str) -> None:
    with pytest.raises(Missing):
        await state.vector_stores.get(store_id, OWNER)


async def test_stores_are_listed_in_pages_in_both_directions(state: State) -> None:
    stores = [(await new_store(state)).id for _ in range(5)]

    async def listed(**members: object) -> tuple[list[int], bool]:
        page = await state.vector_stores.page(OWNER, Range(**members))  # type: ignore[arg-type]
        return [stores.index(one.id) for one in page.stores], page.has_more

    assert await listed() == ([4, 3, 2, 1, 0], False)
    assert await listed(limit=2, order="asc") == ([0, 1], True)
    assert await listed(limit=2, order="asc", after=stores[1]) == ([2, 3], True)
    assert await listed(limit=2, after=stores[2]) == ([1, 0], False)
    assert await listed(limit=2, order="asc", before=stores[3]) == ([1, 2], True)
    assert await listed(limit=9, order="desc", before=stores[3]) == ([4], False)
    assert await listed(order="asc", after=stores[0], before=stores[3]) == ([1, 2], False)
    for param in ("after", "before"):
        with pytest.raises(BadRequest, match="not in this list"):
            await listed(**{param: new_store_id()})


async def test_fields_are_changed_and_deleted(state: State) -> None:
    store = await new_store(state, days=3)
    await state.vector_stores.update(store.id, OWNER, {"name": "rules", "metadata": b'{"a":"b"}', "days": None})
    found = await state.vector_stores.get(store.id, OWNER)
    assert (found.name, found.metadata, found.days) == ("rules", {"a": "b"}, None)


async def test_the_counts_change_with_the_files(state: State) -> None:
    store = await new_store(state)
    one, two, three = await attached(state, store, *[await new_file(state) for _ in range(3)])
    assert await counts(state, store) == FileCounts(in_progress=3)
    assert await state.store_files.publish(one, OWNER, block("a"))
    assert await state.store_files.fail(two, OWNER, "invalid_file", "The file is empty.")
    assert await counts(state, store) == FileCounts(in_progress=1, completed=1, failed=1)
    assert (await state.store_files.get(store.id, OWNER, two.id)).error == ("invalid_file", "The file is empty.")
    await state.store_files.detach(store.id, OWNER, [three])
    await attached(state, store, NewFile(two.id, "a.txt", {}, {}))
    assert await counts(state, store) == FileCounts(in_progress=1, completed=1)


async def test_chunks_become_visible_only_when_the_record_names_them(state: State, server: Plain) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    sent = block("Leave is 30 days.", "Zeit ist Geld. " * 100_000)
    assert await state.store_files.publish(file, OWNER, sent)
    found = await state.store_files.get(store.id, OWNER, file.id)
    assert (found.status, found.chunks, found.size) == ("completed", 2, sent.size)
    read = await state.store_files.read_block(found)
    assert (list(read.texts), read.starts, read.vectors) == (list(sent.texts), [0, 1], sent.vectors)
    record = await state.vector_stores.get(store.id, OWNER)
    assert (record.space, record.dimension, record.size) == ("builtin", 2, sent.size)
    assert server.zcard("rmw:{stores}:due") == 0


async def test_chunks_of_several_pieces_are_read_in_order(state: State) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    texts = [f"{number} " + "x" * 300_000 for number in range(40)]
    vectors = bytes(range(160))
    assert await state.store_files.publish(file, OWNER, StoredBlock("builtin", 2, texts, list(range(40)), vectors))
    found = await state.store_files.get(store.id, OWNER, file.id)
    read = await state.store_files.read_block(found)
    assert (found.pieces > 8, read.texts, read.vectors) == (True, texts, vectors)


async def test_each_change_of_the_content_changes_the_version(state: State) -> None:
    store, versions = await new_store(state), set()

    async def note() -> None:
        version = (await state.vector_stores.get(store.id, OWNER)).version
        assert version not in versions
        versions.add(version)

    await note()
    [file] = await attached(state, store)
    await note()
    await state.store_files.publish(file, OWNER, block("a"))
    await note()
    await state.store_files.describe(store.id, OWNER, file.id, {"year": 2027})
    await note()
    assert (await state.store_files.get(store.id, OWNER, file.id)).attributes == {"year": 2027}
    await state.store_files.detach(store.id, OWNER, [file])
    await note()


async def test_old_chunks_stay_visible_until_a_file_is_ingested_again(state: State, server: Plain) -> None:
    store, source = await new_store(state), await new_file(state)
    [first] = await attached(state, store, source)
    await state.store_files.publish(first, OWNER, block("old"))
    [second] = await attached(state, store, source)
    assert (second.status, (await state.store_files.read_block(second)).texts) == ("in_progress", ["old"])
    assert not await state.store_files.publish(first, OWNER, block("late"))
    assert not await state.store_files.fail(first, OWNER, "server_error", "late")
    assert await state.store_files.publish(second, OWNER, block("new"))
    assert (await state.store_files.read_block(await state.store_files.get(store.id, OWNER, second.id))).texts == ["new"]
    assert len(block_keys(server)) == 1
    assert await counts(state, store) == FileCounts(completed=1)


async def test_a_result_that_is_published_twice_counts_once(state: State, server: Plain) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    for _ in range(2):
        await state.store_files.publish(file, OWNER, block("a"))
    assert await counts(state, store) == FileCounts(completed=1)
    assert (await state.vector_stores.get(store.id, OWNER)).size == block("a").size
    assert len(block_keys(server)) == 1
    assert (await state.store_files.read_block(await state.store_files.get(store.id, OWNER, file.id))).texts == ["a"]


async def test_a_result_for_a_removed_file_is_discarded(state: State, server: Plain) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    await state.store_files.detach(store.id, OWNER, [file])
    assert not await state.store_files.publish(file, OWNER, block("a"))
    assert block_keys(server) == []
    assert await state.store_files.get_pending(store.id, OWNER, file.id, file.generation) is None


async def test_vectors_of_another_space_are_refused(state: State, server: Plain) -> None:
    store = await new_store(state)
    one, two = await attached(state, store, await new_file(state), await new_file(state))
    await state.store_files.publish(one, OWNER, block("a"))
    for other in (block("b", space="server"), block("b", dimension=3)):
        with pytest.raises(OtherSpace) as caught:
            await state.store_files.publish(two, OWNER, other)
        assert (caught.value.space, caught.value.dimension) == ("builtin", 2)
    assert len(block_keys(server)) == 1
    assert await counts(state, store) == FileCounts(in_progress=1, completed=1)


async def test_a_deleted_file_is_removed_from_all_stores(state: State, server: Plain) -> None:
    stores, source = [await new_store(state) for _ in range(2)], await new_file(state)
    for store in stores:
        [file] = await attached(state, store, source)
        await state.store_files.publish(file, OWNER, block("a"))
    await state.store_files.detach_everywhere(source.file_id, OWNER)
    for store in stores:
        record = await state.vector_stores.get(store.id, OWNER)
        assert (record.counts, record.size) == (FileCounts(), 0)
    assert block_keys(server) == []
    assert server.keys("*:of:*") == []


async def test_a_file_that_does_not_exist_is_not_added(state: State) -> None:
    store, here = await new_store(state), await new_file(state)
    gone = NewFile(new_file_id(), "b.txt", {}, {})
    with pytest.raises(Missing, match=gone.file_id):
        await state.store_files.attach(store.id, OWNER, [here, gone], new_generation())
    assert await counts(state, store) == FileCounts()


async def test_a_store_has_a_maximum_number_of_files(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_mw.state.store_files.MAX_FILES", 2)
    store, files = await new_store(state), [await new_file(state) for _ in range(3)]
    await attached(state, store, *files[:2])
    with pytest.raises(OverBound, match="maximum of 2 files"):
        await state.store_files.attach(store.id, OWNER, files[1:], new_generation())
    await attached(state, store, *files[:2])  # they are there already


async def test_files_are_listed_by_status(state: State) -> None:
    store = await new_store(state)
    files = await attached(state, store, *[await new_file(state) for _ in range(5)])
    for file in files[:3]:
        await state.store_files.publish(file, OWNER, block("a"))
    page = await state.store_files.page(store.id, OWNER, Range(limit=2, order="asc"), "completed")
    assert ([one.id for one in page.files], page.has_more) == ([one.id for one in files[:2]], True)
    page = await state.store_files.page(store.id, OWNER, Range(limit=2, order="asc", after=files[1].id), "completed")
    assert ([one.id for one in page.files], page.has_more) == ([files[2].id], False)
    assert len([one async for one in state.store_files.each(store.id, OWNER)]) == 5


async def test_a_batch_counts_its_files_by_status(state: State) -> None:
    store, batch = await new_store(state), new_batch_id()
    await attached(state, store)
    one, two, three = await attached(state, store, *[await new_file(state) for _ in range(3)], batch=batch)
    await state.store_files.publish(one, OWNER, block("a"))
    await state.store_files.fail(two, OWNER, "server_error", "x")
    await state.store_files.detach(store.id, OWNER, [three])
    found = await state.store_files.batch(store.id, OWNER, batch)
    assert (found.counts, found.status) == (FileCounts(completed=1, failed=1, cancelled=1), "completed")
    page = await state.store_files.page(store.id, OWNER, Range(order="asc"), None, batch)
    assert [(file.id, file.batch) for file in page.files] == [(one.id, batch), (two.id, batch)]
    with pytest.raises(Missing):
        await state.store_files.batch((await new_store(state)).id, OWNER, batch)


async def test_results_for_a_cancelled_batch_are_discarded(state: State, server: Plain) -> None:
    store, batch = await new_store(state), new_batch_id()
    one, two = await attached(state, store, await new_file(state), await new_file(state), batch=batch)
    await state.store_files.publish(one, OWNER, block("a"))
    await state.store_files.cancel(store.id, OWNER, batch)
    assert not await state.store_files.publish(two, OWNER, block("b"))
    found = await state.store_files.batch(store.id, OWNER, batch)
    assert (found.counts, found.status) == (FileCounts(completed=1, cancelled=1), "cancelled")
    assert await counts(state, store) == found.counts
    assert len(block_keys(server)) == 1


@pytest.mark.parametrize("is_marked", [False, True])
async def test_an_expired_store_refuses_changes(state: State, *, is_marked: bool) -> None:
    now = int(time.time())
    store = VectorStore(new_store_id(), "", now, now, days=1)
    await state.vector_stores.create(store, OWNER)
    [file] = await attached(state, store)
    await state.vector_stores.update(store.id, OWNER, {"active": now - 2 * 24 * 3600})
    if is_marked:
        assert await state.vector_stores.expire(store.id, OWNER) is None
    assert (await state.vector_stores.get(store.id, OWNER)).is_expired
    assert not await state.store_files.publish(file, OWNER, block("a"))
    source = await new_file(state)
    for call in (
        state.vector_stores.use(store.id, OWNER),
        state.vector_stores.update(store.id, OWNER, {"active": now}),
        state.store_files.attach(store.id, OWNER, [source], new_generation()),
    ):
        with pytest.raises(BadRequest, match="has expired"):
            await call


async def test_the_use_of_a_store_delays_its_expiry(state: State) -> None:
    now = int(time.time())
    store = VectorStore(new_store_id(), "", now, now - 1000, days=1)
    await state.vector_stores.create(store, OWNER)
    await state.vector_stores.use(store.id, OWNER)
    assert (await state.vector_stores.expire(store.id, OWNER) or 0) >= now + 24 * 3600


async def test_stores_and_chunks_count_towards_the_quota_of_their_owner(
    open_state: OpenState, valkey: Server, server: Plain
) -> None:
    state = open_state(valkey.url, owner_bytes=1_000_000)
    sizes = "rmw:{banonymous}:sizes"
    source = await new_file(state)
    before = int(server.hget(sizes, "sum") or 0)
    store = await new_store(state)
    [file] = await attached(state, store, source)
    added = int(server.hget(sizes, "sum") or 0)
    with pytest.raises(OverQuota):
        await state.store_files.publish(file, OWNER, block("x" * 1_000_000))
    await state.store_files.publish(file, OWNER, block("x" * 10_000))
    assert int(server.hget(sizes, "sum") or 0) == added + block("x" * 10_000).size
    await state.vector_stores.delete(store.id, OWNER)
    await state.store_files.detach(store.id, OWNER, [await state.store_files.get(store.id, OWNER, file.id)])
    assert int(server.hget(sizes, "sum") or 0) == before
    assert block_keys(server) == []


async def test_a_batch_counts_while_it_is_kept(open_state: OpenState, valkey: Server, server: Plain) -> None:
    state = open_state(valkey.url, owner_bytes=1_000_000)
    store, file = await new_store(state), await new_file(state)
    await attached(state, store, file)
    before = int(server.hget("rmw:{banonymous}:sizes", "sum") or 0)
    for _ in range(2):
        await attached(state, store, file, batch=new_batch_id())
    assert int(server.hget("rmw:{banonymous}:sizes", "sum") or 0) == before + 2 * (512 + 128)
    lives = [until / 1000 - time.time() for _, until in server.zrange("rmw:{banonymous}:expires", 0, -1, withscores=True)]
    assert sum(6 * DAY < seconds < 8 * DAY for seconds in lives) == 2


async def test_files_that_do_not_all_fit_into_a_store_are_not_added(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_mw.state.store_files.MAX_FILES", 4)
    monkeypatch.setattr("responses_mw.state.store_files._ATTACHED", 2)
    store, files = await new_store(state), [await new_file(state) for _ in range(5)]
    await attached(state, store, *files[:2])
    with pytest.raises(OverBound):
        await attached(state, store, *files[1:], batch=new_batch_id())
    assert (await counts(state, store)).total == 2
    await attached(state, store, *files[:4], batch=new_batch_id())
    assert (await counts(state, store)).total == 4


async def test_blocks_that_are_published_at_the_same_time_do_not_exceed_the_quota(
    open_state: OpenState, valkey: Server, server: Plain
) -> None:
    state = open_state(valkey.url, owner_bytes=1_000_000)
    store = await new_store(state)
    files = await attached(state, store, *[await new_file(state) for _ in range(3)])
    published = await asyncio.gather(
        *(state.store_files.publish(file, OWNER, block("x" * 400_000)) for file in files), return_exceptions=True
    )
    assert sorted(map(str, map(type, published))) == sorted(map(str, (bool, bool, OverQuota)))
    assert int(server.hget("rmw:{banonymous}:sizes", "sum") or 0) < 900_000
    assert len(block_keys(server)) == 2


async def test_the_text_of_a_file_is_read_without_its_vectors(state: State, server: Plain) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    texts = [f"{number} " + "x" * 30_000 for number in range(10)]
    await state.store_files.publish(file, OWNER, StoredBlock("builtin", 2, texts, range(10), bytes(40), bytes(300_000)))
    [key] = block_keys(server)
    server.lset(key, 1, b"the words of a search")
    found = await state.store_files.get(store.id, OWNER, file.id)
    assert await state.store_files.read_document(found) == (texts, [*range(10)])
    server.delete(key)
    with pytest.raises(Missing):
        await state.store_files.read_document(found)


async def test_a_search_reads_only_the_pieces_with_vectors_and_words(state: State) -> None:
    store = await new_store(state)
    files = await attached(state, store, *[await new_file(state) for _ in range(3)])
    for number, file in enumerate(files):
        texts, words = [f"{number} {chunk} " + "x" * 20_000 for chunk in range(10)], bytes([number]) * 300_000
        await state.store_files.publish(file, OWNER, StoredBlock("builtin", 2, texts, range(10), bytes(40), words))
    records = [await state.store_files.get(store.id, OWNER, file.id) for file in files]
    names = [BlockName(one.id, one.block, one.size) for one in records]
    found = await state.store_blocks.read_searched(store.id, [*names, BlockName(files[0].id, "gone")])
    assert found[3] is None
    sound = [one for one in found if isinstance(one, SearchedBlock)]
    assert [(one.chunks, one.dimension, one.vectors, one.words) for one in sound] == [
        (10, 2, bytes(40), bytes([number]) * 300_000) for number in range(3)
    ]
    assert (sound[0].first_frame, sound[0].frames) == (2, [0, 4, 8])
    places = [(names[number], *sound[0].place_of(chunk)) for number, chunk in ((0, 3), (2, 9), (1, 4), (0, 1))]
    gone = (BlockName(files[0].id, "gone"), 2, 0)
    texts_read = await state.store_blocks.read_texts(store.id, [*places, gone])
    assert [text and str(text)[:4] for text in texts_read] == ["0 3 ", "2 9 ", "1 4 ", "0 1 ", None]


async def test_many_small_blocks_are_read(state: State) -> None:
    store = await new_store(state)
    files = await attached(state, store, *[await new_file(state) for _ in range(70)])
    for file in files:
        await state.store_files.publish(file, OWNER, block(file.id))
    names = [BlockName(one.id, one.block, one.size) async for one in state.store_files.each(store.id, OWNER)]
    found = await state.store_blocks.read_searched(store.id, names)
    assert [one.chunks for one in found if isinstance(one, SearchedBlock)] == [1] * 70


def _head(**members: object) -> bytes:
    head = {"v": 1, "space": "builtin", "dimension": 2, "chunks": 2, "words": 0, "first_frame": 1, "frames": [0]}
    data = orjson.dumps({**head, **members})
    return len(data).to_bytes(4, "little") + data + bytes(8)


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        b"x",
        _head()[:-1],
        _head(frames=[]),
        _head(frames=[1]),
        _head(frames=[0, 0]),
        _head(frames=[0, 2]),
        _head(first_frame=0),
        _head(first_frame=10**9),
        _head(words=-1),
        _head(dimension=10**12),
        _head(chunks="2"),
    ],
)
async def test_a_damaged_block_is_refused(state: State, server: Plain, piece: bytes) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    await state.store_files.publish(file, OWNER, block("a", "b"))
    [key] = block_keys(server)
    server.lset(key, 0, piece)
    record = await state.store_files.get(store.id, OWNER, file.id)
    with pytest.raises(Damaged):
        await state.store_files.read_block(record)
    [other] = await attached(state, store)
    await state.store_files.publish(other, OWNER, block("a", "b"))
    records = [record, await state.store_files.get(store.id, OWNER, other.id)]
    names = [BlockName(one.id, one.block) for one in records]
    damaged, sound = await state.store_blocks.read_searched(store.id, names)
    assert (type(damaged), type(sound)) == (Damaged, SearchedBlock)


async def test_damaged_texts_are_refused(state: State, server: Plain) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    await state.store_files.publish(file, OWNER, block("a", "b"))
    [key] = block_keys(server)
    record = await state.store_files.get(store.id, OWNER, file.id)
    name = BlockName(file.id, record.block)
    for texts in (b"x", compress(b"[]"), compress(b'[["a"],[0]]'), compress(b"[[1,2],[0,0]]")):
        server.lset(key, 1, texts)
        with pytest.raises(Damaged):
            await state.store_files.read_block(record)
        [damaged] = await state.store_blocks.read_texts(store.id, [(name, 1, 1)])
        assert isinstance(damaged, Damaged)


async def test_a_block_of_a_newer_release_is_refused(state: State, server: Plain) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    await state.store_files.publish(file, OWNER, block("a", "b"))
    server.lset(block_keys(server)[0], 0, _head(v=2))
    with pytest.raises(NewerRecord):
        await state.store_files.read_block(await state.store_files.get(store.id, OWNER, file.id))


async def test_a_full_redis_still_searches_and_removes(open_state: OpenState, start: Callable[..., Server]) -> None:
    server = start("--maxmemory-policy", "noeviction")
    state, now = open_state(server.url), int(time.time())
    old = VectorStore(new_store_id(), "", now, now - 1000)
    await state.vector_stores.create(old, OWNER)
    expired = VectorStore(new_store_id(), "", now, now - 2 * 24 * 3600, days=1)
    await state.vector_stores.create(expired, OWNER)
    [file] = await attached(state, old)
    await state.vector_stores.update(old.id, OWNER, {"active": now - 1000})
    assert await state.store_files.publish(file, OWNER, block("a"))
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(StateFull):
            await state.vector_stores.update(old.id, OWNER, {"name": "rules"})
        assert (await state.vector_stores.use(old.id, OWNER)).id == old.id
        await state.store_files.detach(old.id, OWNER, [await state.store_files.get(old.id, OWNER, file.id)])
        await state.vector_stores.delete(old.id, OWNER)
        assert await state.vector_stores.expire(expired.id, OWNER) is None
        assert block_keys(client) == []


@pytest.mark.parametrize("seed", range(3))
async def test_counts_equal_the_files_after_any_changes(state: State, server: Plain, seed: int) -> None:
    random = Random(seed)
    store, sources = await new_store(state), [await new_file(state) for _ in range(4)]
    changes = Changes(state, store, random)
    known, version = dict[str, str](), 0  # the blocks that a process knows which reads only what has changed
    for _ in range(40):
        await changes.make(random.choice(sources))
        files = [one async for one in state.store_files.each(store.id, OWNER)]
        record = await state.vector_stores.get(store.id, OWNER)
        assert record.counts == FileCounts(*(sum(one.status == name for one in files) for name in FileCounts._fields))
        assert record.size == sum(one.size for one in files)
        assert len(block_keys(server)) == sum(bool(one.block) for one in files)
        changed = await state.store_files.changes(store.id, OWNER, version) or {}
        known |= {file_id: file.block if file is not None else "" for file_id, file in changed.items()}
        version = record.version
        assert {one.id: one.block for one in files if one.block} == {name: block for name, block in known.items() if block}
        for batch_id, in_progress in (await changes.batches_in_progress()).items():
            assert in_progress == sum(one.status == "in_progress" and one.batch == batch_id for one in files)


class Changes:
    """A state machine of random changes to a store."""

    def __init__(self, state: State, store: VectorStore, random: Random) -> None:
        self._state = state
        self._store = store
        self._random = random
        self._batches = [new_batch_id() for _ in range(2)]
        self._seen = list[StoreFile]()  # also of generations that are not wanted any more

    async def make(self, source: NewFile) -> None:
        stored, change = (
            self._state.store_files,
            self._random.choice(["attach", "attach", "publish", "fail", "detach", "cancel"]),
        )
        if change == "attach" or not self._seen:
            self._seen += await attached(self._state, self._store, source, batch=self._random.choice([*self._batches, ""]))
            return
        file = self._random.choice(self._seen)
        if change == "publish":
            await stored.publish(file, OWNER, block(*["x"] * self._random.randint(1, 3)))
        elif change == "fail":
            await stored.fail(file, OWNER, "server_error", "x")
        elif change == "detach":
            await stored.detach(self._store.id, OWNER, [file])
        else:
            with suppress(Missing):
                await stored.cancel(self._store.id, OWNER, self._random.choice(self._batches))

    async def batches_in_progress(self) -> dict[str, int]:
        found = dict[str, int]()
        for batch_id in self._batches:
            with suppress(Missing):
                found[batch_id] = (await self._state.store_files.batch(self._store.id, OWNER, batch_id)).counts.in_progress
        return found


async def test_for_a_version_that_is_too_old_no_changes_are_returned(state: State, server: Plain) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    version = (await state.vector_stores.get(store.id, OWNER)).version
    assert await state.store_files.changes(store.id, OWNER, version) == {}
    key = f"rmw:{{f{OWNER}}}:vs:{store.id.removeprefix('vs_')}:changes"
    server.zadd(key, {f"removed{number}": version + number for number in range(20_000)})
    server.hset(key.removesuffix(":changes"), "version", version + 20_000)
    await state.store_files.describe(store.id, OWNER, file.id, {"a": 1})
    assert await state.store_files.changes(store.id, OWNER, version) is None
    assert await state.store_files.changes(store.id, OWNER, version + 10) is None  # these are too many
    assert (await state.store_files.changes(store.id, OWNER, version + 20_000) or {}).keys() == {file.id}
    assert server.zcard(key) == 20_000


# -- damaged records -----------------------------------------------------------------------------------------------------


def _file_key(store: VectorStore, file: StoreFile) -> str:
    return f"rmw:{{f{OWNER}}}:vs:{store.id[3:]}:f:{file.id[5:]}"


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {"attributes": "{"},
        {"attributes": b"\xff"},
        {"chunking": ""},
        {"created_at": "then"},
        {"bytes": "x"},
        {"chunks": "1e3"},
        {"v": "?"},
        {"filename": b"\xff"},
        {"status": b"\xff"},
        {"block": b"\xff"},
        {"block": "{another}", "pieces": "?"},
        {b"\xff": "x"},
    ],
)
async def test_a_file_with_a_damaged_record_is_shown_as_failed_and_can_be_removed_or_added_again(
    state: State, server: Plain, fields: dict[str | bytes, str | bytes] | None
) -> None:
    store = await new_store(state)
    files = [await new_file(state), await new_file(state)]
    damaged, sound = await attached(state, store, *files)
    for file in (damaged, sound):
        assert await state.store_files.publish(file, OWNER, block("a"))
    before, key = await state.vector_stores.get(store.id, OWNER), _file_key(store, damaged)
    if fields is None:
        server.set(key, "x")
    else:
        server.hset(key, mapping=fields)

    everywhere = [one async for one in state.store_files.each(store.id, OWNER)]
    changed = await state.store_files.changes(store.id, OWNER, 0)
    assert changed is not None
    page = await state.store_files.page(store.id, OWNER, Range(order="asc"), None)
    for found in (everywhere[0], changed[damaged.id], page.files[0], await state.store_files.get(store.id, OWNER, damaged.id)):
        assert found is not None
        assert (found.id, found.status, found.is_damaged) == (damaged.id, "failed", True)
        assert found.error is not None
        assert "Add the file to the vector store again" in found.error[1]
    assert everywhere[1].status == "completed"

    await state.store_files.attach(store.id, OWNER, files[:1], new_generation())
    again = await state.store_files.get(store.id, OWNER, damaged.id)
    if again.is_damaged:  # a field that this release does not know
        assert fields is not None
        assert b"\xff" in fields
    else:
        assert again.status == "in_progress"
        assert await state.store_files.publish(again, OWNER, block("b"))
    await state.store_files.detach(store.id, OWNER, [await state.store_files.get(store.id, OWNER, damaged.id)])
    assert [one.id async for one in state.store_files.each(store.id, OWNER)] == [sound.id]
    assert not server.exists(key)
    assert (await state.vector_stores.get(store.id, OWNER)).version > before.version


async def test_a_damaged_file_can_be_removed_at_once(state: State, server: Plain) -> None:
    store = await new_store(state)
    for value in (b"x", None):
        [file] = await attached(state, store)
        await state.store_files.publish(file, OWNER, block("a"))
        if value:
            server.set(_file_key(store, file), value)
        else:
            server.hset(_file_key(store, file), mapping={"block": b"\xff", "bytes": "many"})
        await state.store_files.detach(store.id, OWNER, [await state.store_files.get(store.id, OWNER, file.id)])
        assert not server.exists(_file_key(store, file))
    assert [one async for one in state.store_files.each(store.id, OWNER)] == []


async def test_damaged_chunks_are_erased_and_the_file_gets_the_status_failed(
    state: State, server: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    store = await new_store(state)
    [file] = await attached(state, store)
    await state.store_files.publish(file, OWNER, block("a"))
    old = await state.store_files.get(store.id, OWNER, file.id)
    await state.store_files.leave_out(old, OWNER)
    assert any(file.id in record.message and record.levelname == "ERROR" for record in caplog.records)
    record = await state.store_files.get(store.id, OWNER, file.id)
    assert (record.status, record.block, record.size) == ("failed", "", 0)
    assert record.error is not None
    assert record.error[0] == "server_error"
    after = await state.vector_stores.get(store.id, OWNER)
    assert (after.size, after.counts) == (0, FileCounts(failed=1))
    assert block_keys(server) == []

    [file] = await attached(state, store, NewFile(file.id, "a.txt", {}, {}))
    await state.store_files.publish(file, OWNER, block("b"))
    await state.store_files.leave_out(old, OWNER)  # another process has read the old chunks
    assert (await state.store_files.get(store.id, OWNER, file.id)).status == "completed"
    assert len(block_keys(server)) == 1


async def test_a_damaged_store_is_omitted_from_lists(state: State, server: Plain) -> None:
    stores = [await new_store(state) for _ in range(3)]
    server.hset(f"rmw:{{f{OWNER}}}:vs:{stores[0].id[3:]}", "metadata", "{")
    server.set(f"rmw:{{f{OWNER}}}:vs:{stores[1].id[3:]}", "x")
    page = await state.vector_stores.page(OWNER, Range())
    assert [one.id for one in page.stores] == [stores[2].id]
