"""Read `multipart/form-data` part by part, without holding a part in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from ..errors import BadRequest, TooLarge, UnsupportedMediaType
from .requests import next_message

MAX_PARTS = 64
_MAX_HEADER_BYTES = 8 * 1024  # total size of the headers of a part
_MAX_FIELD_BYTES = 16 * 1024
UPLOAD_TIMEOUT = 3000.0
"""Maximum number of seconds for receiving a form."""


class PartHead(NamedTuple):
    """The name of a part, and the file name if the part is a file."""

    name: str
    filename: str | None


class _End(NamedTuple):
    """The end of a part."""


class FormReader:
    """Iterates over the parts of a form. Read each part with `data` or `text` before you go on to the next part.

    The iteration and these methods raise:

    - `UnsupportedMediaType` if the body is not `multipart/form-data`, or is compressed
    - `BadRequest` if the form is malformed or incomplete, or `TooLarge` if it has too many parts or headers
    - `RequestTimeout` if the client sends too slowly, or `ClientDisconnect` if it disconnects
    """

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._deadline = asyncio.get_running_loop().time() + UPLOAD_TIMEOUT
        self._events: deque[PartHead | bytes | _End] = deque()
        self._headers: list[tuple[bytearray, bytearray]] = []
        self._parts, self._is_complete, self._has_ended = 0, False, False
        callbacks = {
            "on_part_begin": self._begin_part,
            "on_header_begin": lambda: self._headers.append((bytearray(), bytearray())),
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_headers_finished": self._finish_headers,
            "on_part_data": lambda data, start, end: self._events.append(data[start:end]),
            "on_part_end": lambda: self._events.append(_End()),
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(_boundary(request), callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise _malformed(error) from None

    async def __aiter__(self) -> AsyncIterator[PartHead]:
        while (event := await self._next()) is not None:
            if isinstance(event, PartHead):
                yield event

    async def data(self) -> AsyncIterator[bytes]:
        """Yield the data of the current part in chunks."""
        while isinstance(event := await self._next(), bytes):
            yield event

    async def text(self, name: str) -> str:
        """Return the data of the current part as text. `name` is the name of the part in errors."""
        text = bytearray()
        async for chunk in self.data():
            text += chunk
            if len(text) > _MAX_FIELD_BYTES:
                raise TooLarge(f"'{name[:64]}' is longer than {_MAX_FIELD_BYTES} bytes.", param=name[:64])
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"Invalid '{name[:64]}': expected UTF-8.", param=name[:64], code="invalid_value") from None

    async def _next(self) -> PartHead | bytes | _End | None:
        """Return the next event, or None at the end of the form. The rest of the body is read and ignored."""
        while not self._events:
            if self._is_complete:
                if not self._has_ended:
                    raise BadRequest("The form is incomplete: its last boundary is missing.", code="invalid_form")
                return None
            message = await next_message(self._receive, self._deadline)
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._is_complete = not message.get("more_body", False)
            try:
                self._parser.write(message.get("body", b""))
            except FormParserError as error:
                raise _malformed(error) from None
        return self._events.popleft()

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise TooLarge(f"The form has more than {MAX_PARTS} parts.")
        self._headers.clear()

    def _add_header(self, which: int, data: bytes) -> None:
        self._headers[-1][which].extend(data)
        if sum(len(name) + len(value) for name, value in self._headers) > _MAX_HEADER_BYTES:
            raise TooLarge(f"The headers of a part are longer than {_MAX_HEADER_BYTES} bytes.")

    def _finish_headers(self) -> None:
        headers = {bytes(name).lower(): bytes(value) for name, value in self._headers}
        kind, options = parse_options_header(headers.get(b"content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise BadRequest("A part of the form has no name.", code="invalid_form")
        if headers.get(b"content-transfer-encoding", b"binary").lower() not in (b"binary", b"8bit", b"7bit"):
            raise UnsupportedMediaType("Parts with a content-transfer-encoding are not supported.")
        filename = options.get(b"filename")
        name = options[b"name"].decode(errors="replace")
        self._events.append(PartHead(name, filename.decode(errors="replace") if filename is not None else None))

    def _end(self) -> None:
        self._has_ended = True


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise UnsupportedMediaType("Send the file as multipart/form-data.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("A form must not be compressed: remove the content-encoding.")
    return options[b"boundary"]


def _malformed(error: FormParserError) -> BadRequest:
    return BadRequest(f"The form is malformed: {str(error)[:200]}", code="invalid_form")
