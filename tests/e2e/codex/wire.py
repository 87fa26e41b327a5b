"""A relay between Codex and our server. It records traffic, and breaks or stalls the connection if a case asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_READ = 65536
_WEBSOCKET, _POST = b"GET /v1/responses ", b"POST /v1/responses "
_SEARCH = b'"type":"web_search"'


class Wire:
    """A relay to `port`. `websockets` and `posts` are what was opened and asked since `begin`; `search` says whether an
    answer echoed a web search among the tools.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.begin(None)

    def begin(self, breaks_at: bytes | None, *, holds: bool = False) -> None:
        """From now on the first answer that has `breaks_at` in it is cut off there; or nothing more of it arrives, if the
        wire `holds`."""
        self.websockets = self.posts = 0
        self.search = False
        self.breaks_at = breaks_at
        self._holds = holds

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Relay data to `url`."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()

    async def _relay(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            ours, to_ours = await asyncio.open_connection("127.0.0.1", self._port)
            ways = {
                asyncio.create_task(self._ask(client, to_ours)),
                asyncio.create_task(self._answer(ours, to_client)),
            }
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_ours.close()
        to_client.close()

    async def _ask(self, client: asyncio.StreamReader, to_ours: asyncio.StreamWriter) -> None:
        while data := await client.read(_READ):
            self.websockets += data.startswith(_WEBSOCKET)
            self.posts += data.startswith(_POST)
            to_ours.write(data)
            await to_ours.drain()

    async def _answer(self, ours: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        end = b""
        while data := await ours.read(_READ):
            self.search |= _SEARCH in end + data
            end = data[-len(_SEARCH) :]
            if self.breaks_at and self.breaks_at in data:
                to_client.write(data[: data.index(self.breaks_at)])
                self.breaks_at = None
                while self._holds and await ours.read(_READ):
                    pass
                return
            to_client.write(data)
            await to_client.drain()
