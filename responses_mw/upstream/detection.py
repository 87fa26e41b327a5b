"""Detect what kind of server an endpoint is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import orjson

from ..protocol.dialects import DIALECTS, OPENAI, TRANSFORMERS, Dialect


async def detect(models: list[dict[str, Any]], get: Callable[[str], Awaitable[httpx.Response]]) -> Dialect:
    """Return the dialect of the server that lists `models`. For an unknown server, return OpenAI's.

    If no model has an `owned_by` that identifies the server, send probes with `get`. Raises the same errors as `get`.
    """
    by_owner = {owner: dialect for dialect in DIALECTS.values() for owner in dialect.owned_by}
    for model in models:
        owner = model.get("owned_by")
        if isinstance(owner, str) and owner in by_owner:
            return by_owner[owner]
    for dialect in DIALECTS.values():
        if dialect.probe is not None and await _is_confirmed(*dialect.probe, get):
            return dialect
    is_prefix = [model.get("owned_by") == model["id"].split("/")[0] and "/" in model["id"] for model in models]
    return TRANSFORMERS if models and all(is_prefix) else OPENAI


async def _is_confirmed(path: str, matches: Callable[[Any], bool], get: Callable[[str], Awaitable[httpx.Response]]) -> bool:
    response = await get(path)
    try:
        return response.status_code == 200 and matches(orjson.loads(response.content))
    except orjson.JSONDecodeError:
        return False
