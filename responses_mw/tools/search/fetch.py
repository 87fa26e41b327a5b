"""JSON over HTTP, from a server that may be away, slow, wrong or endless."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import orjson

from ...bodies import BodyRefused, read_whole
from .query import SearchFailed

logger = logging.getLogger(__name__)

LARGEST_ANSWER = 8 * 1024 * 1024
_MEANINGS = {
    401: "refused this server's key",
    402: "wants to be paid first",
    403: "refused the request",
    429: "is asked too often; try again later",
    432: "has no searches left in this server's plan",
    433: "has no searches left in this server's plan",
}


async def fetch(http: httpx.AsyncClient, name: str, request: httpx.Request, *, patience: float) -> dict[str, Any]:
    """The JSON object that a provider (``name``) answers with, whole within ``patience`` seconds. Raises ``SearchFailed``."""
    request.headers["accept-encoding"] = "identity"
    request.extensions["timeout"] = httpx.Timeout(patience).as_dict()
    try:
        async with asyncio.timeout(patience):
            status, body = await _exchange(http, request)
    except BodyRefused as error:
        raise _failed(name, "sent too much, or compressed", str(error)) from None
    except (TimeoutError, httpx.TimeoutException):
        raise _failed(name, "did not answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _failed(name, "cannot be reached", type(error).__name__) from None
    if status != 200:
        raise _failed(name, _MEANINGS.get(status, "answered with an error"), f"HTTP {status}")
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise _failed(name, "sent no JSON object")
    return answer


async def _exchange(http: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes]:
    """Status and body; the body of an error is not read. Raises ``BodyRefused``."""
    response = await http.send(request, stream=True)
    try:
        if response.status_code != 200:
            return response.status_code, b""
        return 200, await read_whole(response, LARGEST_ANSWER)
    finally:
        await response.aclose()


def _failed(name: str, what: str, detail: str | None = None) -> SearchFailed:
    logger.warning("web search: %s %s%s", name, what, f" ({detail})" if detail else "")
    return SearchFailed(f"The search provider {what}.")


def rows(answer: Any, *path: str) -> list[dict[str, Any]]:
    """The objects of the list at ``path``; none where it is missing. Raises ``SearchFailed`` where it is no list."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else answer
        if answer is None:
            return []
    if not isinstance(answer, list):
        raise SearchFailed("The search provider sent something else than results.")
    return [row for row in answer if isinstance(row, dict)]


def text(row: dict[str, Any], *names: str) -> str:
    """The first of these members that is a text with something in it."""
    return next((value.strip() for name in names if isinstance(value := row.get(name), str) and value.strip()), "")
