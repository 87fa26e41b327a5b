"""Log probabilities of tokens: the chat form in, the Responses form out."""

from __future__ import annotations

from typing import Any


def from_chat(logprobs: Any) -> list[dict[str, Any]]:
    """``choice.logprobs`` as the ``logprobs`` of an ``output_text`` part; servers may leave out the bytes (TGI)."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {**_token(entry), "top_logprobs": [_token(top) for top in _entries(entry.get("top_logprobs"))]}
        for entry in _entries(content)
    ]


def _entries(listed: Any) -> list[dict[str, Any]]:
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    token, logprob, data = entry.get("token"), entry.get("logprob"), entry.get("bytes")
    token = token if isinstance(token, str) else ""
    if not isinstance(data, list):
        data = list(token.encode(errors="replace"))
    return {"token": token, "logprob": logprob if isinstance(logprob, int | float) else 0.0, "bytes": data}
