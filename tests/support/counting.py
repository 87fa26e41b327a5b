"""A Chat Completions server whose tokens are words, with or without a tokenizer, and with a maximum context length."""

from __future__ import annotations

import json
from typing import Any

from tests.support.scripted import Answer, Asked, ScriptedUpstream, completion, json_answer

WORDS_A_MESSAGE = 2
"""What the chat template adds."""


class Counting(ScriptedUpstream):
    """`owner` determines the dialect; `paths` are served in addition to completions. `asked` has the requests so far."""

    def __init__(self, owner: str, *paths: str, length: int = 10**9, counts: bool = True) -> None:
        super().__init__()
        self.owner = owner
        self.paths = {"/v1/chat/completions", "/v1/models", *paths}
        self.length = length
        self.counts = counts
        self.tells_length = True
        self.refusal = (
            "This model's maximum context length is {length} tokens. However, your messages resulted in {count} tokens."
        )
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]

    def answer(self, asked: Asked) -> Answer:
        body = asked.json if asked.body else {}
        if asked.body != b"{}":  # which checks a credential
            self.asked.append((asked.path, body))
        if asked.path not in self.paths:
            return json_answer({"detail": "Not Found"}, 404)
        status, answer = self._answer(asked.path, body)
        return json_answer(answer, status)

    def _answer(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/chat/completions":
            return self._complete(asked)
        count = words(asked)
        tokens = list(range(count))
        pages = {
            "/v1/models": {"data": [{"id": "tiny", "owned_by": self.owner, **self._told("max_model_len")}]},
            "/info": {"model_id": "tiny", **self._told("max_total_tokens")},
            "/props": {"default_generation_settings": self._told("n_ctx")},
            "/tokenize": {"tokens": [*tokens, *asked.get("content", "").split()]},
            "/chat_tokenize": {"tokenize_response": tokens, "templated_text": ""},
            "/apply-template": {"prompt": "word " * count},
        }
        return 200, pages[path]

    def _told(self, name: str) -> dict[str, int]:
        return {name: self.length} if self.tells_length else {name: 0} if name == "max_total_tokens" else {}

    def _complete(self, asked: dict[str, Any]) -> tuple[int, Any]:
        count = words(asked)
        wanted = asked.get("max_tokens") or asked.get("max_completion_tokens") or 1
        if count + wanted > self.length:
            message = self.refusal.format(length=self.length, count=count)
            kind = "exceed_context_size_error" if self.owner == "llamacpp" else "invalid_request_error"
            return 400, {"error": {"message": message, "type": kind, "param": "messages", "code": None}}
        answer = completion(
            {"content": "Hello"}, counts={"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
        )
        return 200, answer if self.counts else {**answer, "usage": None}


def words(asked: dict[str, Any]) -> int:
    """Return the number of tokens of a chat request: of its messages and tools."""
    texts = [_text(message.get("content")) for message in asked.get("messages", [])]
    tools = len(json.dumps(asked["tools"]).split()) if asked.get("tools") else 0
    return sum(len(text.split()) + WORDS_A_MESSAGE for text in texts) + tools


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text", "image") for part in content)
    return content or ""
