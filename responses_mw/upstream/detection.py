"""Detect the dialect of a running server from its list of models and a table of probes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from ..protocol.chat.dialects import LITELLM, LLAMACPP, OLLAMA, OPENAI, SGLANG, TGI, TRANSFORMERS, VLLM, Dialect

Get = Callable[[str], Awaitable[httpx.Response]]
"""Sends a GET request to a path of the upstream."""

_OWNERS = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMACPP,
    "library": OLLAMA,
    "system": OPENAI,
    "openai-internal": OPENAI,
}
"""Dialects by the `owned_by` of a model, for servers that identify themselves in this member."""


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
"""The path, the check of the response and the dialect of each probe. Probes are sent in order if no `owned_by` is known."""


async def detect(models: list[dict[str, Any]], get: Get) -> Dialect:
    """Return the dialect of the server that lists `models`, or OpenAI's if nothing identifies the server.

    Raises the errors of `get`.
    """
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
