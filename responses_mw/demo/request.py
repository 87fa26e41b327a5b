"""The body of ``POST /v1/chat/completions``, as far as the demo models honour it, and vLLM's errors for a bad one.

Unknown fields are ignored, as vLLM does.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

__all__ = ["MAX_MODEL_LEN", "MODELS", "ChatRequest", "Message", "RequestError", "Tool", "count_tokens", "parse"]

MODELS = ("demo", "demo-thinker")
MAX_MODEL_LEN = 4096  # tokens of prompt and answer together
MAX_TEMPERATURE = 2.0


class RequestError(Exception):
    """A request that is refused: an HTTP ``status`` and the members of vLLM's error object."""

    def __init__(
        self, message: str, *, status: int = 400, error_type: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": status}}


class ImageURL(BaseModel):
    url: str


class Part(BaseModel):
    """One part of a message's content."""

    type: str
    text: str = ""
    image_url: ImageURL | None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    """A call that an assistant message made earlier."""

    id: str = ""
    function: FunctionCall


class Message(BaseModel):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text, its parts joined by line ends."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def images(self) -> list[str]:
        """The URLs of its images."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if part.image_url]


class FunctionDefinition(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    """A ``tool_choice`` that names one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class JSONSchema(BaseModel):
    name: str
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @property
    def schema_to_fill(self) -> dict[str, Any]:
        """The schema that was asked for; an empty one leaves the shape to the model."""
        return (self.json_schema and self.json_schema.json_schema) or {}


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    messages: list[Message]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
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
        """How many tokens the answer may have: what was asked for, and what the prompt leaves."""
        asked = self.max_completion_tokens or self.max_tokens or MAX_MODEL_LEN
        return min(asked, MAX_MODEL_LEN - self.prompt_tokens)

    @property
    def thinks(self) -> bool:
        """Whether the answer begins with reasoning: the model can, and the caller has not switched it off."""
        switched_on = (self.chat_template_kwargs or {}).get("enable_thinking", True)
        return self.model == "demo-thinker" and self.reasoning_effort != "none" and bool(switched_on)

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []


def count_tokens(text: str) -> int:
    """A token of the demo models is a word with the white space before it."""
    return len(text.split())


def parse(body: bytes) -> ChatRequest:
    """The request in ``body``; raises `RequestError` with vLLM's words for what is wrong with it."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as invalid:
        raise _validation_error(invalid) from None
    if request.model is None:
        request.model = MODELS[0]
    for check in (_check_model, _check_messages, _check_sampling, _check_tools, _check_lengths):
        check(request)
    return request


def _validation_error(invalid: ValidationError) -> RequestError:
    faults = [
        {"type": fault["type"], "loc": ".".join(("body", *map(str, fault["loc"]))), "msg": fault["msg"]}
        for fault in invalid.errors()
    ]
    noun = "error" if len(faults) == 1 else "errors"
    lines = "".join(f"\n  {fault}" for fault in faults)
    message = f"{len(faults)} validation {noun}:{lines}"
    return RequestError(message, error_type="Bad Request", param=faults[0]["loc"])


def _check_model(request: ChatRequest) -> None:
    if request.model not in MODELS:
        message = f"The model `{request.model}` does not exist. Valid aliases: {', '.join(MODELS)}."
        raise RequestError(message, status=404, error_type="NotFoundError", param="model")


def _check_messages(request: ChatRequest) -> None:
    if not request.messages:
        raise RequestError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = [part for message in request.messages if isinstance(message.content, list) for part in message.content]
    for part in parts:
        if part.type not in ("text", "image_url"):
            kind = part.type.removeprefix("input_").removesuffix("_url")
            raise RequestError(f"At most 0 {kind}(s) may be provided in one prompt.")


def _check_sampling(request: ChatRequest) -> None:
    if request.temperature is not None and request.temperature < 0:
        raise _parameter_error("temperature", request.temperature, "must be non-negative")
    if request.temperature is not None and request.temperature > MAX_TEMPERATURE:
        raise _parameter_error("temperature", request.temperature, f"must be at most {MAX_TEMPERATURE}")
    if request.n is not None and request.n != 1:
        raise _parameter_error("n", request.n, "must be 1")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    if request.stream_options and not request.stream:
        raise RequestError("Stream options can only be defined when `stream=True`.", param="stream_options")


def _check_tools(request: ChatRequest) -> None:
    if request.tools == []:
        raise RequestError("`tools` must not be an empty array. Either provide at least one tool or omit the field.")
    if request.tool_choice not in (None, "none") and not request.tools:
        raise RequestError("When using `tool_choice`, `tools` must be set. (parameter=tool_choice)", param="tool_choice")
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        if name not in [tool.function.name for tool in request.offered_tools]:
            message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
            raise RequestError(f"{message} (parameter=tool_choice)", param="tool_choice")


def _check_lengths(request: ChatRequest) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        asked = getattr(request, name)
        if asked is not None and asked < 1:
            raise _parameter_error(name, asked, "must be at least 1")
        if asked is not None and asked > MAX_MODEL_LEN:
            message = f"{name}={asked} cannot be greater than max_model_len={MAX_MODEL_LEN}."
            raise RequestError(f"{message} Please request fewer output tokens.", param=name)
    if request.prompt_tokens >= MAX_MODEL_LEN:
        message = (
            f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, your prompt contains "
            f"{request.prompt_tokens} input tokens. Please reduce the length of the input prompt."
        )
        raise RequestError(f"{message} (parameter=input_tokens, value={request.prompt_tokens})", param="input_tokens")


def _parameter_error(name: str, value: float, rule: str) -> RequestError:
    return RequestError(f"{name} {rule}, got {value}. (parameter={name}, value={value})", param=name)
