"""Build the body of `/v1/chat/completions` from a request, in the upstream's dialect.

Parameters that the client did not set are not sent, because the defaults here could differ from the upstream's. A parameter
that affects the answer gets a 400 if the dialect cannot express it. The exception is `parallel_tool_calls`, which is enforced
on the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import BadRequest
from .. import checks
from ..dialects import Dialect
from ..parts import is_unfinished
from ..request.create import CreateResponse
from ..request.tools import choice_names, namer
from ..tool_kinds.form import OfferedFunction
from ..types import ChatRequest, Item, Part, Tool
from .combination import Combination, combine
from .messages import to_messages

_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
GRAMMARS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"grammar", "json_schema", "regex", "ebnf", "structural_tag"}
)
"""Parameters of chat servers that constrain the output. A request may contain them in `extra`."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """How the upstream continues an unfinished message, which is the last one of the request."""

    tokens: int = 0  # number of tokens of an interrupted answer, which count towards the limits of the request
    without_thinking: bool = False  # whether to turn reasoning off, so that the server's parser does not expect any


def is_constrained(request: CreateResponse, *, first_turn: bool) -> bool:
    """Return whether a grammar may constrain the answer.

    A constrained answer cannot be continued after an interruption, because the whole grammar would apply to the continuation.
    """
    is_forced = request.tool_choice == "required" or (
        isinstance(request.tool_choice, dict)
        and (request.tool_choice["type"] != "allowed_tools" or request.tool_choice.get("mode") == "required")
    )
    return request.wants_format or (is_forced and first_turn) or not GRAMMARS.isdisjoint(request.extra)


def to_chat(
    request: CreateResponse,
    items: Sequence[Item],
    dialect: Dialect,
    *,
    model: str,
    offered: Sequence[OfferedFunction] = (),
    own: int = 0,
    first_turn: bool = True,
    results: Mapping[str, str | list[Part]] | None = None,
    prefill: Prefill | None = None,
    combination: Combination = Combination.TOGETHER,
) -> ChatRequest:
    """Build the chat request for one turn.

    `items` are all items that the model sees. The request's own input begins at `items[own]`. `model` is the upstream's name
    for the model. `results` maps the ids of call items in this run to the results that the model sees. Only the first turn
    forces a tool call, because a later turn must be able to answer. `combination` is how the upstream combines the format with
    the tools. With `prefill`, or if the last item is an incomplete message of the assistant, the model continues this message,
    provided that the dialect supports it.

    Raises `BadRequest` if there are no messages or the dialect cannot express the request, and the errors of `to_messages`.
    """
    messages = to_messages(
        items,
        dialect,
        instructions=request.instructions,
        all_reasoning=request.reasoning.get("context") == "all_turns",
        offset=own,
        names=namer(offered),
        results=results,
    )
    if not messages:
        message = "There is nothing to answer: 'input' is empty, and so are the history and the instructions."
        raise BadRequest(message, param="input", code="missing_required_parameter")
    body: ChatRequest = {**request.extra, "model": model, "messages": messages}
    _add_sampling(body, request, dialect)
    _add_output_limits(body, request, dialect)
    add_reasoning(body, request, dialect)
    _add_verbosity(body, request, dialect)
    _add_format(body, request, dialect)
    _add_tools(body, request, offered, dialect, first_turn=first_turn)
    combine(body, combination, dialect)
    _add_hints(body, request, dialect)
    _add_prefill(body, items, dialect, prefill)
    if request.stream:
        body["stream"] = True
        if dialect.stream_usage:
            body["stream_options"] = {"include_usage": True, **(dialect.usage_per_chunk if prefill else {})}
    return body


def _add_prefill(body: ChatRequest, items: Sequence[Item], dialect: Dialect, prefill: Prefill | None) -> None:
    if dialect.prefill and (prefill or (items and is_unfinished(items[-1]))):
        body |= {dialect.prefill: True, "add_generation_prompt": False}
    if prefill is None:
        return
    if "echo" in body:  # vLLM and llama.cpp would send the message again
        body["echo"] = False
    for name in _LIMITS:
        if isinstance(body.get(name), int):
            body[name] = max(body[name] - prefill.tokens, 1 if name.startswith("max") else 0)
    if prefill.without_thinking:
        body["chat_template_kwargs"] = {**_template_arguments(body), "enable_thinking": False}


def _template_arguments(body: ChatRequest, **defaults: Any) -> dict[str, Any]:
    """Return the chat template's arguments: the `defaults`, overridden by the client's arguments."""
    given = body.get("chat_template_kwargs")
    return {**defaults, **(given if isinstance(given, dict) else {})}


def _add_sampling(body: ChatRequest, request: CreateResponse, dialect: Dialect) -> None:
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is None or (name == "top_p" and value == 1 and not dialect.top_p_one):
            continue
        if value:
            dialect.check(name)
        if name not in dialect.refuses:
            body[name] = value
    if dialect.stop_is_list and isinstance(body.get("stop"), str):
        body["stop"] = [body["stop"]]


def _add_output_limits(body: ChatRequest, request: CreateResponse, dialect: Dialect) -> None:
    if request.max_output_tokens is not None:
        body[dialect.max_tokens] = request.max_output_tokens
    if request.wants_logprobs:
        dialect.check("top_logprobs")
        body["logprobs"] = True
        if request.top_logprobs:
            body["top_logprobs"] = request.top_logprobs


def add_reasoning(body: ChatRequest, request: CreateResponse, dialect: Dialect) -> None:
    effort = request.reasoning.get("effort")
    if effort is None:
        return
    if dialect.reasoning_effort == "refused":
        dialect.unsupported("reasoning.effort", "has no such setting")
    body["reasoning_effort"] = effort
    if dialect.reasoning_effort == "template":
        body["chat_template_kwargs"] = _template_arguments(body, enable_thinking=effort != "none")


def _add_verbosity(body: ChatRequest, request: CreateResponse, dialect: Dialect) -> None:
    verbosity = request.text.get("verbosity", "medium")
    if "verbosity" in request.text and dialect.verbosity == "field":
        body["verbosity"] = verbosity
    elif "verbosity" in request.text and dialect.verbosity == "template":
        body["chat_template_kwargs"] = _template_arguments(body, verbosity=verbosity)
    elif verbosity != "medium":
        dialect.unsupported("text.verbosity", "has no such setting")


def _add_format(body: ChatRequest, request: CreateResponse, dialect: Dialect) -> None:
    if not request.wants_format:
        return
    if dialect.response_format == "refused":
        dialect.unsupported("text.format", "cannot constrain its output")
    wanted = request.text["format"]
    kind = wanted["type"]
    schema = {name: wanted[name] for name in ("name", "description", "schema", "strict") if name in wanted}
    body["response_format"] = {"type": kind, kind: schema} if schema else {"type": kind}
    if dialect.response_format == "value":
        value = {"name": schema["name"], "schema": schema["schema"]} if schema else {"type": "object"}
        body["response_format"] = {"type": kind, "value": value}


def _add_tools(
    body: ChatRequest, request: CreateResponse, offered: Sequence[OfferedFunction], dialect: Dialect, *, first_turn: bool
) -> None:
    choice = request.tool_choice
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        offered, choice = _named(choice, offered), choice.get("mode", "auto")
    if first_turn and choice not in ("auto", "none"):
        offered = _force(body, choice, offered, dialect)
    elif not offered or (choice == "none" and not dialect.tools_with_none):
        return
    elif choice == "none":
        body["tool_choice"] = choice
    body["tools"] = [_chat_tool(one.function, dialect) for one in offered]
    if request.parallel_tool_calls is not None and dialect.parallel_tool_calls:
        body["parallel_tool_calls"] = request.parallel_tool_calls


def _named(choice: dict[str, Any], offered: Sequence[OfferedFunction]) -> Sequence[OfferedFunction]:
    names = choice_names(choice, offered)
    return [one for one in offered if one.name in names]


def _force(body: ChatRequest, choice: Any, offered: Sequence[OfferedFunction], dialect: Dialect) -> Sequence[OfferedFunction]:
    """Set `tool_choice` so that the model must call a function. Return the functions to offer.

    Raises `BadRequest` if no offered function is selected, or if the dialect cannot force a call.
    """
    selected = _named(choice, offered) if isinstance(choice, dict) else offered
    if not selected:
        checks.invalid("tool_choice", "the server does not offer the selected tool.")
    if dialect.tool_choice == "refused":
        dialect.unsupported("tool_choice", "cannot be made to call a tool")
    if choice == "required" or len(selected) != 1 or dialect.tool_choice == "only":
        body["tool_choice"] = "required"
        return selected
    name = selected[0].name
    body["tool_choice"] = name if dialect.tool_choice == "name" else {"type": "function", "function": {"name": name}}
    return offered


def _chat_tool(tool: Tool, dialect: Dialect) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    if dialect.parameters_required:
        function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def _add_hints(body: ChatRequest, request: CreateResponse, dialect: Dialect) -> None:
    # Hints that the dialect does not support are dropped, but two of those for the prompt cache get a 400.
    hints = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier")
    for name in hints:
        value = getattr(request, name)
        if value is not None and name in dialect.hints:
            body[name] = value
        elif value is not None and name in ("prompt_cache_retention", "prompt_cache_options"):
            dialect.unsupported(name, "has no such setting")
