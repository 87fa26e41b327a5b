"""Compressed request bodies: which encodings are read, and what bounds their size."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import tracemalloc
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.asgi.content_coding import PIECE, content_coding, decoded
from responses_mw.asgi.requests import UNCOUNTED
from responses_mw.errors import BadRequest, TooLarge
from tests.support.scripted import HELLO, completion

from .test_errors import fault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

BODY = {"model": "tiny", "input": "hi"}
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.ZstdCompressor().compress,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}
CODING = pytest.mark.parametrize("coding", COMPRESSED)


def encoded(coding: str, body: Any = BODY) -> bytes:
    return COMPRESSED[coding](json.dumps(body).encode())


def decode(coding: str, data: bytes, maximum: int = 2**30) -> bytes:
    named = content_coding([coding])
    assert named is not None
    return b"".join(decoded(data, named, maximum))


async def send(ours: Ours, path: str, content: bytes, *codings: str) -> Any:
    return await ours.http.post(path, content=content, headers=[("content-encoding", coding) for coding in codings])


@CODING
@pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])
async def test_a_compressed_body_is_read(ours: Ours, upstream: ScriptedUpstream, coding: str, streamed: bool) -> None:
    if streamed:
        upstream.stream(*HELLO)
    else:
        upstream.whole(completion({"content": "Hello"}))
    response = await send(ours, "/v1/responses", encoded(coding, {**BODY, "stream": streamed}), coding)
    assert response.status_code == 200
    assert "Hello" in response.text
    assert upstream.requests[0].json["messages"] == [{"role": "user", "content": "hi"}]


async def test_every_route_with_a_body_reads_compressed_bodies(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    upstream.whole(completion({"content": "Hello"}))
    made = await send(ours, "/v1/conversations", encoded("zstd", {"metadata": {"a": "b"}}), "zstd")
    assert made.json()["metadata"] == {"a": "b"}
    path = f"/v1/conversations/{made.json()['id']}"
    for route, body in (
        (path, {"metadata": {}}),
        (f"{path}/items", {"items": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses/compact", BODY),
        ("/v1/responses/input_tokens", BODY),
    ):
        response = await send(ours, route, encoded("gzip", body), "gzip")
        assert response.status_code == 200, (route, response.text)


@pytest.mark.parametrize("codings", [["identity"], [""], ["IDENTITY, identity"], ["identity", "identity"]])
async def test_identity_means_that_the_body_is_not_encoded(ours: Ours, upstream: ScriptedUpstream, codings: list[str]) -> None:
    upstream.whole(completion({"content": "Hello"}))
    response = await send(ours, "/v1/responses", json.dumps(BODY).encode(), *codings)
    assert response.status_code == 200


@pytest.mark.parametrize("codings", [["ZStd"], ["identity , zstd"], ["identity", "zstd"]])
async def test_the_name_of_an_encoding_is_read_as_http_defines_it(
    ours: Ours, upstream: ScriptedUpstream, codings: list[str]
) -> None:
    upstream.whole(completion({"content": "Hello"}))
    assert (await send(ours, "/v1/responses", encoded("zstd"), *codings)).status_code == 200


@pytest.mark.parametrize("codings", [["br"], ["gzip, zstd"], ["gzip", "gzip"], ["x" * 1000]])
async def test_an_unknown_encoding_and_several_are_a_415_that_names_the_supported_ones(
    ours: Ours, upstream: ScriptedUpstream, codings: list[str]
) -> None:
    response = await send(ours, "/v1/responses", b"x", *codings)
    members = fault(response, 415)
    assert members["code"] == "unsupported_encoding"
    assert codings[0][:16] in members["message"]
    assert len(members["message"]) < 300
    assert response.headers["accept-encoding"] == "zstd, gzip, deflate"
    assert upstream.requests == []


@CODING
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data[:-1], id="truncated by a byte"),
        pytest.param(lambda data: data[: len(data) // 2], id="truncated in the middle"),
        pytest.param(lambda data: data + b"x", id="followed by a byte"),
        pytest.param(lambda data: data + b"garbage" * 20, id="followed by garbage"),
        pytest.param(lambda data: data + data[:5], id="followed by a truncated frame"),
        pytest.param(lambda _data: json.dumps(BODY).encode(), id="not encoded"),
    ],
)
async def test_a_body_that_does_not_match_its_encoding_is_a_400(
    ours: Ours, upstream: ScriptedUpstream, coding: str, spoil: Callable[[bytes], bytes]
) -> None:
    members = fault(await send(ours, "/v1/responses", spoil(encoded(coding)), coding), 400)
    assert members["code"] == "invalid_encoding"
    assert upstream.requests == []


async def test_an_empty_compressed_body_is_invalid_json(ours: Ours) -> None:
    assert fault(await send(ours, "/v1/responses", b"", "zstd"), 400)["code"] == "invalid_json"


@CODING
def test_several_frames_are_one_body(coding: str) -> None:
    compress = COMPRESSED[coding]
    pieces = [b"one", b"", b"two" * 100_000, b"three"]
    assert decode(coding, b"".join(map(compress, pieces))) == b"".join(pieces)


@CODING
@given(data=st.binary(max_size=5000), repeats=st.integers(1, 200))
def test_decoding_restores_what_was_encoded(coding: str, data: bytes, repeats: int) -> None:
    assert decode(coding, COMPRESSED[coding](data * repeats)) == data * repeats


@CODING
@given(data=st.binary(max_size=300))
def test_any_bytes_decode_or_are_a_400(coding: str, data: bytes) -> None:
    with suppress(BadRequest):
        decode(coding, data, maximum=2**20)


@CODING
@given(size=st.integers(0, 3 * PIECE), maximum=st.integers(0, 3 * PIECE))
def test_the_limit_is_exact(coding: str, size: int, maximum: int) -> None:
    data = COMPRESSED[coding](bytes(size))
    if size <= maximum:
        assert len(decode(coding, data, maximum)) == size
    else:
        with pytest.raises(TooLarge):
            decode(coding, data, maximum)


def rle_bomb() -> bytes:
    """A zstd frame of 64 KiB whose blocks of 4 bytes each become 128 KiB."""
    block = ((128 * 1024) << 3 | 1 << 1).to_bytes(3, "little") + b" "
    return b"\x28\xb5\x2f\xfd\x00\x68" + block * 16_000


@pytest.mark.parametrize(
    ("coding", "bomb"),
    [("zstd", rle_bomb), ("zstd", lambda: zstandard.compress(bytes(2**28))), ("gzip", lambda: gzip.compress(bytes(2**28)))],
    ids=["zstd blocks", "zstd", "gzip"],
)
def test_a_bomb_is_refused_without_decoding_it(coding: str, bomb: Callable[[], bytes]) -> None:
    data = bomb()
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decode(coding, data, maximum=2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


async def test_the_size_limit_applies_to_the_decompressed_body(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(limits__max_request_bytes=100_000)
    fitting, too_large = ({**BODY, "input": "x" * size} for size in (99_000, 100_000))
    upstream.whole(completion({"content": "Hello"}))
    assert (await send(ours, "/v1/responses", encoded("zstd", fitting), "zstd")).status_code == 200
    members = fault(await send(ours, "/v1/responses", encoded("zstd", too_large), "zstd"), 413)
    assert members["code"] == "request_too_large"
    assert len(upstream.requests) == 1


async def test_decompressed_bytes_count_towards_the_memory_of_received_bodies(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(limits__max_request_bytes=4 * UNCOUNTED, limits__memory_bytes=1)
    large = json.dumps({**BODY, "temperature": "hot", "input": "x" * (3 * UNCOUNTED)}).encode()
    sent, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield large[:-1]
        sent.set()
        await go_on.wait()
        yield large[-1:]

    first = asyncio.create_task(ours.http.post("/v1/responses", content=slowly()))
    await sent.wait()
    async with asyncio.timeout(60):
        while (refused := await send(ours, "/v1/responses", gzip.compress(large), "gzip")).status_code != 503:
            await asyncio.sleep(0.02)  # the first body is still being received
    assert refused.json()["error"]["code"] == "service_unavailable"
    go_on.set()
    assert (await first).status_code == 400
    for _ in range(3):  # bodies that have been read no longer count
        assert (await send(ours, "/v1/responses", gzip.compress(large), "gzip")).status_code == 400


@CODING
async def test_a_body_of_the_maximum_size_that_cannot_be_compressed_fits_in_the_memory(start: Start, coding: str) -> None:
    size = 4 * UNCOUNTED
    ours = start(limits__max_request_bytes=size, limits__memory_bytes=1)
    body = json.dumps({"temperature": "hot", **BODY, "input": random.Random(1).randbytes(size).hex()})[: size - 2000]
    compressed = COMPRESSED[coding](f'{body}"}}'.encode())
    assert fault(await send(ours, "/v1/responses", compressed, coding), 400)["param"] == "temperature"


async def test_many_large_compressed_bodies_are_read_at_the_same_time(ours: Ours, upstream: ScriptedUpstream) -> None:
    body = {**BODY, "temperature": "hot", "input": "x" * (4 * PIECE)}
    codings = ["zstd", "gzip", "deflate"] * 4
    answers = await asyncio.gather(*(send(ours, "/v1/responses", encoded(coding, body), coding) for coding in codings))
    assert [fault(answer, 400)["param"] for answer in answers] == ["temperature"] * 12


async def test_a_body_that_is_passed_on_stays_compressed(ours: Ours, upstream: ScriptedUpstream) -> None:
    content = encoded("gzip", {"a": 1})
    await send(ours, "/v1/embeddings", content, "gzip")
    assert upstream.visits[-1].body == content
    assert upstream.visits[-1].headers["content-encoding"] == "gzip"
