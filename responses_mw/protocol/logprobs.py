"""Log probabilities of tokens: the chat form in, the Responses form out."""

from __future__ import annotations

from typing import Any


def from_chat(logprobs: Any) -> list[dict[str, Any]]:
    """``choice.logprobs`` as the ``logprobs`` of an ``output_text`` part; servers may leave out the bytes (TGI)."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {**_token(entry), "top_logprobs": [_token(top) for top in entry.get("top_logprobs") or ()]} for entry in content or ()
    ]


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    token = entry.get("token") or ""
    data = entry.get("bytes")
    if data is None:
        data = list(token.encode(errors="replace"))
    return {"token": token, "logprob": entry.get("logprob", 0.0), "bytes": data}
