"""Read the events of background responses from their logs, and those of other responses from their captures."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import orjson

from ..jobs import JobService
from ..protocol import sse
from ..state import Damaged, State
from ..state.jobs import fills_page
from ..telemetry.captures import CapturedEvent
from .live import RETRY
from .report import ResponseReport

MAX_EVENTS = 500
"""Maximum number of events on a page. The JSON of the events has all of them."""
_MAX_TEXT = 400


class ShownEvent(NamedTuple):
    """An event as shown on a page. `number` is its sequence number, and `text` a summary of its data.

    If `follows_gap`, events before it are missing.
    """

    number: int
    type: str
    text: str
    follows_gap: bool = False


async def read_events(state: State, report: ResponseReport) -> list[ShownEvent]:
    """Return the first events in the log of a background response, or an empty list if there is no log."""
    if report.record is None or not report.record.events:
        return []
    found: list[ShownEvent] = []
    number = -1
    try:
        while batches := await state.jobs.log(report.id, number):
            for event in (event for batch in batches for event in sse.decode(batch.data)):
                shown = shown_event(event)
                found.append(shown._replace(follows_gap=shown.number != number + 1))
                number = shown.number
                if len(found) == MAX_EVENTS:
                    return found
            if not fills_page(batches):
                break
    except (Damaged, ValueError):
        return found
    return found


def shown_events(captured: Sequence[CapturedEvent]) -> list[ShownEvent]:
    """Return the first captured events of a response that has no log."""
    found: list[ShownEvent] = []
    for event in captured[:MAX_EVENTS]:
        try:
            text = shown_event(orjson.loads(event.data)).text
        except ValueError:  # the JSON was cut
            text = event.data[:_MAX_TEXT]
        found.append(ShownEvent(event.number, event.type, text, bool(found) and event.number != found[-1].number + 1))
    return found


async def follow_events(jobs: JobService, document: dict[str, Any], after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events after number `after` as server-sent events for the page, and `end` when the response has ended."""
    yield RETRY
    async with aclosing(jobs.follow(document, after)) as batches:
        async for batch in batches:
            for event in sse.decode(batch.data):
                shown = shown_event(event)
                data = orjson.dumps({"number": shown.number, "type": shown.type, "text": shown.text})
                yield b"id: %d\ndata: %b\n\n" % (shown.number, data)
    yield b"event: end\ndata: end\n\n"


def shown_event(event: Mapping[str, Any]) -> ShownEvent:
    item, part = event.get("item"), event.get("part")
    text = event.get("delta") or event.get("text") or event.get("arguments")
    if text is None and isinstance(item, dict):
        text = " ".join(str(item[name]) for name in ("type", "name", "status") if item.get(name))
    if text is None and isinstance(part, dict):
        text = part.get("type")
    if text is None and isinstance(response := event.get("response"), dict):
        text = response.get("status")
    number = event.get("sequence_number")
    return ShownEvent(number if isinstance(number, int) else -1, str(event.get("type", "")), str(text or "")[:_MAX_TEXT])
