"""The finish reasons of chat completions and their meanings."""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import Any


class Ending(Enum):
    """How an answer ended."""

    COMPLETE = auto()
    LIMIT = auto()
    """A limit, usually of tokens, cut the answer off."""
    FILTER = auto()
    """A filter for unwanted content cut the answer off."""
    FAULT = auto()
    """The upstream failed. The answer is interrupted and can be continued."""
    UNKNOWN = auto()
    """The word is not in the table. The answer counts as complete, unless a call in it has been cut off."""


_WORDS: dict[Ending, tuple[str, ...]] = {
    Ending.COMPLETE: (
        # OpenAI, and its compatible servers
        *("stop", "tool_calls", "function_call", "function_calls", "tool_call"),
        # TGI, watsonx, Together, Fireworks, Ollama
        *("eos", "eos_token", "stop_sequence", "stop_token", "stop_str", "stop_string", "end_of_text"),
        # Anthropic and Bedrock, Cohere, and gateways that pass their words on
        *("end_turn", "tool_use", "complete", "completed", "finish", "finished", "done", "end", "success"),
    ),
    Ending.LIMIT: (
        # OpenAI, Anthropic, Gemini, Mistral, GLM, watsonx, Cohere
        *("length", "max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "max_length"),
        *("model_length", "model_context_window_exceeded", "context_window_exceeded", "context_length_exceeded"),
        *("context_length", "max_context_length", "max_model_len", "token_limit", "error_limit", "time_limit", "incomplete"),
        "repetition",  # vLLM stops a model that repeats itself
    ),
    Ending.FILTER: (
        *("content_filter", "content_filtered", "sensitive", "safety", "content_safety", "moderation", "refusal"),
        *("guardrail_intervened", "guardrails", "error_toxic", "risk", "censored"),
        # Gemini
        *("recitation", "blocklist", "prohibited_content", "spii", "language", "image_safety", "image_prohibited_content"),
    ),
    Ending.FAULT: (
        *("abort", "aborted", "error", "errored", "fail", "failed", "failure", "fault", "exception", "cancelled", "canceled"),
        *("insufficient_system_resource", "insufficient_system_resources", "network_error", "connection_error"),
        *("internal_error", "internal_server_error", "server_error", "model_error", "engine_error", "system_error"),
        *("unavailable", "overloaded", "engine_overloaded", "timeout", "timed_out", "interrupted"),
        *("malformed_function_call", "unexpected_tool_call", "malformed_response"),  # Gemini
    ),
}
_NOT_FINISHED = ("", "null", "none", "not_finished", "finish_reason_unspecified", "unspecified", "in_progress", "running")
"""Words that servers send with every chunk before the last one."""
_MAX_LENGTH = 64  # maximum length of a finish reason. A longer one is cut off
_MAX_REMEMBERED = 64  # maximum number of words whose key is remembered, because upstreams choose them
_TYPES = ("type", "reason", "finish_reason")  # members of an object that hold the word
_SEPARATORS = re.compile(r"[\W_]+")


@lru_cache(_MAX_REMEMBERED)
def _key(word: str) -> str:
    """Normalize a word for comparison. Gateways in other languages change case and separators (`MAX_TOKENS`, `toolCalls`)."""
    return _SEPARATORS.sub("", word.casefold())


_ENDINGS = {_key(word): ending for ending, words in _WORDS.items() for word in words}
_IGNORED = frozenset(map(_key, _NOT_FINISHED))


def finish_reason_of(value: Any) -> str | None:
    """Return the word in a chunk's `finish_reason`, which may also be an object. Return None if the answer is not finished."""
    if isinstance(value, dict):
        value = next((value[name] for name in _TYPES if value.get(name)), None)
    if value is None or value is False:
        return None
    word = str(value)[:_MAX_LENGTH]
    return None if _key(word) in _IGNORED else word


def ending_of(finish_reason: str) -> Ending:
    """Return how an answer with this finish reason ended."""
    key = _key(finish_reason)
    return _ENDINGS.get(key) or _ENDINGS.get(key.removeprefix("finishreason"), Ending.UNKNOWN)
