"""Which dialect a running server speaks: what it says of itself, as a table of questions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from ..protocol.chat.dialects import LITELLM, LLAMACPP, OLLAMA, OPENAI, SGLANG, TGI, TRANSFORMERS, VLLM, Dialect

Get = Callable[[str], Awaitable[httpx.Response]]
"""GETs a path of the upstream."""

_OWNERS = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMACPP,
    "library": OLLAMA,
    "system": OPENAI,
    "openai-internal": OPENAI,
}
"""``owned_by`` of the models, where it names the server."""


def _is_tgi(answer: Any) -> bool:
    return isinstance(answer, dict) and "model_id" in answer and "max_total_tokens" in answer


def _is_ollama(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.keys() == {"version"}


def _is_litellm(answer: Any) -> bool:
    return isinstance(answer, str) and "alive" in answer


_PROBES: tuple[tuple[str, Callable[[Any], bool], Dialect], ...] = (
    ("/info", _is_tgi, TGI),
    ("/api/version", _is_ollama, OLLAMA),
    ("/health/liveliness", _is_litellm, LITELLM),
)
"""Asked one after the other where the owner says nothing."""


async def detect(models: list[dict[str, Any]], get: Get) -> Dialect:
    """The dialect of the server that lists ``models``; OpenAI's own where nothing tells."""
    for model in models:
        owner = model.get("owned_by")
        if isinstance(owner, str) and owner in _OWNERS:
            return _OWNERS[owner]
    for path, is_it, dialect in _PROBES:
        response = await get(path)
        if response.status_code == 200 and is_it(_json(response)):
            return dialect
    if models and all("/" in model["id"] and model.get("owned_by") == model["id"].split("/")[0] for model in models):
        return TRANSFORMERS
    return OPENAI


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None
