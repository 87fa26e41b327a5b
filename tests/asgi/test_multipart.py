"""Forms are read independently of how the body is split, and malformed ones are refused as client errors."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request

from responses_mw.asgi.multipart import FormReader
from responses_mw.errors import APIError

if TYPE_CHECKING:
    from starlette.types import Message

CONTENT = b"\r\n--\r\n--b\r--bx" + bytes(range(256))  # similar to a boundary
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\ncontent-type: text/plain\r\n\r\n'
    + CONTENT.replace(b"\r\n--b", b"\r\n--c")
    + b"\r\n--b--\r\n"
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def read(chunks: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    """Return the name, file name and data of each part."""
    messages: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b""})

    async def receive() -> Message:
        return messages.pop(0)

    async def parts() -> list[tuple[str, str | None, bytes]]:
        scope: dict[str, Any] = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=b")]}
        form = FormReader(Request(scope, receive))
        return [(name, filename, b"".join([data async for data in form.data()])) async for name, filename in form]

    return asyncio.run(parts())


@given(st.lists(st.integers(0, 1000), max_size=40))
@example(list(range(len(FORM))))
def test_the_parts_do_not_depend_on_how_the_body_is_split(cuts: list[int]) -> None:
    assert read(pieces(FORM, cuts)) == read([FORM])


def test_names_and_data_of_parts_are_read() -> None:
    assert read([FORM]) == [("purpose", None, b"user_data"), ("file", "a.txt", CONTENT.replace(b"\r\n--b", b"\r\n--c"))]


@given(st.integers(0, len(FORM) - 1), st.binary(max_size=20), st.integers(0, 50), st.lists(st.integers(0, 1000), max_size=3))
def test_a_damaged_form_is_read_or_refused(at: int, inserted: bytes, removed: int, cuts: list[int]) -> None:
    damaged = FORM[:at] + inserted + FORM[at + removed :]
    try:
        read(pieces(damaged, cuts))
    except APIError as error:
        assert error.cause == "client"
        assert error.status in (400, 413, 415)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read([data])
    except APIError as error:
        assert error.cause == "client"
