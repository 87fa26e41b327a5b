"""The frames of a WebSocket (OpenAI reference, "WebSocket mode").

1. A client's frame is an object with a `type`. A `response.create` has the members of the body of `POST /v1/responses`,
   `generate` (false: create it without calling the model) and `stream_id` (its lane).
2. A server's frame is the data of one event, with the `stream_id` of its lane, if any. There is no `[DONE]`.
3. An error is `{"type": "error", "status", "error": {"type", "code", "message", "param"}}`. It is sent in place of a response;
   a response that has started ends with `response.failed`. The specification requires a code; the default is the type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import APIError, BadRequest, TooLarge
from ...protocol.request import checks
from ...protocol.request.checks import RequestLimits, decode
from ...protocol.response.events import Event

LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
CREATE, STEER = "response.create", "response.steer"
_NO_BODY = frozenset({"type", "generate", "stream_id"})


@dataclass(frozen=True, slots=True)
class Create:
    """A `response.create`. `body` is the body of the equivalent POST; `size` is the frame's size in bytes."""

    body: dict[str, Any]
    lane: str | None
    generate: bool
    size: int

    @property
    def parent(self) -> str | None:
        """The id of the previous response, if any."""
        parent = self.body.get("previous_response_id")
        return parent if isinstance(parent, str) else None


def decode_frame(data: bytes, limits: RequestLimits, *, maximum: int) -> dict[str, Any]:
    """Decode the object in a frame. Raises `BadRequest`, or `TooLarge` beyond `maximum` bytes or the `limits`."""
    if len(data) > maximum:
        raise TooLarge(f"The frame is larger than {maximum} bytes.")
    frame = decode(data, limits, "the JSON of your frame")
    if not isinstance(frame, dict):
        raise BadRequest(f"A frame must be a JSON object, but is {checks.kind_of(frame)}.", code="invalid_type")
    return frame


def kind_of(frame: dict[str, Any]) -> str:
    """Return the type of a frame. Raises `BadRequest` for an unknown one."""
    if frame.get("type") is None:
        checks.missing("type")
    return checks.one_of(frame["type"], "type", {CREATE, STEER})


def lane_of(frame: dict[str, Any]) -> str | None:
    """Return the lane of a frame. Raises `BadRequest` for an invalid name."""
    lane = frame.get("stream_id")
    if lane is None:
        return None
    if not LANE.fullmatch(checks.string(lane, "stream_id")):
        message = "Invalid 'stream_id'. Expected 1 to 256 ASCII letters, digits, underscores, hyphens or periods."
        raise BadRequest(message, param="stream_id", code="invalid_value")
    return str(lane)


def create(frame: dict[str, Any], lane: str | None, size: int) -> Create:
    """Return the `response.create` of a frame. Raises `BadRequest` for members that are invalid on a WebSocket.

    The body is parsed when the response starts.
    """
    generate = frame.get("generate")
    if generate is not None:
        checks.boolean(generate, "generate")
    if frame.get("background"):
        checks.unsupported("background", "responses on a WebSocket run in the foreground; create it over HTTP.")
    body = {name: value for name, value in frame.items() if name not in _NO_BODY}
    return Create({**body, "stream": True}, lane, generate is not False, size)


def error_text(error: APIError, lane: str | None) -> str:
    """Return the frame for an error. It includes the error's HTTP headers, such as `retry-after`."""
    members: dict[str, Any] = error.body()["error"]
    members["code"] = members["code"] or members["type"]
    if error.headers:
        members["headers"] = error.headers
    return _text({"type": "error", "status": error.status, "error": members}, lane)


def steer_failed_text(frame: dict[str, Any], lane: str | None) -> str:
    """Return the frame that refuses a `response.steer`. It repeats the input, so that the client can send it again."""
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "This server cannot steer a running response. Send the input in a response.create when it has ended.",
    }
    steer = {name: frame.get(name) for name in ("input", "previous_response_id")}
    return _text({"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}, lane)


def _text(members: dict[str, Any], lane: str | None) -> str:
    return orjson.dumps(members if lane is None else {**members, "stream_id": lane}).decode()


def event_text(event: Event, lane: str | None) -> str:
    """Return the frame for an event of a response in `lane`."""
    return _text(event.data, lane)
