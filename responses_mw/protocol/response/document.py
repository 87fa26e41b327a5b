"""The response object, as created and as shown to clients."""

from __future__ import annotations

from typing import Any

from ..request.create import CreateResponse
from ..types import Document, Item, Tool


def create(request: CreateResponse, *, response_id: str, model: str, created_at: int) -> Document:
    """Create the document of a new run, with every member that the Open Responses specification requires.

    ``model`` is the request's, or the upstream's only one. ``created_at`` is in seconds since the epoch.
    """
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": request.background,
        "conversation": {"id": request.conversation} if request.conversation else None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": _or(request.parallel_tool_calls, True),
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **request.reasoning},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store,
        "temperature": _or(request.temperature, 1.0),
        "text": {**request.text, "format": _echo_format(request.text.get("format", {"type": "text"}))},
        "tool_choice": request.tool_choice,
        "tools": [_echo(tool) for tool in request.tools],
        "top_logprobs": _or(request.top_logprobs, 0),
        "top_p": _or(request.top_p, 1.0),
        "presence_penalty": _or(request.presence_penalty, 0.0),
        "frequency_penalty": _or(request.frequency_penalty, 0.0),
        "truncation": request.truncation,
        "usage": None,
        "user": request.user,
        "metadata": request.metadata,
        **({"prompt": request.prompt} if request.prompt else {}),
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _echo(tool: Tool) -> Tool:
    """A tool as shown in the document, where these members of a function are always present."""
    if tool["type"] != "function":
        return tool
    return {**tool, **{name: tool.get(name) for name in ("description", "parameters", "strict")}}


def _echo_format(wanted: dict[str, Any]) -> dict[str, Any]:
    """The text format as shown in the document, where these members of a schema are always present."""
    return {"description": None, "strict": False, **wanted} if wanted["type"] == "json_schema" else wanted


def output_text(document: Document) -> str:
    """The concatenated text of the answer, as the SDKs compute it."""
    return "".join(
        part["text"]
        for item in document["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    )


def shown(item: Item, include: frozenset[str]) -> Item:
    """Remove the members that are shown only on request by ``include``. They are stored in any case."""
    kind = item["type"]
    if kind == "web_search_call":
        hidden = frozenset({"results", "sources"}) - {wanted.rpartition(".")[2] for wanted in include if kind in wanted}
        action = {name: value for name, value in item.get("action", {}).items() if name not in hidden}
        return {**{name: value for name, value in item.items() if name not in hidden}, "action": action}
    if kind == "code_interpreter_call" and "code_interpreter_call.outputs" not in include:
        return {**item, "outputs": None}
    return item


def whole(document: Document, include: frozenset[str] = frozenset()) -> Document:
    """The document as shown to clients, with ``output_text``, which is computed and never stored."""
    output = [shown(item, include) for item in document["output"]]
    return {**document, "output": output, "output_text": output_text(document)}
