"""Decode the answer of an upstream that has its own Responses API from network reads to events."""

from __future__ import annotations

from typing import Any

from ..errors import UpstreamError
from ..protocol.response.events import TERMINAL
from ..protocol.types import Chunk
from .decoding import json_object
from .errors import find_error, from_frame
from .stream import ChatStream

_FINISHED = {"completed": "response.completed", "incomplete": "response.incomplete"}
_NO_RESPONSE = "The upstream's answer is not a response."


class ResponsesStream(ChatStream):
    """A `ChatStream` that returns the events of a Responses API instead of chat chunks.

    If the upstream answers with one JSON document instead of a stream, the document is returned as a terminal event. After a
    terminal event, `done` is true and nothing more is read.
    """

    _reads_texts = False

    def _parsed(self, frame: bytes) -> dict[str, Any]:
        event = json_object(frame)
        kind = event.get("type")
        if kind is None and (event.get("object") == "response" or isinstance(event.get("output"), list)):
            return {"type": _FINISHED.get(str(event.get("status")), "response.failed"), "response": event}
        if kind in (None, "error") and (error := find_error(event)):
            raise from_frame(error, is_first=not self._has_begun)
        if not isinstance(kind, str):
            raise UpstreamError(_NO_RESPONSE)
        return event

    def _is_last(self, chunk: Chunk | None) -> bool:
        return chunk is not None and chunk["type"] in TERMINAL

    def _whole(self, body: bytes) -> dict[str, Any]:
        event = self._parsed(body)
        if not self._is_last(event):
            raise UpstreamError(_NO_RESPONSE)
        return event
