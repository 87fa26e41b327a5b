"""From a log of events back to the document: what a run that lost its worker, or was cancelled, has come to."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from .document import whole
from .events import Emitter, Event, terminal_type
from .output import Output
from .types import Document


def fold(created: Document, log: Iterable[bytes]) -> Document:
    """The document that was ``created`` with what the batches of its ``log`` (raw server-sent events) brought since. An item
    that was not done is ``incomplete``."""
    output = Output([])
    for batch in log:
        for frame in batch.split(b"\n\n"):
            if frame:
                output.take(orjson.loads(frame.partition(b"\ndata: ")[2]))
    output.cut()
    return {**created, "output": output.items}


def end(document: Document, number: int) -> Event:
    """The terminal event, with that number, of a run that ended with ``document``."""
    emitter = Emitter(number)
    emitter.emit(terminal_type(document), response=whole(document))
    return emitter.drain()[0]
