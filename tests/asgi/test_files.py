"""The Files API: uploads, lists, downloads and deletions, with the official client as oracle."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import openai
import pytest
import redis
from openai.types import FileObject

from responses_mw.asgi import multipart
from responses_mw.files.storage import MAX_IN_REDIS
from responses_mw.ids import random_part
from tests.support.stored import kept

from .test_errors import fault
from .test_passable import BEARER, KEYS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

UNKNOWN = f"file-{random_part()}"


async def create(ours: Ours, content: bytes = b"Hello", name: str = "a.txt", **options: Any) -> FileObject:
    return await ours.client.files.create(file=(name, content), **{"purpose": "user_data", **options})


async def post(ours: Ours, body: bytes | AsyncIterator[bytes], boundary: str = "b", **headers: str) -> dict[str, Any]:
    """Send a form that the server refuses, and return the error."""
    sent = {"content-type": f"multipart/form-data; boundary={boundary}", **headers}
    answer = await ours.http.post("/v1/files", content=body, headers=sent)
    return fault(answer, answer.status_code) | {"status": answer.status_code}


def part(head: str, content: bytes = b"") -> bytes:
    return b"--b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (head.encode(), content)


def stored(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


FILE = part('name="file"; filename="a.txt"', b"Hello")
PURPOSE = part('name="purpose"', b"user_data")
END = b"--b--\r\n"


@pytest.mark.both_mounts
async def test_a_file_is_created_retrieved_listed_downloaded_and_deleted(ours: Ours) -> None:
    files, content = ours.client.files, bytes(range(256)) * 1000
    created = await create(ours, content, "naïve plan.pdf")
    assert (created.filename, created.bytes, created.purpose, created.status) == (
        "naïve plan.pdf", 256_000, "user_data", "processed"
    )  # fmt: skip
    assert created.expires_at is None
    assert await files.retrieve(created.id) == created
    assert await files.wait_for_processing(created.id) == created
    assert [one async for one in files.list()] == [created]
    download = await files.content(created.id)
    assert download.content == content
    assert download.response.headers["content-disposition"] == "attachment; filename*=UTF-8''na%C3%AFve%20plan.pdf"
    assert (await files.delete(created.id)).deleted
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(created.id)
    assert [one async for one in files.list()] == []


async def test_deleting_a_file_erases_all_its_keys(ours: Ours, redis_url: str) -> None:
    created = await create(ours)
    await ours.client.files.delete(created.id)
    with redis.Redis.from_url(redis_url) as server:
        assert [key for key in kept(server) if b"{keys}" not in key] == []


async def test_the_parts_of_a_form_are_accepted_in_any_order_and_in_any_pieces(ours: Ours) -> None:
    body = FILE + PURPOSE + END

    async def bytewise() -> AsyncIterator[bytes]:
        for at in range(len(body)):
            yield body[at : at + 1]

    answer = await ours.http.post("/v1/files", content=bytewise(), headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.json()["filename"], answer.json()["bytes"]) == ("a.txt", 5)


async def test_files_are_listed_in_pages_in_both_orders_and_filtered(ours: Ours) -> None:
    made = [await create(ours, name=f"{n}", purpose="vision" if n % 2 else "user_data") for n in range(5)]
    ids, files = [one.id for one in made], ours.client.files
    assert [one.id async for one in files.list(limit=2, order="asc")] == ids
    assert [one.id async for one in files.list(limit=2)] == ids[::-1]
    assert [one.id async for one in files.list(limit=1, purpose="vision", order="asc")] == ids[1::2]
    page = await files.list(after=ids[1], limit=2, order="asc")
    assert ([one.id for one in page.data], page.has_more) == (ids[2:4], True)
    for query in ("after=nonsense", f"after={UNKNOWN}", "limit=0", "limit=10001", "order=up"):
        assert fault(await ours.http.get(f"/v1/files?{query}"), 400)["param"] == query.partition("=")[0]


async def test_files_of_another_owner_are_not_found(ours: Ours) -> None:
    created = await create(ours)
    other = ours.client.with_options(api_key="other").files
    for call in (other.retrieve, other.content, other.delete):
        with pytest.raises(openai.NotFoundError):
            await call(created.id)
    assert [one async for one in other.list()] == []
    assert fault(await ours.http.get(f"/v1/files?after={created.id}", headers=BEARER), 400)["param"] == "after"
    assert (await ours.client.files.retrieve(created.id)).id == created.id


async def test_an_expired_file_is_not_found(ours: Ours, redis_url: str) -> None:
    created = await create(ours, expires_after={"anchor": "created_at", "seconds": 3600})
    assert created.expires_at == created.created_at + 3600
    batch = await create(ours, purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * 24 * 3600
    with redis.Redis.from_url(redis_url) as server:  # as if an hour had passed
        [key] = server.keys("rmw:{f*}:files")
        for name, record in server.hgetall(key).items():
            server.hset(key, name, record.replace(b'"expires_at":', b'"expires_at":1,"was":'))
    with pytest.raises(openai.NotFoundError):
        await ours.client.files.retrieve(created.id)
    assert [one async for one in ours.client.files.list()] == []


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (FILE + END, "purpose"),
        (PURPOSE + END, "file"),
        (FILE + part('name="purpose"', b"fun") + END, "purpose"),
        (PURPOSE + FILE + FILE + END, "file"),
        (PURPOSE + PURPOSE + FILE + END, "purpose"),
        (PURPOSE + FILE + part('name="color"', b"red") + END, "color"),
        (PURPOSE + part('name="file"', b"Hello") + END, "file"),
        (PURPOSE + part('name="file"; filename=".."', b"Hello") + END, "file"),
        (PURPOSE + part(f'name="file"; filename="{"x" * 256}"') + END, "file.filename"),
        (PURPOSE + FILE + part('name="expires_after[seconds]"', b"3600") + END, "expires_after.anchor"),
        (PURPOSE + FILE + part('name="expires_after[anchor]"', b"created_at") + END, "expires_after.seconds"),
        (
            PURPOSE
            + FILE
            + part('name="expires_after[anchor]"', b"created_at")
            + part('name="expires_after[seconds]"', b"60")
            + END,
            "expires_after.seconds",
        ),
        (PURPOSE + FILE, None),
        (FILE + b"nonsense", None),
        (b"nonsense", None),
        (b"", None),
    ],
)
async def test_an_invalid_form_stores_nothing(ours: Ours, redis_url: str, form: bytes, param: str | None) -> None:
    assert (await post(ours, form))["param"] == param
    with redis.Redis.from_url(redis_url) as server:
        assert [key for key in kept(server) if b"{keys}" not in key] == []


async def test_paths_and_control_characters_are_removed_from_file_names(ours: Ours) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for sent, name in (("../../etc/passwd", "passwd"), ("C:/temp/a.txt", "a.txt"), ("a\x7fb\u202ec", "abc")):
        body = PURPOSE + part(f'name="file"; filename="{sent}"', b"Hello") + END
        assert (await ours.http.post("/v1/files", content=body, headers=headers)).json()["filename"] == name


async def test_parts_headers_and_fields_of_a_form_are_limited(ours: Ours) -> None:
    many = part('name="purpose"', b"user_data") * (multipart.MAX_PARTS + 1)
    assert (await post(ours, many + END))["status"] in (400, 413)
    long_head = b"--b\r\n" + b"x: " + b"y" * 9000 + b"\r\n\r\n"
    assert (await post(ours, long_head + END))["status"] in (400, 413)
    assert (await post(ours, part('name="purpose"', b"x" * 20_000) + END))["status"] == 413
    assert (await post(ours, FILE, boundary="b" * 300))["status"] == 400


async def test_bodies_other_than_uncompressed_forms_are_refused(ours: Ours) -> None:
    assert fault(await ours.http.post("/v1/files", json={"a": 1}), 415)
    assert (await post(ours, FILE + PURPOSE + END, **{"content-encoding": "gzip"}))["status"] == 415
    assert fault(await ours.http.post("/v1/uploads", json={}), 400)["message"].startswith("Uploads in parts")
    assert fault(await ours.http.post("/v1/uploads/upload_1/parts", json={}), 400)


async def test_without_a_url_a_large_file_gets_an_error_that_names_the_setting(ours: Ours) -> None:
    assert (await create(ours, bytes(MAX_IN_REDIS))).bytes == MAX_IN_REDIS
    with pytest.raises(openai.APIStatusError) as raised:
        await create(ours, bytes(MAX_IN_REDIS + 1))
    assert raised.value.status_code == 413
    assert "files.url" in raised.value.message


async def test_a_file_over_the_maximum_size_is_refused(start: Start, redis_url: str) -> None:
    ours = start(files__max_bytes="1KiB")
    await create(ours, bytes(1024))
    with pytest.raises(openai.APIStatusError) as raised:
        await create(ours, bytes(1025))
    assert raised.value.status_code == 413


async def test_files_are_stored_in_a_directory(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    ours = start(files__url=f"file://{directory}")
    content = bytes(range(256)) * 4096 * 12
    created = await create(ours, content)
    [data] = stored(directory)
    assert hashlib.sha256(data.read_bytes()).digest() == hashlib.sha256(content).digest()
    assert (await ours.client.files.content(created.id)).content == content
    data.unlink()
    with pytest.raises(openai.NotFoundError):
        await ours.client.files.content(created.id)
    await ours.client.files.delete(created.id)
    other = await create(ours)
    await ours.client.files.delete(other.id)
    assert stored(directory) == []


async def test_an_interrupted_upload_stores_nothing(start: Start, tmp_path: Path, redis_url: str) -> None:
    ours = start(files__url=f"file://{tmp_path}")

    async def broken() -> AsyncIterator[bytes]:
        yield PURPOSE + part('name="file"; filename="a.txt"', bytes(8 * 1024 * 1024))[:-2]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await post(ours, broken())
    with redis.Redis.from_url(redis_url) as server:
        while server.exists("rmw:{files}:due"):
            await asyncio.sleep(0.01)
        assert server.keys("rmw:{f*}:files") == []
    assert stored(tmp_path) == []


async def test_files_count_against_the_quota_of_their_owner(start: Start) -> None:
    ours = start(limits__stored_bytes="100KiB")
    first = await create(ours, bytes(60_000))
    with pytest.raises(openai.RateLimitError) as raised:
        await create(ours, bytes(60_000))
    assert raised.value.code == "storage_quota_exceeded"
    assert [one.id async for one in ours.client.files.list()] == [first.id]
    await ours.client.files.delete(first.id)
    await create(ours, bytes(60_000))


@pytest.mark.parametrize("settings", [{"files__enabled": False}, {"upstream__api": "responses"}])
async def test_files_that_the_upstream_serves_are_passed_on(
    start: Start, upstream: ScriptedUpstream, settings: dict[str, Any]
) -> None:
    upstream.pages["/v1/files"] = {"served": True}
    ours = start(**settings)
    assert (await ours.http.get("/v1/files")).json() == {"served": True}
    assert "/v1/files" not in (await ours.http.get("/openapi.json")).json()["paths"]


async def test_requests_without_an_accepted_key_are_refused(start: Start) -> None:
    ours = start(**KEYS)
    assert (await ours.http.get("/v1/files")).status_code == 401
    assert (await ours.http.get("/v1/files", headers=BEARER)).status_code == 200
