"""Capture the bytes of the upstream's answer, if the client's request asked for that."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from ..telemetry.captures import CAPTURES, CapturedTurn
from ..telemetry.context import current_request


class _CapturedStream(httpx.AsyncByteStream):
    """A stream that also passes its bytes to `turn`."""

    def __init__(self, stream: httpx.AsyncByteStream, turn: CapturedTurn) -> None:
        self._stream = stream
        self._turn = turn

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            self._turn.receive(data)
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


def capture_answer(response: httpx.Response) -> None:
    """Capture the status and the bytes of `response` for the current request, if it asked for that."""
    if not CAPTURES.is_on:
        return
    request = current_request()
    turn = request.capture.open_turn if request is not None and request.capture is not None else None
    if turn is None or not isinstance(response.stream, httpx.AsyncByteStream):
        return
    turn.status = response.status_code
    response.stream = _CapturedStream(response.stream, turn)
    response.extensions.pop("divert", None)  # it would make texts bypass the stream
