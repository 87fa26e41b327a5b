"""Expired files and the remains of interrupted uploads and deletions are erased."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from responses_mw.errors import RateLimited, StartupError, Unavailable
from responses_mw.files import FileLibrary
from responses_mw.files import library as library_module
from responses_mw.files.storage import ObjectStorage
from responses_mw.state import Missing, State, connect
from responses_mw.state.files import File, new_file_id
from tests.support.object_store import ObjectStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.servers import Serve

OWNER = "anonymous"


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    state = State(connect(redis_url, timeout=10))
    yield state
    await state.aclose()


@pytest.fixture
def library(state: State, tmp_path: Path) -> FileLibrary:
    return FileLibrary(state.files, state.store_files, f"file://{tmp_path}", 1024)


async def chunks(data: bytes = b"Hello") -> AsyncIterator[bytes]:
    yield data


def stored(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


async def due_now(library: FileLibrary, file_id: str) -> None:
    """Make the check of the file due now."""
    await library.records.schedule(file_id, OWNER, int(time.time()) - 1)


async def test_the_bytes_of_an_interrupted_upload_are_erased(library: FileLibrary, tmp_path: Path) -> None:
    data = await library.upload(chunks(), OWNER)
    await library.erase_due()
    assert len(stored(tmp_path)) == 1
    await due_now(library, data.file_id)
    await library.erase_due()
    assert stored(tmp_path) == []
    assert await library.records.due(10) == []


async def test_a_file_whose_creation_was_completed_late_is_not_erased(library: FileLibrary, tmp_path: Path) -> None:
    file = await library.create(await library.upload(chunks(), OWNER), "a", "user_data", 3600, OWNER)
    await due_now(library, file.id)  # as if the process had died before it scheduled the expiry
    await library.erase_due()
    assert len(stored(tmp_path)) == 1
    assert await library.records.due(10) == []
    assert (await library.records.get(file.id, OWNER)) == file


async def test_an_expired_file_is_erased(library: FileLibrary, tmp_path: Path) -> None:
    file = await library.create(await library.upload(chunks(), OWNER), "a", "user_data", -1, OWNER)
    with pytest.raises(Missing):
        await library.records.get(file.id, OWNER)
    await library.erase_due()
    assert stored(tmp_path) == []
    assert await library.records.due(10) == []
    assert not await library.records.delete(file.id, OWNER)


async def test_other_files_are_erased_despite_damaged_records_and_checks(
    library: FileLibrary, state: State, tmp_path: Path
) -> None:
    damaged = await library.create(await library.upload(chunks(), OWNER), "a", "user_data", 3600, OWNER)
    await state.client.command("HSET", f"rmw:{{f{OWNER}}}:files", damaged.id.removeprefix("file-"), "?")
    for member in ("x", f"{OWNER}:short", b"\xff"):
        await state.client.command("ZADD", "rmw:{files}:due", 1, member)
    await due_now(library, damaged.id)
    await library.create(await library.upload(chunks(), OWNER), "b", "user_data", -1, OWNER)
    await library.erase_due()
    assert len(stored(tmp_path)) == 1
    assert await library.records.due(10) == []


@pytest.mark.parametrize("url", ["file:///proc/nothing/here", "unknown://bucket"])
async def test_an_unusable_storage_url_prevents_the_start(state: State, url: str) -> None:
    with pytest.raises(StartupError, match=r"files\.url"):
        FileLibrary(state.files, state.store_files, url, 1024)


@pytest.fixture
def object_store(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """An object store whose address and credentials are in the environment."""
    store = ObjectStore()
    for name, value in {"ENDPOINT_URL": serve(store, lifespan="off"), "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return store


async def test_files_are_stored_in_an_object_store(state: State, object_store: ObjectStore) -> None:
    library = FileLibrary(state.files, state.store_files, "s3://bucket/prefix", 1024)
    file = await library.create(await library.upload(chunks(), OWNER), "a", "user_data", 3600, OWNER)
    assert object_store.objects == {f"/bucket/prefix/{OWNER}/{file.id}": b"Hello"}
    assert b"".join([bytes(chunk) async for chunk in await library.read(file, OWNER)]) == b"Hello"
    await library.delete(file.id, OWNER)
    assert object_store.objects == {}
    await ObjectStorage("s3://bucket/prefix").check()
    assert object_store.objects == {}


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "NoSuchBucket", "NoSuchBucket. Create the bucket, or correct files.url."),
        (403, "InvalidAccessKeyId", "InvalidAccessKeyId. Check the credentials of the storage, and their permissions."),
    ],
)
async def test_an_object_store_that_fails_is_unavailable_and_the_log_names_the_remedy(
    state: State, object_store: ObjectStore, caplog: pytest.LogCaptureFixture, status: int, code: str, remedy: str
) -> None:
    object_store.error = status, code
    library = FileLibrary(state.files, state.store_files, "s3://bucket/prefix", 1024)
    file = File(new_file_id(), "a", "user_data", 5, 0, None, "")
    for failing in (library.upload(chunks(), OWNER), library.read(file, OWNER)):
        caplog.clear()
        with pytest.raises(Unavailable) as raised:
            await failing
        assert (raised.value.status, raised.value.message) == (503, "The file storage is unavailable.")
        assert "file storage (files.url) failed: " in caplog.text
        assert remedy in caplog.text


async def test_an_object_that_is_lost_is_missing(state: State, object_store: ObjectStore) -> None:
    library = FileLibrary(state.files, state.store_files, "s3://bucket/prefix", 1024)
    with pytest.raises(Missing):
        await library.read(File(new_file_id(), "a", "user_data", 5, 0, None, ""), OWNER)


async def test_uploads_are_limited_for_each_owner_and_in_total(library: FileLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "MAX_OWNER_UPLOADS", 2)
    monkeypatch.setattr(library_module, "MAX_UPLOADS", 3)
    ended = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        await ended.wait()
        yield b"a"

    uploads = [asyncio.create_task(library.upload(slow(), owner)) for owner in ("alice", "alice", "alice", "bob", "carol")]
    refused = [uploads[2], uploads[4]]
    await asyncio.wait(refused)
    assert [type(upload.exception()) for upload in refused] == [RateLimited, Unavailable]
    ended.set()
    assert [(await uploads[place]).size for place in (0, 1, 3)] == [1, 1, 1]
    for owner in ("alice", "carol"):
        assert (await library.upload(slow(), owner)).size == 1
