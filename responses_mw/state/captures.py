"""Store the latest captures: requests to the upstream for a response, and the upstream's answers.

A capture lies beside its response, and is deleted with it. A list of all captures limits their number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..lua import load
from ..tasks import by_size, in_background
from ..telemetry.captures import CAPTURES
from .client import Client
from .errors import Missing, StateUnavailable
from .schema import CAPTURE_LIST, pack, response_address, unpack

logger = logging.getLogger(__name__)

[_ADD] = load("state", "capture_add")

INTERVAL = 0.25
EXPIRY = 24 * 3600
"""Maximum lifetime of a capture in seconds."""


class Captures:
    """The captures of the deployment. `read` and `add` raise StateUnavailable if Redis fails."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @asynccontextmanager
    async def recording(self, *, maximum: int, seconds: int) -> AsyncIterator[None]:
        """Write the captures of this process until the context exits. The last `maximum` are kept, for at most `seconds`."""
        with CAPTURES.collecting():
            try:
                async with in_background(self._record(maximum, seconds)):
                    yield
            finally:
                await self._flush(maximum, seconds)

    async def _record(self, maximum: int, seconds: int) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            await self._flush(maximum, seconds)

    async def _flush(self, maximum: int, seconds: int) -> None:
        for response_id, text in CAPTURES.take():
            try:
                await self.add(response_id, text, maximum=maximum, seconds=seconds)
            except StateUnavailable as error:
                logger.debug("the capture of response %s is lost: %s", response_id, error.message)

    async def add(self, response_id: str, text: bytes, *, maximum: int, seconds: int) -> None:
        """Add a capture as JSON, and delete the oldest ones if there are more than `maximum`.

        Do nothing if the response was deleted in the meantime.
        """
        address, ms = response_address(response_id), min(seconds, EXPIRY) * 1000
        key, packed = address.capture, await by_size(len(text), pack, text)
        if not await self._client.script(_ADD, [key, address.tombstone], [packed, ms]):
            return
        *_, old = await self._client.pipeline(
            [
                ("ZADD", CAPTURE_LIST, int(time.time() * 1000), key),
                ("PEXPIRE", CAPTURE_LIST, ms),
                ("ZRANGE", CAPTURE_LIST, 0, -maximum - 1),
            ]
        )
        if old:
            names = [name.decode() for name in old]
            await self._client.pipeline([*[("DEL", name) for name in names], ("ZREM", CAPTURE_LIST, *names)])

    async def read(self, response_id: str) -> dict[str, Any] | None:
        """Return the capture of a response, or None if there is none. Raises Damaged if it is damaged."""
        try:
            key = response_address(response_id).capture
        except Missing:
            return None
        blob = await self._client.command("GET", key)
        if blob is None:
            return None
        captured = unpack(blob)
        if not _is_capture(captured):
            raise self._client.damage(key, "it is not a capture")
        found: dict[str, Any] = captured
        return found


def _is_capture(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    turns, events = value.get("turns"), value.get("events", [])
    return isinstance(turns, list) and isinstance(events, list) and all(map(_is_turn, turns)) and all(map(_is_event, events))


def _is_turn(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("number", 1), int)
        and isinstance(value.get("status"), int | None)
        and isinstance(value.get("seconds"), float | int | None)
    )


def _is_event(value: Any) -> bool:
    match value:
        case [int(), int(), int(), int() | float() | None, str(), str()]:
            return True
    return False
