"""Dialects: how Chat Completions servers differ from OpenAI's API. Each kind of server has one row of data.

To add a server, define a row, list it in `DIALECTS`, and add its name to the setting `upstream.dialect`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from . import checks

_HINTS = frozenset({"user", "safety_identifier", "prompt_cache_key"})
_TEMPLATE_WITHOUT_REASONING = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences between one kind of server and OpenAI's API.

    `refuses` maps unsupported sampling parameters, and `top_logprobs`, to the reasons. A value of 0 is dropped instead.
    """

    name: str
    owned_by: frozenset[str] = frozenset()  # values of a model's `owned_by` that only this kind of server sets
    # A path, and a check that the JSON response to a GET of this path is from this kind of server.
    probe: tuple[str, Callable[[Any], bool]] | None = None
    max_tokens: str = "max_tokens"  # parameter for the maximum number of tokens of the answer
    developer_role: bool = False  # whether developer is a role. If not, developer messages are sent as system messages
    hoist_system: bool = False  # whether system messages must come first, joined into one
    reasoning_field: str | None = None  # member of assistant messages for earlier reasoning, or None if there is no such member
    # How to set the effort: field (reasoning_effort), template (also chat_template_kwargs.enable_thinking) or refused.
    reasoning_effort: Literal["field", "template", "refused"] = "field"
    # field, template (chat_template_kwargs.verbosity) or refused. With refused, medium (the default) is dropped.
    verbosity: Literal["field", "template", "refused"] = "refused"
    # How to force a function: object, name (a bare string), only ("required", with only that function offered) or refused. With
    # refused, "required" gets a 400 as well.
    tool_choice: Literal["object", "name", "only", "refused"] = "object"
    # Whether tools are sent with tool_choice "none". This preserves the prefix cache of a server that leaves the tools in the
    # prompt, but the server must prevent calls itself. Other servers return a call as text (vLLM, llama.cpp) or as a call
    # (Ollama), or drop it and return an empty answer (some vLLM parsers). SGLang and TGI remove the tools from the prompt, as
    # vLLM does with --exclude-tools-when-tool-choice-none.
    tools_with_none: bool = False
    parallel_tool_calls: bool = True  # whether the server accepts the parameter. It is always enforced on the answer
    response_format: Literal["openai", "value", "refused"] = "openai"  # value: the schema is a member of that name (TGI)
    # How the server treats a response format beside tools: together (calls bypass the format), strict (calls of some models do,
    # if a function is strict) or apart (the format prevents calls, or the server rejects it). See `combination`.
    format_with_tools: Literal["together", "strict", "apart"] = "together"
    # Whether an answer in a format is requested with tools and tool_choice "none" after a draft. The prompt is then that of the
    # draft, so the server can reuse its prefix cache, but the format must prevent calls.
    tools_with_answer: bool = False
    parse_arguments: bool = True  # whether the server parses the arguments of earlier calls and so requires a JSON object
    object_arguments: bool = False  # whether arguments are sent as an object instead of a string
    parameters_required: bool = False  # whether each function must have parameters
    content_with_calls: bool = True  # whether an assistant message can have both text and calls
    image_urls: bool = True  # whether images can be http(s) URLs. If not, only data URLs are accepted
    audio: bool = False
    video: bool = False
    pdf: bool = False
    prefill: str | None = None  # parameter that makes the server continue an incomplete last message, or None if it cannot
    stream_usage: bool = True  # whether the server accepts stream_options.include_usage
    # Members of stream_options that add the usage to each chunk. They are sent only to check that a message is continued.
    usage_per_chunk: dict[str, Any] = field(default_factory=dict)
    # Parameters that do not affect the answer and that the server accepts. Others of this kind are dropped, but
    # prompt_cache_retention and prompt_cache_options get a 400.
    hints: frozenset[str] = frozenset()
    top_p_one: bool = True  # whether top_p: 1 is valid. TGI rejects this value, although it is the default
    stop_is_list: bool = False  # whether stop must be a list, even for one string
    refuses: dict[str, str] = field(default_factory=dict)
    # Parameters that make the server answer with the single word yes or no.
    yes_or_no: dict[str, Any] = field(default_factory=dict)
    # Parameters that make the model answer without reasoning.
    no_reasoning: dict[str, Any] = field(default_factory=dict)
    # Parameters that make the server return the prompt and all token ids, which `ResponseMessages` collects.
    raw_parameters: dict[str, Any] = field(default_factory=dict)

    def unsupported(self, path: str, why: str) -> NoReturn:
        """Raise `NotSupported` for the value at `path`. `why` is a predicate such as "does not accept audio"."""
        checks.unsupported(path, f"the upstream ({self.name}) {why}.")

    def check(self, name: str) -> None:
        """Raise `NotSupported` if `refuses` contains the parameter `name`. Call this only if the request sets the parameter."""
        if name in self.refuses:
            checks.unsupported(name, self.refuses[name])


OPENAI = Dialect(
    name="openai",
    owned_by=frozenset({"system", "openai-internal"}),
    max_tokens="max_completion_tokens",
    developer_role=True,
    tools_with_none=True,
    verbosity="field",
    parse_arguments=False,
    audio=True,
    pdf=True,
    hints=_HINTS | {"prompt_cache_retention", "prompt_cache_options", "service_tier"},
)
VLLM = Dialect(
    name="vllm",
    owned_by=frozenset({"vllm"}),
    max_tokens="max_completion_tokens",
    developer_role=True,
    reasoning_field="reasoning",
    reasoning_effort="template",
    verbosity="template",
    format_with_tools="strict",
    tools_with_answer=True,
    audio=True,
    video=True,
    prefill="continue_final_message",
    usage_per_chunk={"continuous_usage_stats": True},
    yes_or_no={"structured_outputs": {"choice": ["yes", "no"]}},
    no_reasoning=_TEMPLATE_WITHOUT_REASONING,
    raw_parameters={"return_token_ids": True, "return_prompt_text": True},
)
TGI = Dialect(
    name="tgi",
    probe=("/info", lambda info: isinstance(info, dict) and {"model_id", "max_total_tokens"} <= info.keys()),
    hoist_system=True,
    reasoning_effort="refused",
    tool_choice="name",
    parallel_tool_calls=False,
    response_format="value",
    format_with_tools="apart",
    object_arguments=True,
    parameters_required=True,
    content_with_calls=False,
    top_p_one=False,
    stop_is_list=True,
    yes_or_no={"response_format": {"type": "regex", "value": "(yes|no)"}},
    refuses={"presence_penalty": "TGI treats it as a repetition penalty."},
)
SGLANG = Dialect(
    name="sglang",
    yes_or_no={"regex": "(yes|no)"},
    no_reasoning=_TEMPLATE_WITHOUT_REASONING,
    owned_by=frozenset({"sglang"}),
    reasoning_field="reasoning_content",
    verbosity="template",
    format_with_tools="apart",
    video=True,
    prefill="continue_final_message",
)
LLAMACPP = Dialect(
    name="llamacpp",
    yes_or_no={"grammar": 'root ::= "yes" | "no"'},
    no_reasoning=_TEMPLATE_WITHOUT_REASONING,
    owned_by=frozenset({"llamacpp"}),
    hoist_system=True,
    reasoning_field="reasoning_content",
    verbosity="template",
    tool_choice="only",
    parallel_tool_calls=False,
    format_with_tools="apart",
    audio=True,
    prefill="continue_final_message",
)
OLLAMA = Dialect(
    name="ollama",
    no_reasoning={"reasoning_effort": "none"},
    owned_by=frozenset({"library"}),
    probe=("/api/version", lambda version: isinstance(version, dict) and version.keys() == {"version"}),
    reasoning_field="reasoning",
    tool_choice="refused",
    parallel_tool_calls=False,
    format_with_tools="apart",
    image_urls=False,
)
LITELLM = Dialect(
    name="litellm",
    probe=("/health/liveliness", lambda health: isinstance(health, str) and "alive" in health),
    max_tokens="max_completion_tokens",
    developer_role=True,
    reasoning_field="reasoning_content",
    verbosity="field",
    format_with_tools="apart",  # depends on the server behind it
    parse_arguments=False,
    audio=True,
    pdf=True,
    hints=_HINTS | {"service_tier"},
)
TRANSFORMERS = Dialect(
    name="transformers",
    hoist_system=True,
    reasoning_effort="refused",
    tool_choice="refused",
    parallel_tool_calls=False,
    response_format="refused",
    stream_usage=False,
    refuses={
        "top_logprobs": "transformers serve does not report log probabilities.",
        "presence_penalty": "transformers serve does not support it.",
    },
)

DIALECTS = {row.name: row for row in (OPENAI, VLLM, TGI, SGLANG, LLAMACPP, OLLAMA, LITELLM, TRANSFORMERS)}
