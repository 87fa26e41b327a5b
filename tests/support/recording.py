"""An upstream at the level of bytes, which parses requests as strictly as RFC 9112 allows and records them."""

from __future__ import annotations

import asyncio
import re
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from dataclasses import dataclass, field

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([^\x00-\x20\x7f]+) HTTP/1\.1")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*?)[ \t]*")


@dataclass
class Recorded:
    """A request as received. It is `whole` once the body that its head announced is complete."""

    method: bytes
    target: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes = b""
    whole: bool = False

    def values(self, name: bytes) -> list[bytes]:
        return [value for field_name, value in self.fields if field_name == name]


@dataclass
class RecordingUpstream:
    """Answers each whole request with 200, or with 401 before reading the body if the target contains `early`.

    `faults` lists input that no upstream should ever receive.
    """

    requests: list[Recorded] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    url: str = ""
    _server: asyncio.Server | None = None
    _serving: dict[asyncio.Task[None], StreamWriter] = field(default_factory=dict)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Abort all connections, and wait for their tasks, which nobody would await when the event loop ends."""
        assert self._server is not None
        self._server.close()
        for writer in self._serving.values():
            writer.transport.abort()
        await asyncio.gather(*self._serving)

    def forget(self) -> None:
        self.requests, self.faults = [], []

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.create_task(self._connected(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while await self._serve(reader, writer):
                pass
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except IncompleteReadError as error:
            if error.partial:
                self.faults.append(f"a torn head: {error.partial!r}")
            return False
        request = self._parse(head)
        if request is None:
            self.faults.append(f"not a head: {head!r}")
            return False
        self.requests.append(request)
        is_early = b"early" in request.target
        if is_early:
            self._answer(request, writer, b"401 Early")
        try:
            await self._read(request, reader)
        except (IncompleteReadError, ConnectionError):
            return False
        except ValueError as error:
            self.faults.append(f"{error}: {head!r}")
            return False
        request.whole = True
        if not is_early:
            self._answer(request, writer, b"200 OK")
        return True

    def _parse(self, head: bytes) -> Recorded | None:
        line, *rest = head[:-4].split(b"\r\n")
        matched, fields = _LINE.fullmatch(line), [_FIELD.fullmatch(each) for each in rest]
        if matched is None or None in fields:
            return None
        return Recorded(matched[1], matched[2], [(each[1].lower(), each[2]) for each in fields if each])

    async def _read(self, request: Recorded, reader: StreamReader) -> None:
        lengths, codings = request.values(b"content-length"), request.values(b"transfer-encoding")
        if len(lengths) + len(codings) > 1 or any(coding != b"chunked" for coding in codings):
            raise ValueError("ambiguous framing")
        if codings:
            await self._read_chunks(request, reader)
        elif lengths:
            if not re.fullmatch(rb"[0-9]+", lengths[0]):
                raise ValueError("not a length")
            left = int(lengths[0])
            while left:
                data = await reader.read(left)
                if not data:
                    raise IncompleteReadError(b"", left)
                request.body += data
                left -= len(data)

    async def _read_chunks(self, request: Recorded, reader: StreamReader) -> None:
        while True:
            line = await reader.readuntil(b"\r\n")
            if not re.fullmatch(rb"[0-9a-f]+\r\n", line):
                raise ValueError(f"not a chunk's size: {line!r}")
            size = int(line, 16)
            data = await reader.readexactly(size + 2)
            if data[-2:] != b"\r\n":
                raise ValueError("a chunk without its end")
            if not size:
                return
            request.body += data[:-2]

    def _answer(self, request: Recorded, writer: StreamWriter, status: bytes) -> None:
        body = b'{"seen": true}'
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
        if request.method != b"HEAD":
            writer.write(body)
