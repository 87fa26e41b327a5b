"""Decode compressed request bodies (RFC 9110, section 8.4.1) in pieces, so that a small body cannot expand without limit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import zstandard

from ..errors import BadRequest, TooLarge, UnsupportedMediaType

PIECE = 256 * 1024
"""Minimum size in bytes of the pieces of a decoded body, except for the last one."""
_MAX_WINDOW = 8 * 1024 * 1024  # bytes; senders must not use a larger window (RFC 9659)


class Decoder(Protocol):
    """Decodes one frame, with the interface of `zlib.decompressobj`."""

    def decompress(self, data: bytes, /) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


class ContentCoding(NamedTuple):
    """`step` is the number of bytes to decode at a time. Their output has about 2 MiB at most."""

    decoder: Callable[[], Decoder]
    step: int


def _zstd() -> Decoder:
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()


_GZIP = ContentCoding(partial(zlib.decompressobj, zlib.MAX_WBITS | 16), 2048)  # 1 byte becomes up to 1,032
_CODINGS = {
    "deflate": ContentCoding(zlib.decompressobj, 2048),
    "gzip": _GZIP,
    "x-gzip": _GZIP,
    "zstd": ContentCoding(_zstd, 64),  # 4 bytes become up to 128 KiB
}
_ACCEPTED = "zstd, gzip, deflate"


def content_coding(headers: Iterable[str]) -> ContentCoding | None:
    """Return the coding that the `Content-Encoding` headers name, or None if the body is not encoded.

    Raises `UnsupportedMediaType` if they name an unknown coding, or more than one.
    """
    named = [name for header in headers for part in header.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not named:
        return None
    if len(named) > 1 or named[0] not in _CODINGS:
        shown = ", ".join(named)[:64]
        message = f"The content-encoding '{shown}' of the request body is not supported. Use one of: {_ACCEPTED}."
        raise UnsupportedMediaType(message, code="unsupported_encoding", headers={"accept-encoding": _ACCEPTED})
    return _CODINGS[named[0]]


def decoded(data: bytes, coding: ContentCoding, maximum: int) -> Iterator[bytes]:
    """Yield the decoded `data` in pieces.

    Raises `BadRequest` if the data is invalid or incomplete, or `TooLarge` if it decodes to more than `maximum` bytes.
    """
    pieces, waiting, size = list[bytes](), 0, 0
    for piece in _steps(data, coding):
        pieces.append(piece)
        waiting += len(piece)
        size += len(piece)
        if size > maximum:
            raise TooLarge(f"The decompressed request body is larger than {maximum} bytes.")
        if waiting >= PIECE:
            yield b"".join(pieces)
            pieces, waiting = [], 0
    yield b"".join(pieces)


def _steps(data: bytes, coding: ContentCoding) -> Iterator[bytes]:
    """Yield the output of each step. A body may have several frames."""
    position = 0
    while position < len(data):
        decoder = coding.decoder()
        while not decoder.eof:
            if position == len(data):
                raise _invalid("it is incomplete")
            end = min(position + coding.step, len(data))
            try:
                yield decoder.decompress(data[position:end])
            except (zlib.error, zstandard.ZstdError) as error:
                raise _invalid(str(error)) from None
            position = end
        position -= len(decoder.unused_data)


def _invalid(why: str) -> BadRequest:
    return BadRequest(f"The request body does not match its content-encoding: {why}.", code="invalid_encoding")
