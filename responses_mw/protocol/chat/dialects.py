"""Dialects: how each Chat Completions server differs from OpenAI's API. One row of data each.

To add a server, add its row and, if it can be detected, a check in `upstream.detection`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from ..request import checks

_HINTS = frozenset({"user", "safety_identifier", "prompt_cache_key"})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of upstream. `refuses` maps the path of a request parameter to the reason why it cannot be honoured."""

    name: str
    max_tokens: str = "max_tokens"
    developer_role: bool = False  # whether developer is a role; otherwise such messages are sent as system
    hoist_system: bool = False  # whether system messages must come first, joined into one
    reasoning_field: str | None = None  # the member of an assistant message for earlier reasoning
    # field: reasoning_effort; template: also chat_template_kwargs.enable_thinking; refused
    reasoning_effort: str = "field"
    verbosity: str = "refused"  # field, template (chat_template_kwargs.verbosity) or refused
    # How to force a function: object, name (a bare string), only (offer only that one with "required"), refused.
    tool_choice: str = "object"
    # Whether tools are sent with tool_choice "none". This keeps the prefix cache if the server leaves them in the prompt and
    # prevents calls. Other servers do not prevent calls: a call arrives as text (vLLM, llama.cpp), is dropped so that the
    # answer is empty (some vLLM parsers), or is a call (Ollama). SGLang and TGI remove the tools from the prompt themselves, as
    # vLLM does with --exclude-tools-when-tool-choice-none.
    tools_with_none: bool = False
    parallel_tool_calls: bool = True  # whether the parameter is supported. It is enforced on the answer in any case
    response_format: str = "openai"  # openai, value (TGI: the schema under value) or refused
    parse_arguments: bool = True  # whether the server parses the arguments of earlier calls and so requires a JSON object
    object_arguments: bool = False  # whether arguments are sent as an object instead of a string
    parameters_required: bool = False
    content_with_calls: bool = True  # whether an assistant message can have both text and calls
    image_urls: bool = True  # whether images can be http(s) URLs; otherwise only data URLs
    audio: bool = False
    video: bool = False
    pdf: bool = False
    prefill: str | None = None  # the parameter that continues an incomplete last message
    stream_usage: bool = True
    # Parameters that do not affect the answer and that the server accepts. For other servers they are only echoed.
    hints: frozenset[str] = frozenset()
    top_p_one: bool = True  # whether top_p: 1 is valid. TGI rejects it, although it is the default
    stop_is_list: bool = False
    refuses: dict[str, str] = field(default_factory=dict)

    def unsupported(self, path: str, why: str) -> NoReturn:
        """Refuse a request whose value at `path` the upstream does not support."""
        checks.unsupported(path, f"the upstream ({self.name}) {why}.")

    def check(self, path: str) -> None:
        """Refuse a request that sets the parameter at `path` if the upstream cannot honour it."""
        if path in self.refuses:
            checks.unsupported(path, self.refuses[path])


OPENAI = Dialect(
    name="openai",
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
    max_tokens="max_completion_tokens",
    developer_role=True,
    reasoning_field="reasoning",
    reasoning_effort="template",
    verbosity="template",
    audio=True,
    video=True,
    prefill="continue_final_message",
)
TGI = Dialect(
    name="tgi",
    hoist_system=True,
    reasoning_effort="refused",
    tool_choice="name",
    parallel_tool_calls=False,
    response_format="value",
    object_arguments=True,
    parameters_required=True,
    content_with_calls=False,
    top_p_one=False,
    stop_is_list=True,
    refuses={"presence_penalty": "TGI treats it as a repetition penalty."},
)
SGLANG = Dialect(
    name="sglang",
    reasoning_field="reasoning_content",
    verbosity="template",
    video=True,
    prefill="continue_final_message",
)
LLAMACPP = Dialect(
    name="llamacpp",
    hoist_system=True,
    reasoning_field="reasoning_content",
    verbosity="template",
    tool_choice="only",
    parallel_tool_calls=False,
    audio=True,
    prefill="continue_final_message",
)
OLLAMA = Dialect(
    name="ollama",
    reasoning_field="reasoning",
    tool_choice="refused",
    parallel_tool_calls=False,
    image_urls=False,
)
LITELLM = Dialect(
    name="litellm",
    max_tokens="max_completion_tokens",
    developer_role=True,
    reasoning_field="reasoning_content",
    verbosity="field",
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
