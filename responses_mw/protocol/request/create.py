"""Check the body of `POST /v1/responses`.

The checks follow the OpenAI reference, "Create a model response". Unknown fields (`top_k`, `seed`, `chat_template_kwargs`, ...)
are passed on unchanged, because the upstream may define them. Fields in `REFUSED` get a 400. Values that depend on the
settings, the headers or the history are checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, get_origin, get_type_hints

from ...errors import BadRequest
from .. import checks
from ..checks import Check, among, closed_object
from ..types import Item, Tool
from .configuration import check_reasoning, check_text, updates
from .items import parse_input, parse_previous
from .tools import check_form_of_choice, check_number_of_tools, check_tool_choice, check_tools

INCLUDABLE = frozenset(
    {"file_search_call.results", "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs"}
    | {"message.input_image.image_url", "computer_call_output.output.image_url"}
    | {"reasoning.encrypted_content", "message.output_text.logprobs"}
)
SERVICE_TIERS = frozenset({"auto", "default", "flex", "scale", "priority", "fast", "ultrafast"})
MAX_TOP_LOGPROBS = 20
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512

# -- checks of single parameters ---------------------------------------------------------------------------------------


def _conversation(value: Any, path: str) -> str:
    if isinstance(value, dict):
        value, path = checks.required(value, "id", path, checks.string), f"{path}.id"
    if not checks.string(value, path).startswith("conv_"):
        checks.invalid(path, f"'{value[:64]}'. Expected an ID that begins with 'conv_'.")
    return str(value)


def check_metadata(value: Any, path: str) -> dict[str, str]:
    metadata = checks.mapping(value, path)
    if len(metadata) > METADATA_PAIRS:
        expected = f"Expected at most {METADATA_PAIRS}, but got {len(metadata)} instead."
        checks.invalid(path, f"too many properties. {expected}", "object_above_max_properties")
    for key, text in metadata.items():
        checks.string(key, path, max_length=METADATA_KEY)
        checks.string(text, f"{path}.{key}", max_length=METADATA_VALUE)
    return metadata


_penalty = partial(checks.number, minimum=-2, maximum=2)


def _continuation_id(_value: Any, path: str) -> None:
    checks.unsupported(path, "all background responses share one queue.")


# -- the request -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """A checked request. Each `Annotated` field is a parameter of the API, with the parameter's check."""

    items: list[Item]  # items made from vLLM's `previous_input_messages`, then those of the `input`
    extra: dict[str, Any]  # members that are passed to the upstream unchanged
    size: int = 0  # size of the request's JSON in bytes, or 0 if the size is unknown
    tools: list[Tool] = field(default_factory=list)
    tool_choice: Any = "auto"
    background: Annotated[bool, checks.boolean] = False
    background_options: Annotated[
        dict[str, Any], closed_object(completion_window=among("soonest", "2h", "8h"), continuation_id=_continuation_id)
    ] = field(default_factory=dict)
    """When the response is needed (`completion_window`). This has no effect, because all background responses share a queue."""
    cache: Annotated[Any, checks.as_it_is] = None
    """The cache options, which `responses_mw.cache.policy` checks together with the `X-Responses-Cache` header."""
    context_management: Annotated[
        list[dict[str, Any]],
        checks.each(closed_object({"type": among("compaction")}, compact_threshold=partial(checks.integer, minimum=1))),
    ] = field(default_factory=list)
    conversation: Annotated[str | None, _conversation] = None  # the id
    enable_response_messages: Annotated[bool, checks.boolean] = False
    """Whether the document includes `input_messages` and `output_messages` (a vLLM extension)."""
    frequency_penalty: Annotated[float | None, _penalty] = None
    include: Annotated[
        frozenset[str], checks.chain(checks.each(among(*INCLUDABLE)), lambda values, _path: frozenset(values))
    ] = frozenset()
    instructions: Annotated[str | None, checks.string] = None
    max_output_tokens: Annotated[int | None, partial(checks.integer, minimum=1)] = None
    max_tool_calls: Annotated[int | None, partial(checks.integer, minimum=1)] = None
    metadata: Annotated[dict[str, str], check_metadata] = field(default_factory=dict)
    model: Annotated[str | None, checks.string] = None
    parallel_tool_calls: Annotated[bool | None, checks.boolean] = None
    presence_penalty: Annotated[float | None, _penalty] = None
    previous_response_id: Annotated[str | None, checks.string] = None
    prompt: Annotated[dict[str, Any] | None, checks.mapping] = None
    """Reference to the prompt template that `responses_mw.asgi.prompt_templates` has expanded into this request."""
    prompt_cache_key: Annotated[str | None, checks.string] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, checks.mapping] = None
    prompt_cache_retention: Annotated[str | None, among("in_memory", "24h")] = None
    reasoning: Annotated[dict[str, Any], check_reasoning] = field(default_factory=dict)
    safety_identifier: Annotated[str | None, checks.string] = None
    service_tier: Annotated[str | None, among(*SERVICE_TIERS)] = None
    store: Annotated[bool, checks.boolean] = True
    stream: Annotated[bool, checks.boolean] = False
    # Usage is always included, so include_usage, an option of Chat Completions, has no effect.
    stream_options: Annotated[
        dict[str, Any], closed_object(include_obfuscation=checks.boolean, include_usage=checks.boolean)
    ] = field(default_factory=dict)
    temperature: Annotated[float | None, partial(checks.number, minimum=0, maximum=2)] = None
    text: Annotated[dict[str, Any], check_text] = field(default_factory=dict)
    top_logprobs: Annotated[int | None, partial(checks.integer, minimum=0, maximum=MAX_TOP_LOGPROBS)] = None
    top_p: Annotated[float | None, partial(checks.number, minimum=0, maximum=1)] = None
    truncation: Annotated[str, among("auto", "disabled")] = "disabled"
    user: Annotated[str | None, checks.string] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include

    @property
    def wants_format(self) -> bool:
        return bool(self.text.get("format", {"type": "text"})["type"] != "text")

    @property
    def wants_summary(self) -> bool:
        return self.reasoning.get("summary") is not None


PARAMETERS: dict[str, Check] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(CreateResponse, include_extras=True).items()
    if get_origin(hint) is Annotated
}

_CHAT_NAME = "this is its name in Chat Completions; use '{}' instead."

REFUSED: dict[str, str] = {
    # in the reference, but not supported
    "access_programs": "it belongs to OpenAI's hosted platform.",
    "image": "images are not generated here.",
    "moderation": "it belongs to OpenAI's hosted platform.",
    # from the beta of the reference
    "betas": "there are no beta features here.",
    "multi_agent": "it belongs to OpenAI's hosted platform.",
    # from Chat Completions; if forwarded, they would conflict with the parameters that are sent upstream
    "messages": _CHAT_NAME.format("input"),
    "max_tokens": _CHAT_NAME.format("max_output_tokens"),
    "max_completion_tokens": _CHAT_NAME.format("max_output_tokens"),
    "reasoning_effort": _CHAT_NAME.format("reasoning.effort"),
    "response_format": _CHAT_NAME.format("text.format"),
    "verbosity": _CHAT_NAME.format("text.verbosity"),
    "logprobs": _CHAT_NAME.format("include': ['message.output_text.logprobs'] or 'top_logprobs"),
    "functions": _CHAT_NAME.format("tools"),
    "function_call": _CHAT_NAME.format("tool_choice"),
    "n": "a response has only one answer.",
}

STEERING = frozenset(
    # vLLM and SGLang: the order of requests, other servers to fetch from or to use, options of multimodal input and of plugins
    {"priority", "kv_transfer_params", "vllm_xargs", "mm_processor_kwargs", "media_io_kwargs", "data_parallel_rank"}
    | {"bootstrap_host", "bootstrap_port", "bootstrap_room", "lora_path", "session_params", "custom_logit_processor", "rid"}
    # Dynamo; llama.cpp: the slot and the adapters; Ollama: how long a model stays in memory
    | {"nvext", "id_slot", "lora", "keep_alive"}
    # LiteLLM: another server, credential or price
    | {"api_base", "base_url", "api_key", "api_version", "custom_llm_provider", "fallbacks", "model_list", "user_config"}
    | {"organization", "extra_headers", "mock_response", "input_cost_per_token", "output_cost_per_token"}
)
"""Fields with which a client would steer an upstream, or spend more there, in the name of the operator."""

# Codex sends client_metadata, and clients of vLLM send request_id. The upstream does not need these.
_OURS = frozenset({"input", "previous_input_messages", "tools", "tool_choice", "client_metadata", "request_id"})
_NOT_FORWARDED = PARAMETERS.keys() | REFUSED.keys() | _OURS


def parse(body: Any, size: int = 0) -> CreateResponse:
    """Check the decoded `body` of a request. `size` is the size of its JSON in bytes.

    Raises `BadRequest` for the first invalid value that is found. The error's `param` is the path of the value.
    """
    given = checks.body(body)
    _refuse_names(given)
    known = {name: PARAMETERS[name](value, name) for name, value in given.items() if name in PARAMETERS}
    _check_background(known)
    choice = given.get("tool_choice", "auto")
    check_form_of_choice(choice)  # before the tools, whose errors would hide it
    check_number_of_tools(given.get("tools"), given.get("input"))
    tools = check_tools(given.get("tools", []))
    items = _items(given)
    return CreateResponse(
        items=items,
        size=size,
        extra={name: value for name, value in given.items() if name not in _NOT_FORWARDED},
        tools=tools,
        tool_choice=check_tool_choice(choice, tools, items),
        **known,
    )


def configured(request: CreateResponse, items: Sequence[Item]) -> CreateResponse:
    """Return `request` with the parameters that the `configuration_update` items in `items` set."""
    members = updates(items)
    if not members:
        return request
    reasoning, text = ({**getattr(request, name), **members.get(name, {})} for name in ("reasoning", "text"))
    return replace(request, reasoning=reasoning, text=text)


def refuse_unknown(body: Any) -> None:
    """Raise `BadRequest` if `body` has an unknown field that is not null. `parse` itself accepts and forwards such fields.

    The message suggests a known field with a similar name, if there is one.
    """
    for name, value in body.items() if isinstance(body, dict) else ():
        if value is not None and name not in _NOT_FORWARDED:
            shown = name[:64]
            similar = get_close_matches(shown, _NOT_FORWARDED - REFUSED.keys(), 1)
            hint = f" Did you mean '{similar[0]}'?" if similar else ""
            raise BadRequest(f"Unknown parameter: '{shown}'.{hint}", param=shown, code="unknown_parameter")


def steering_fields(allowed: Iterable[str]) -> frozenset[str]:
    """Return the fields that steer the upstream, without those in `allowed`, where `*` allows all."""
    names = frozenset(name.casefold() for name in allowed)
    return frozenset() if "*" in names else STEERING - names


def refuse_steering(body: Any, refused: frozenset[str]) -> None:
    """Raise `BadRequest` if `body` has a field in `refused` that is not null. Some upstreams ignore the case of names."""
    for name, value in body.items() if refused and isinstance(body, dict) else ():
        if value is not None and name.casefold() in refused:
            shown = name[:64]
            raise BadRequest(f"'{shown}' is not accepted here. The setting upstream.allowed_fields allows it.", param=shown)


def _refuse_names(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name in REFUSED and (name != "n" or value != 1):
            checks.unsupported(name, REFUSED[name])
    if not given.keys() & {"input", "previous_response_id", "conversation"}:
        message = "One of 'input', 'previous_response_id' or 'conversation' must be provided."
        raise BadRequest(message, param="input", code="missing_required_parameter")
    if given.keys() >= {"previous_response_id", "conversation"}:
        message = "Only one of 'previous_response_id' and 'conversation' can be set."
        raise BadRequest(message, param="previous_response_id", code="mutually_exclusive_parameters")
    if given.get("previous_input_messages") and given.get("previous_response_id"):
        message = "Only one of `previous_input_messages` and `previous_response_id` can be set."  # as in vLLM
        raise BadRequest(message, param="previous_response_id", code="mutually_exclusive_parameters")


def _check_background(known: dict[str, Any]) -> None:
    window = known.get("background_options", {}).get("completion_window", "soonest")
    standard = known.get("service_tier", "auto") in ("auto", "default")
    if window != "soonest" and not (known.get("background") and standard and not known.get("stream")):
        path = "background_options.completion_window"
        checks.unsupported(path, f"'{window}' needs 'background': true, no 'stream', and the service tier 'auto' or 'default'.")


def _items(given: dict[str, Any]) -> list[Item]:
    """Return the items of vLLM's `previous_input_messages`, then those of the `input` (none for "" after other items)."""
    previous = parse_previous(given.get("previous_input_messages", []))
    if previous and given.get("input") == "":
        return previous
    items = parse_input(given.get("input", []))
    for index, item in enumerate(items[:-1]):
        if item["type"] == "compaction_trigger":
            checks.invalid(f"input[{index}]", "a 'compaction_trigger' must be the last input item.")
    return previous + items
