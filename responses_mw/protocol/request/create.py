"""Check the body of ``POST /v1/responses``. Every 400 that depends on the body alone is raised here.

See the OpenAI reference, "Create a model response". Null means absent. Fields that the reference does not define are the
upstream's (``top_k``, ``seed``, ``stop``, ``chat_template_kwargs``, ... of vLLM and SGLang) and are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...errors import BadRequest
from ..types import Item, Tool
from ..vllm.previous_messages import parse_previous, refuse_two_histories
from . import checks
from .body import RequestLimits
from .checks import Check
from .items import parse_input
from .tools import check_number_of_tools, check_tool_choice, check_tools

INCLUDABLE = frozenset(
    {
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
        "message.output_text.logprobs",
    }
)
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
SERVICE_TIERS = frozenset({"auto", "default", "flex", "scale", "priority", "fast", "ultrafast"})
_DEFAULT_LIMITS = RequestLimits()
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """A checked request. Members are named as in the reference; ``items`` is its ``input``."""

    items: list[Item]
    extra: dict[str, Any]
    """Members that are passed to the upstream unchanged."""
    background: bool = False
    background_options: dict[str, Any] = field(default_factory=dict)
    """When the response is needed (``completion_window``). It has no effect: all background responses share one queue."""
    cache: Any = None
    """The request's cache options (``responses_mw.cache.policy``)."""
    context_management: list[dict[str, Any]] = field(default_factory=list)
    conversation: str | None = None
    """Id of the conversation."""
    enable_response_messages: bool = False
    """vLLM: whether the document includes ``input_messages`` and ``output_messages``."""
    frequency_penalty: float | None = None
    include: frozenset[str] = frozenset()
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: float | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    """The template that provided other members (``responses_mw.engine.prompt_templates``)."""
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    safety_identifier: str | None = None
    service_tier: str | None = None
    size: int = 0
    """Size of its JSON in bytes, where known."""
    store: bool = True
    stream: bool = False
    stream_options: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    text: dict[str, Any] = field(default_factory=dict)
    tool_choice: Any = "auto"
    tools: list[Tool] = field(default_factory=list)
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str = "disabled"
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include

    @property
    def wants_summary(self) -> bool:
        return self.reasoning.get("summary") is not None


def parse(body: Any, limits: RequestLimits = _DEFAULT_LIMITS, size: int = 0) -> CreateResponse:
    """Check the decoded JSON ``body`` of ``size`` bytes. Raise ``BadRequest`` with the path of what is wrong."""
    if not isinstance(body, dict):
        raise BadRequest(f"The request body must be a JSON object, but is {checks.kind_of(body)}.", code="invalid_type")
    checks.depth(body, limits.depth)
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() & REFUSED.keys():
        REFUSED[name](given[name], name)
    if not given.keys() & {"input", "previous_response_id", "conversation"}:
        message = "One of 'input', 'previous_response_id' or 'conversation' must be provided."
        raise BadRequest(message, param="input", code="missing_required_parameter")
    if given.keys() >= {"previous_response_id", "conversation"}:
        message = "Only one of 'previous_response_id' and 'conversation' can be set."
        raise BadRequest(message, param="previous_response_id", code="mutually_exclusive_parameters")
    known = {name: check(given[name], name) for name, check in PARAMETERS.items() if name in given}
    _check_background(known)
    check_number_of_tools(given.get("tools"), given.get("input"), maximum=limits.tools)
    tools = check_tools(given.get("tools", []))
    items = _items(given, limits)
    _check_trigger(items)
    known["tool_choice"] = check_tool_choice(given.get("tool_choice", "auto"), tools, items, max_length=limits.tools)
    return CreateResponse(
        items=items,
        size=size,
        extra={name: value for name, value in given.items() if name not in _NOT_FORWARDED},
        tools=tools,
        **known,
    )


def _items(given: dict[str, Any], limits: RequestLimits) -> list[Item]:
    """Check the input and prepend the history in vLLM's ``previous_input_messages``."""
    refuse_two_histories(given)
    previous = parse_previous(given.get("previous_input_messages", []), max_items=limits.items)
    if previous and given.get("input") == "":
        return previous
    return previous + parse_input(given.get("input", []), max_items=limits.items)


# -- one check for each parameter --------------------------------------------------------------------------------------


def _include(value: Any, path: str) -> frozenset[str]:
    return frozenset(checks.one_of(one, f"{path}[{n}]", INCLUDABLE) for n, one in enumerate(checks.array(value, path)))


def _background_options(value: Any, path: str) -> dict[str, Any]:
    known: dict[str, Check] = {
        "completion_window": partial(checks.one_of, supported={"soonest", "2h", "8h"}),
        "continuation_id": lambda _id, path: checks.unsupported(path, "background responses are served in turn."),
    }
    return checks.members(value, path, known, others="refuse")


def _check_background(known: dict[str, Any]) -> None:
    """Check combinations with ``background``.

    A background response is stored. One that may take hours must be in the background, in the standard tier and not
    streamed.
    """
    if known.get("background") and known.get("store") is False:
        raise BadRequest("background can only be used when `store` is true", param="background", code="unsupported_parameter")
    window = known.get("background_options", {}).get("completion_window", "soonest")
    standard = known.get("service_tier", "auto") in ("auto", "default")
    if window != "soonest" and not (known.get("background") and standard and not known.get("stream")):
        path = "background_options.completion_window"
        checks.unsupported(path, f"'{window}' needs 'background': true, no 'stream', and the service tier 'auto' or 'default'.")


def _conversation(value: Any, path: str) -> str:
    """Check a conversation given as an id or as an object with one."""
    if isinstance(value, dict):
        value, path = checks.required(value, "id", path, checks.string), f"{path}.id"
    if not checks.string(value, path).startswith("conv_"):
        message = f"Invalid '{path}': '{value[:64]}'. Expected an ID that begins with 'conv_'."
        raise BadRequest(message, param=path, code="invalid_value")
    return str(value)


def _check_trigger(items: list[Item]) -> None:
    for index, item in enumerate(items[:-1]):
        if item["type"] == "compaction_trigger":
            path = f"input[{index}]"
            message = f"Invalid '{path}': a 'compaction_trigger' must be the last input item."
            raise BadRequest(message, param=path, code="invalid_value")


def _context_management(value: Any, path: str) -> list[dict[str, Any]]:
    known: dict[str, Check] = {
        "type": partial(checks.one_of, supported={"compaction"}),
        "compact_threshold": partial(checks.integer, minimum=1),
    }
    entries = []
    for index, entry in enumerate(checks.array(value, path)):
        checked = checks.members(entry, f"{path}[{index}]", known, others="refuse")
        checks.required(checked, "type", f"{path}[{index}]", checks.string)
        entries.append(checked)
    return entries


def metadata(value: Any, path: str) -> dict[str, str]:
    metadata = checks.mapping(value, path)
    if len(metadata) > METADATA_PAIRS:
        message = f"Invalid '{path}': too many properties. Expected at most {METADATA_PAIRS}, but got {len(metadata)} instead."
        raise BadRequest(message, param=path, code="object_above_max_properties")
    for key, text in metadata.items():
        checks.string(key, path, max_length=METADATA_KEY)
        checks.string(text, f"{path}.{key}", max_length=METADATA_VALUE)
    return metadata


def _reasoning(value: Any, path: str) -> dict[str, Any]:
    summaries = partial(checks.one_of, supported={"auto", "concise", "detailed"})
    known: dict[str, Check] = {
        "effort": partial(checks.one_of, supported=EFFORTS),
        "summary": summaries,
        "generate_summary": summaries,
        "context": partial(checks.one_of, supported={"auto", "current_turn", "all_turns"}),
        "mode": partial(checks.one_of, supported={"standard"}),
    }
    reasoning = checks.members(value, path, known, others="refuse")
    deprecated = reasoning.pop("generate_summary", None)
    return {"summary": deprecated, **reasoning} if deprecated else reasoning


def _text(value: Any, path: str) -> dict[str, Any]:
    known: dict[str, Check] = {"format": _format, "verbosity": partial(checks.one_of, supported={"low", "medium", "high"})}
    return checks.members(value, path, known, others="refuse")


def _format(value: Any, path: str) -> dict[str, Any]:
    checked = checks.mapping(value, path)
    kind = checks.required(checked, "type", path, checks.string)
    checks.one_of(kind, f"{path}.type", {"text", "json_object", "json_schema"})
    if kind == "json_schema":
        checks.required(checked, "name", path, partial(checks.string, pattern=r"[a-zA-Z0-9_-]{1,64}"))
        checks.required(checked, "schema", path, checks.json_object)
        checks.optional(checked, path, strict=checks.boolean, description=checks.string)
    return checked


def _stream_options(value: Any, path: str) -> dict[str, Any]:
    # include_usage is a Chat Completions option. Usage is always included, so both values are honoured.
    known: dict[str, Check] = {"include_obfuscation": checks.boolean, "include_usage": checks.boolean}
    return checks.members(value, path, known, others="refuse")


def _refuse(why: str) -> Callable[[Any, str], None]:
    return lambda _value, path: checks.unsupported(path, why)


def _refuse_unless(harmless: Any, why: str) -> Callable[[Any, str], None]:
    """Refuse a parameter unless it has the one value that changes nothing."""

    def check(value: Any, path: str) -> None:
        if value != harmless:
            checks.unsupported(path, why)

    return check


_penalty = partial(checks.number, minimum=-2, maximum=2)

PARAMETERS: dict[str, Check] = {
    "background": checks.boolean,
    "background_options": _background_options,
    "cache": lambda value, _path: value,  # checked together with its header
    "context_management": _context_management,
    "conversation": _conversation,
    "enable_response_messages": checks.boolean,
    "frequency_penalty": _penalty,
    "include": _include,
    "instructions": checks.string,
    "max_output_tokens": partial(checks.integer, minimum=1),
    "max_tool_calls": partial(checks.integer, minimum=1),
    "metadata": metadata,
    "model": checks.string,
    "parallel_tool_calls": checks.boolean,
    "presence_penalty": _penalty,
    "previous_response_id": checks.string,
    "prompt": checks.mapping,
    "prompt_cache_key": checks.string,
    "prompt_cache_options": checks.mapping,
    "prompt_cache_retention": partial(checks.one_of, supported={"in_memory", "24h"}),
    "reasoning": _reasoning,
    "safety_identifier": checks.string,
    "service_tier": partial(checks.one_of, supported=SERVICE_TIERS),
    "store": checks.boolean,
    "stream": checks.boolean,
    "stream_options": _stream_options,
    "temperature": partial(checks.number, minimum=0, maximum=2),
    "text": _text,
    "top_logprobs": partial(checks.integer, minimum=0, maximum=20),
    "top_p": partial(checks.number, minimum=0, maximum=1),
    "truncation": partial(checks.one_of, supported={"auto", "disabled"}),
    "user": checks.string,
    "tool_choice": lambda value, _path: value,  # checked together with the tools
}

_CHAT_NAME = "it is the name that Chat Completions uses; use '{}' instead."

REFUSED: dict[str, Callable[[Any, str], None]] = {
    # in the reference, but not served (yet)
    "access_programs": _refuse("it belongs to OpenAI's hosted platform."),
    "image": _refuse("images are not generated here."),
    "moderation": _refuse("it belongs to OpenAI's hosted platform."),
    # of Chat Completions, which would conflict with what is sent instead
    "messages": _refuse(_CHAT_NAME.format("input")),
    "max_tokens": _refuse(_CHAT_NAME.format("max_output_tokens")),
    "max_completion_tokens": _refuse(_CHAT_NAME.format("max_output_tokens")),
    "reasoning_effort": _refuse(_CHAT_NAME.format("reasoning.effort")),
    "response_format": _refuse(_CHAT_NAME.format("text.format")),
    "verbosity": _refuse(_CHAT_NAME.format("text.verbosity")),
    "logprobs": _refuse(_CHAT_NAME.format("include': ['message.output_text.logprobs'] or 'top_logprobs")),
    "functions": _refuse(_CHAT_NAME.format("tools")),
    "function_call": _refuse(_CHAT_NAME.format("tool_choice")),
    "n": _refuse_unless(1, "a response is one answer."),
}

# client_metadata is Codex's and request_id vLLM's; the upstream needs neither.
_NOT_FORWARDED = (
    PARAMETERS.keys() | REFUSED.keys() | {"input", "previous_input_messages", "tools", "client_metadata", "request_id"}
)
