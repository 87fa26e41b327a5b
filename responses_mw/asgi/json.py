"""JSON responses, and headers that are added to every answer to a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import orjson
from starlette import responses
from starlette.types import Scope

__all__ = ["HeaderSource", "JSONResponse", "add_headers", "collect_headers", "encode_headers"]

HeaderSource: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""Headers, or a function that returns them when the answer starts."""

_HEADERS = "responses_mw.headers"


class JSONResponse(responses.JSONResponse):
    """Starlette's response, encoded by orjson."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def collect_headers(scope: Scope, headers: HeaderSource) -> list[HeaderSource]:
    """Return a list that starts with `headers`. `add_headers` appends to it until the answer starts."""
    scope[_HEADERS] = collected = [headers]
    return collected


def add_headers(scope: Scope, headers: HeaderSource) -> None:
    """Add headers to the answer to the request with this ASGI `scope`, whether the request succeeds or fails."""
    scope[_HEADERS].append(headers)


def encode_headers(collected: Iterable[HeaderSource]) -> list[tuple[bytes, bytes]]:
    """Return the collected headers in ASGI's format. Call this when the answer starts."""
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for headers in collected
        for name, value in (headers() if callable(headers) else headers).items()
    ]
