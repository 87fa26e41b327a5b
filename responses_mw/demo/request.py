"""The requests of the demo upstream: the members that the demo models use. Others are ignored, as in vLLM."""

from __future__ import annotations

from typing import Any

from .prompts import prompt_of, text_of, tokens_of

MODELS = ("demo", "demo-thinker")
MAX_MODEL_LEN = 4096
"""Maximum total number of tokens of prompt and answer."""


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
        self.prompt_tokens = len(tokens_of(prompt_of(self.messages)))
        if self.prompt_tokens >= MAX_MODEL_LEN:
            limit = f"This model's maximum context length is {MAX_MODEL_LEN} tokens."
            message = f"{limit} However, your prompt contains {self.prompt_tokens} input tokens."
            raise RequestError(message, param="input_tokens")
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or MAX_MODEL_LEN
        self.answer_limit = min(int(max_tokens), MAX_MODEL_LEN - self.prompt_tokens)  # in tokens
        self.streams = bool(body.get("stream"))
        usage = body.get("stream_options") or {}
        self.wants_usage = bool(usage.get("include_usage"))
        self.wants_usage_of_chunks = self.wants_usage and bool(usage.get("continuous_usage_stats"))
        self.beginning = self._begun() if body.get("continue_final_message") else ""
        """The text of the last message, which the answer continues."""
        self.format: dict[str, Any] = body.get("response_format") or {"type": "text"}
        choice = body.get("tool_choice")
        self.must_call = choice == "required"
        self.named_function: str | None = choice["function"]["name"] if isinstance(choice, dict) else None
        self.functions: list[dict[str, Any]] = [tool["function"] for tool in body.get("tools") or () if choice != "none"]
        self.is_single_call = body.get("parallel_tool_calls") is False
        self.user_text = next((text_of(message) for message in reversed(self.messages) if message["role"] == "user"), "")

    def _begun(self) -> str:
        """Take the last message out of the messages, and return its text."""
        last = self.messages[-1]
        if last["role"] != "assistant":
            raise RequestError("The last message is not an assistant message, so that it cannot be continued.")
        self.messages = self.messages[:-1]
        return text_of(last)
