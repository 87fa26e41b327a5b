"""WebSocket connections to a `responses-mw` server."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import connect

from tests.support.oracle import Event
from tests.support.replay import TERMINAL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from websockets.asyncio.client import ClientConnection

    from tests.support.servers import Ours

UVICORN = {"ws": "websockets-sansio", "ws_per_message_deflate": False}
BODY = {"type": "response.create", "model": "tiny"}


class Socket:
    """A connection that sends and receives JSON."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **frame: Any) -> None:
        await self.connection.send(json.dumps(frame))

    async def create(self, text: str | list[Any] = "Hi", **members: Any) -> None:
        await self.send(**{**BODY, "input": text, **members})

    async def receive(self) -> Event:
        data = await self.connection.recv()
        assert isinstance(data, str), "events come in text frames"
        event: Event = json.loads(data)
        return event

    async def events(self) -> list[Event]:
        """Return all events up to the end of a response, or an error in its place."""
        events = [await self.receive()]
        while events[-1]["type"] not in TERMINAL and events[-1]["type"] != "error":
            events.append(await self.receive())
        return events

    async def response(self, text: str | list[Any] = "Hi", **members: Any) -> dict[str, Any]:
        """Create a response, which must complete, and return it."""
        await self.create(text, **members)
        last = (await self.events())[-1]
        assert last["type"] == "response.completed", last
        return dict(last["response"])

    async def error(self, text: str | list[Any] = "Hi", **members: Any) -> Event:
        """Create a response, which must be refused, and return the error."""
        await self.create(text, **members)
        events = await self.events()
        assert [event["type"] for event in events] == ["error"]
        return events[0]


@asynccontextmanager
async def opened(
    ours: Ours, path: str = "/v1/responses", key: str = "key", headers: Mapping[str, str] = {}, **options: Any
) -> AsyncIterator[Socket]:
    headers = {"authorization": f"Bearer {key}", **headers}
    async with connect(
        ours.url.replace("http", "ws", 1) + path, additional_headers=headers, proxy=None, **options
    ) as connection:
        yield Socket(connection)
