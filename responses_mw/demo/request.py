"""The part of the ``POST /v1/chat/completions`` body that the demo models use, and the errors for an invalid body.

Unknown fields are ignored, as in vLLM.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

__all__ = ["MAX_MODEL_LEN", "MODELS", "ChatRequest", "Message", "RequestError", "Tool", "count_tokens", "parse"]

MODELS = ("demo", "demo-thinker")
MAX_MODEL_LEN = 4096  # tokens of prompt and answer together


class RequestError(Exception):
    """The request is refused. ``status`` is the HTTP status, ``body`` is vLLM's error object."""

    def __init__(
        self, message: str, *, status: int = 400, error_type: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": status}}


class Part(BaseModel):
    """One part of a message's content. The demo models ignore images."""

    type: Literal["text", "image_url"]
    text: str = ""


class FunctionCall(BaseModel):
    name: str
    arguments: str = "{}"


class PastCall(BaseModel):
    """A call in an earlier assistant message."""

    id: str = ""
    function: FunctionCall


class Message(BaseModel):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text of all parts, one per line."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedTool(BaseModel):
    """A ``tool_choice`` that names one function."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class JSONSchema(BaseModel):
    name: str
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @property
    def schema_to_fill(self) -> dict[str, Any]:
        """The requested schema. It is empty if the request has none, so the model chooses the shape."""
        return (self.json_schema and self.json_schema.json_schema) or {}


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_MODEL_LEN)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_MODEL_LEN)
    temperature: float | None = Field(None, ge=0, le=2)
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(None, min_length=1)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(count_tokens(message.text) for message in self.messages)

    @property
    def answer_limit(self) -> int:
        """The maximum number of tokens in the answer: the request's limit, or what the prompt leaves if that is less."""
        limit = self.max_completion_tokens or self.max_tokens or MAX_MODEL_LEN
        return min(limit, MAX_MODEL_LEN - self.prompt_tokens)

    @property
    def thinks(self) -> bool:
        """Whether the answer begins with reasoning: the model can reason, and the request has not turned it off."""
        is_on = (self.chat_template_kwargs or {}).get("enable_thinking", True)
        return self.model == "demo-thinker" and self.reasoning_effort != "none" and bool(is_on)

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []


def count_tokens(text: str) -> int:
    """Count tokens. A token of the demo models is a word with the white space before it."""
    return len(text.split())


def parse(body: bytes) -> ChatRequest:
    """Parse a request. Raises `RequestError`."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as invalid:
        raise _validation_error(invalid) from None
    if request.model is None:
        request.model = MODELS[0]
    _check_model(request)
    _check_tool_choice(request)
    _check_length(request)
    return request


def _validation_error(invalid: ValidationError) -> RequestError:
    faults = [(".".join(("body", *map(str, fault["loc"]))), fault["msg"]) for fault in invalid.errors()]
    message = "; ".join(f"{path}: {fault}" for path, fault in faults)
    return RequestError(message, error_type="Bad Request", param=faults[0][0])


def _check_model(request: ChatRequest) -> None:
    if request.model not in MODELS:
        message = f"The model `{request.model}` does not exist. Valid aliases: {', '.join(MODELS)}."
        raise RequestError(message, status=404, error_type="NotFoundError", param="model")


def _check_tool_choice(request: ChatRequest) -> None:
    choice, names = request.tool_choice, [tool.function.name for tool in request.offered_tools]
    if choice == "required" and not names:
        raise RequestError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`."
        raise RequestError(message, param="tool_choice")


def _check_length(request: ChatRequest) -> None:
    if request.prompt_tokens >= MAX_MODEL_LEN:
        message = (
            f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, your prompt contains "
            f"{request.prompt_tokens} input tokens. Please reduce the length of the input prompt."
        )
        raise RequestError(message, param="input_tokens")
