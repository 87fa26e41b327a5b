"""The requests of the demo upstream: the fields that the demo models use. Unknown fields are ignored, as in vLLM."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

MODELS = ("demo", "demo-thinker")
MAX_MODEL_LEN = 4096
"""Maximum total number of tokens of prompt and answer. A token is a word with the white space before it."""


class RequestError(Exception):
    """A refusal of the request. `status` is the HTTP status, and `body` the response body in vLLM's format."""

    def __init__(
        self, message: str, *, status: int = 400, error_type: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": status}}


class _Part(BaseModel):
    type: Literal["text", "image_url"]
    text: str = ""


class _FunctionCall(BaseModel):
    name: str
    arguments: str = "{}"


class _PastCall(BaseModel):
    id: str = ""
    function: _FunctionCall


class Message(BaseModel):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_PastCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class _FunctionDefinition(BaseModel):
    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: _FunctionDefinition


class _JSONSchema(BaseModel):
    name: str
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class _ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JSONSchema | None = None


class _StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    messages: list[Message] = Field(min_length=1)
    model: str = MODELS[0]
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_MODEL_LEN)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_MODEL_LEN)
    temperature: float | None = Field(None, ge=0, le=2)
    n: Literal[1] | None = None
    tools: list[Tool] | None = Field(None, min_length=1)
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = True
    response_format: _ResponseFormat | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(message.text.split()) for message in self.messages)

    @property
    def answer_limit(self) -> int:
        """Maximum number of tokens in the answer. Prompt and answer together have at most `MAX_MODEL_LEN` tokens."""
        limit = self.max_completion_tokens or self.max_tokens or MAX_MODEL_LEN
        return min(limit, MAX_MODEL_LEN - self.prompt_tokens)

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def named_tool(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None

    @property
    def user_text(self) -> str:
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")


def parse(body: bytes) -> ChatRequest:
    """Parse the body of a request. Raises `RequestError` if the request is invalid or too long, or names an unknown model."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as invalid:
        faults = [(".".join(("body", *map(str, fault["loc"]))), fault["msg"]) for fault in invalid.errors()]
        message = "; ".join(f"{path}: {fault}" for path, fault in faults)
        raise RequestError(message, error_type="Bad Request", param=faults[0][0]) from None
    _check(request)
    return request


def _check(request: ChatRequest) -> None:
    if request.model not in MODELS:
        message = f"The model `{request.model}` does not exist. Valid aliases: {', '.join(MODELS)}."
        raise RequestError(message, status=404, error_type="NotFoundError", param="model")
    names = [tool.function.name for tool in request.offered_tools]
    if request.tool_choice == "required" and not names:
        raise RequestError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if request.named_tool is not None and request.named_tool not in names:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`."
        raise RequestError(message, param="tool_choice")
    if request.prompt_tokens >= MAX_MODEL_LEN:
        limit = f"This model's maximum context length is {MAX_MODEL_LEN} tokens."
        message = f"{limit} However, your prompt contains {request.prompt_tokens} input tokens."
        raise RequestError(message, param="input_tokens")
