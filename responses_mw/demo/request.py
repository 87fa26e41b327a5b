"""The requests of the demo upstream: the members that the demo models use. Others are ignored, as in vLLM."""

from __future__ import annotations

from typing import Any

MODELS = ("demo", "demo-thinker")
MAX_MODEL_LEN = 4096
"""Maximum total number of tokens of prompt and answer. A token is a word with the white space before it."""


class RequestError(Exception):
    """A refusal of the request. `status` is the HTTP status, and `body` the response body in vLLM's format."""

    def __init__(self, message: str, status: int = 400, error_type: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": status}}


class ChatRequest:
    """A chat request. A member of the wrong type causes an `AttributeError`, `LookupError` or `TypeError` when it is used."""

    def __init__(self, body: dict[str, Any]) -> None:
        """Raises `RequestError` if the model is unknown or the prompt is too long."""
        self.messages: list[dict[str, Any]] = body["messages"]
        self.model: str = body.get("model") or MODELS[0]
        if self.model not in MODELS:
            message = f"The model `{self.model}` does not exist. Valid aliases: {', '.join(MODELS)}."
            raise RequestError(message, 404, "NotFoundError", "model")
        self.prompt_tokens = sum(len(text_of(message).split()) for message in self.messages)
        if self.prompt_tokens >= MAX_MODEL_LEN:
            limit = f"This model's maximum context length is {MAX_MODEL_LEN} tokens."
            message = f"{limit} However, your prompt contains {self.prompt_tokens} input tokens."
            raise RequestError(message, param="input_tokens")
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or MAX_MODEL_LEN
        self.answer_limit = min(int(max_tokens), MAX_MODEL_LEN - self.prompt_tokens)  # in tokens
        self.streams = bool(body.get("stream"))
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.format: dict[str, Any] = body.get("response_format") or {"type": "text"}
        choice = body.get("tool_choice")
        self.must_call = choice == "required"
        self.named_function: str | None = choice["function"]["name"] if isinstance(choice, dict) else None
        self.functions: list[dict[str, Any]] = [tool["function"] for tool in body.get("tools") or () if choice != "none"]
        self.is_single_call = body.get("parallel_tool_calls") is False
        self.user_text = next((text_of(message) for message in reversed(self.messages) if message["role"] == "user"), "")


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
