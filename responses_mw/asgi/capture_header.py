"""The header with which a request asks for a capture of its requests to the upstream and their answers."""

from __future__ import annotations

from starlette.datastructures import Headers

from ..errors import BadRequest
from ..telemetry.captures import CAPTURES, HEADER

_VALUES = {"1": True, "true": True, "0": False, "false": False}


def asks_for_capture(headers: Headers) -> bool:
    """Return whether the `headers` ask for a capture. Raises `BadRequest` if the value of the header is unknown."""
    value = headers.get(HEADER)
    if value is None:
        return False
    if (asks := _VALUES.get(value.strip().lower())) is None:
        raise BadRequest(f"The header '{HEADER}' must be 1 or 0.", param=HEADER, code="invalid_value")
    return asks


def capture_status(*, stored: bool) -> str:
    """Return the value of the response header for a request that asks for a capture. `stored` is the request's `store`."""
    if not CAPTURES.is_on:
        return "off"
    return "on" if stored else "not-stored"
