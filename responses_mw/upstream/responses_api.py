"""One answer of an upstream that speaks the Responses API itself: reads of the network in, its events out."""

from __future__ import annotations

from typing import Any

from ..errors import UpstreamError
from ..protocol.events import TERMINAL
from ..protocol.shortcut import Text
from ..protocol.sse import DONE, FrameTooLong
from ..protocol.types import Chunk
from .faults import from_frame, is_error
from .stream import ChatStream, json_object

_FINISHED = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ResponsesStream(ChatStream):
    """As ``ChatStream``, with events in place of chunks. A whole answer is the one event that would have ended its stream.

    ``done`` is True after an event that ends a response; nothing is read behind it.
    """

    def _take(self, data: bytes) -> list[Chunk | Text]:
        try:
            frames = self._decoder.feed(data) if data else self._decoder.flush()
        except FrameTooLong as error:
            raise UpstreamError(f"The upstream sent {error}.") from error
        if not data:
            self._is_over = True
        return [*self._decoded(frames)]

    def _decoded(self, frames: list[bytes]) -> list[Chunk]:
        events: list[Chunk] = []
        for frame in frames:
            if frame == DONE:
                self._is_over = True
                break
            try:
                events.append(_event(frame))
            except UpstreamError as fault:
                self._fault, self._is_over = fault, True
                break
            if events[-1].get("type") in TERMINAL:
                self.done = self._is_over = True
                break
        return events


def _event(data: bytes) -> dict[str, Any]:
    decoded = json_object(data)
    if decoded.get("object") == "response" and "type" not in decoded:
        return {"type": _FINISHED.get(str(decoded.get("status")), "response.failed"), "response": decoded}
    if decoded.get("type") == "error" or ("type" not in decoded and is_error(decoded)):
        raise from_frame(decoded)
    if "type" not in decoded:
        raise UpstreamError("The upstream's answer is no response.")
    return decoded
