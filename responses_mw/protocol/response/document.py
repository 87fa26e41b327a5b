"""Create the response object, and convert and add up token usage."""

from __future__ import annotations

from typing import Any, TypeGuard

from ..request.create import CreateResponse
from ..types import Document, Item, Tool

_ECHOED = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "store", "tool_choice", "truncation", "user", "metadata"),
)
_ECHOED_IF_SET = ("prompt", "prompt_cache_options", "prompt_cache_retention")
# Values of parameters that the client did not set.
_DEFAULTS = {
    "parallel_tool_calls": True,
    "service_tier": "default",
    "temperature": 1.0,
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def create(request: CreateResponse, *, response_id: str, model: str, created_at: int) -> Document:
    """Create the document of a new run, with every member that the Open Responses specification requires.

    `model` is the model of the request or, by default, the upstream's only model. `created_at` is in seconds since the epoch.
    """
    wanted = request.text.get("format", {"type": "text"})
    if wanted["type"] == "json_schema":  # the document always has a description and `strict`
        wanted = {"description": None, "strict": False, **wanted}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "conversation": {"id": request.conversation} if request.conversation else None,
        "reasoning": {"effort": None, "summary": None, **request.reasoning},
        "text": {**request.text, "format": wanted},
        "tools": [_echo(tool) for tool in request.tools],
        **{name: getattr(request, name) for name in _ECHOED},
        **{name: value for name in _ECHOED_IF_SET if (value := getattr(request, name)) is not None},
        **{name: default if getattr(request, name) is None else getattr(request, name) for name, default in _DEFAULTS.items()},
    }


def _echo(tool: Tool) -> Tool:
    if tool["type"] != "function":
        return tool
    return {**tool, **{name: tool.get(name) for name in ("description", "parameters", "strict")}}


def output_text(document: Document) -> str:
    """Return the concatenated text of the answer, as the SDKs compute it."""
    return "".join(
        part["text"]
        for item in document["output"]
        if item["type"] == "message"
        for part in item.get("content") or ()
        if part.get("type") == "output_text" and isinstance(part.get("text"), str)
    )


def shown(item: Item, include: frozenset[str]) -> Item:
    """Return an item as clients see it. Search results, sources and code outputs are hidden unless `include` lists them."""
    kind = item["type"]
    if kind == "web_search_call":
        hidden = frozenset({"results", "sources"}) - {wanted.rpartition(".")[2] for wanted in include if kind in wanted}
        seen = {name: value for name, value in item.items() if name not in hidden}
        if isinstance(seen.get("action"), dict):  # the item may come from an upstream's own Responses API
            seen["action"] = {name: value for name, value in seen["action"].items() if name not in hidden}
        return seen
    if kind == "file_search_call" and "file_search_call.results" not in include:
        return {**item, "results": None}
    if kind == "code_interpreter_call" and "code_interpreter_call.outputs" not in include:
        return {**item, "outputs": None}
    return item


def whole(document: Document, include: frozenset[str] = frozenset()) -> Document:
    """Return the document as clients see it (see `shown`). `output_text` is added here, because it is not stored."""
    output = [shown(item, include) for item in document["output"]]
    return {**document, "output": output, "output_text": output_text(document)}


# -- usage: the token counts of many servers in one shape ----------------------------------------------------------------

_MAX_COUNT = 2**53 - 1  # not every client can read larger integers


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _count(holder: Any, *names: str) -> int:
    for name in names:
        if isinstance(holder, dict) and _is_count(count := holder.get(name)):
            return count
    return 0


def usage_of_chat(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat `usage` to a `ResponseUsage`. Missing and invalid counts are 0, because clients require all counts."""
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    of_prompt, of_completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    cached, written = _count(of_prompt, "cached_tokens"), _count(of_prompt, "cache_write_tokens", "created_cache_tokens")
    # SGLang reports reasoning tokens beside the other counts, not in the details.
    reasoning = _count(of_completion, "reasoning_tokens") or _count(usage, "reasoning_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": _count(usage, "total_tokens") or prompt + completion,
    }


def usage_of_responses(given: Any) -> dict[str, Any] | None:
    """Add the details that the SDKs require to an upstream's usage. Return None if its input or output count is not valid."""
    if not isinstance(given, dict) or not all(_is_count(given.get(name)) for name in ("input_tokens", "output_tokens")):
        return None
    return {
        **given,
        "input_tokens_details": _details(given, "input_tokens_details", "cached_tokens", "cache_write_tokens"),
        "output_tokens_details": _details(given, "output_tokens_details", "reasoning_tokens"),
        "total_tokens": _count(given, "total_tokens") or given["input_tokens"] + given["output_tokens"],
    }


def _details(usage: dict[str, Any], name: str, *counts: str) -> dict[str, Any]:
    details = usage.get(name)
    given = {name: value for name, value in details.items() if value is not None} if isinstance(details, dict) else {}
    return {**given, **{name: _count(given, name) for name in counts}}


def add_usage(total: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
    """Return `total` plus the `usage` of another turn. Counts are added. Other members of `usage` replace those of `total`."""
    if total is None:
        return usage
    merged = {**total, **usage}
    for name, value in usage.items():
        before = total.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[name] = add_usage(before, value)
        elif type(value) is int and type(before) is int:
            merged[name] = before + value
    return merged


class UsageSum:
    """Adds up the usage of a run's turns. An interrupted turn and its continuation count as one turn."""

    def __init__(self) -> None:
        self.reported: dict[str, Any] | None = None
        """The last usage that the upstream reported for the turn. Repeated reports are cumulative."""
        self._turn_before: dict[str, Any] | None = None
        self._part: dict[str, Any] | None = None
        self._is_known = True
        self.repeated = 0
        """Tokens of the interrupted answer that its continuation has repeated."""

    def continues(self, part: dict[str, Any] | None) -> None:
        """Record `part`, the chat usage of an interrupted answer that the next one continues, or None if it is unknown."""
        self._part = usage_of_chat(part) if part else None
        self._is_known &= part is not None
        self.repeated = 0

    def with_turn(self, total: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return `total` plus the turn's usage, which is added only once. After `continues(None)`, always return None."""
        if not self.reported or not self._is_known:
            return total if self._is_known else None
        usage = usage_of_chat(self.reported)
        if self._part:
            usage = _with_part(usage, self._part, self.repeated)
        before, self.reported, self._part, self._turn_before = self._turn_before, None, None, usage
        if before is None:
            return add_usage(total, usage)
        # As in vLLM, the tokens of tool results are the growth of the prompt minus the previous answer.
        grown = usage["input_tokens"] - before["input_tokens"] - before["output_tokens"]
        details = {**usage["output_tokens_details"], "tool_output_tokens": max(grown, 0)}
        return add_usage(total, {**usage, "output_tokens_details": details})


def _with_part(usage: dict[str, Any], part: dict[str, Any], repeated: int) -> dict[str, Any]:
    """Return the usage of an interrupted answer (`part`) and its continuation, whose prompt contained that answer.

    Reasoning of the continuation is not counted, because the client does not see it, nor `repeated` tokens of its text.
    """
    prompt, details = part["input_tokens"], part["output_tokens_details"]  # the continuation of a text has no reasoning
    new = usage["output_tokens"] - (usage["output_tokens_details"]["reasoning_tokens"] if repeated else 0)
    answer = part["output_tokens"] + max(new - repeated, 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {name: min(count, prompt) for name, count in usage["input_tokens_details"].items()},
        "output_tokens": answer,
        "output_tokens_details": details,
        "total_tokens": prompt + answer,
    }
