"""Capture the events of a stream for the inspector, if the client's request asked for that."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..protocol.types import Event
from ..telemetry.captures import CAPTURES
from ..telemetry.context import RequestContext, current_request


def capture_events(events: AsyncGenerator[list[Event], None]) -> AsyncGenerator[list[Event], None]:
    """Return `events`, or an iterator that also captures them if the current request asked for that."""
    request = current_request()
    if request is None or not request.is_captured or not CAPTURES.is_on:
        return events
    return _captured(events, request)


async def _captured(events: AsyncGenerator[list[Event], None], request: RequestContext) -> AsyncGenerator[list[Event], None]:
    async with aclosing(events):
        async for batch in events:
            if request.capture is not None:  # it exists once the run is prepared, unless the response is not stored
                for event in batch:
                    request.capture.add_event(event.type, event.data)
            yield batch
