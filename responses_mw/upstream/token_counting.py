"""Count the tokens of prompts.

The server's tokenizer is used if the prompt contains only text and the tokenizer accepts every parameter that the chat template
uses. Otherwise, the number of tokens is read from the `usage` of a short completion.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from ..errors import UpstreamError
from ..protocol.types import ChatRequest
from .caller import Caller
from .client import Upstream, member
from .servers import get_if_accepted, server_for
from .stream import ChatStream

_UNCOUNTED = frozenset(
    {"enable_response_messages", "frequency_penalty", "include", "max_output_tokens", "max_tool_calls", "presence_penalty"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store"}
    | {"stream", "stream_options", "temperature", "top_logprobs", "top_p", "user"}
)
_MIN_OUTPUT = 16  # the minimum of the Open Responses specification
_OF_THE_ANSWER = frozenset({"stream", "stream_options", "n", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens"})


async def count_tokens(upstream: Upstream, chat: ChatRequest, caller: Caller) -> int:
    """Return the number of prompt tokens of `chat`. Raises `UpstreamError` if the server fails or cannot count them."""
    tokens = await (await server_for(upstream, caller)).prompt_tokens(chat) if is_text(chat) else None
    return await count_by_completion(upstream, chat, caller) if tokens is None else len(tokens)


async def count_input(upstream: Upstream, body: dict[str, Any], caller: Caller) -> int:
    """Return the number of input tokens of the Responses request `body`. Raises the same errors as `count_tokens`."""
    counted = await get_if_accepted(upstream.post("/v1/responses/input_tokens", _without(body, _UNCOUNTED), caller))
    if isinstance(count := member(counted, "input_tokens"), int):
        return count
    probe = {**_without(body, _OF_THE_ANSWER), "max_output_tokens": _MIN_OUTPUT}
    if "tools" in probe:
        probe["tool_choice"] = "none"  # otherwise, the server would run the tools that the model calls
    return await _read_usage(await upstream.responses(probe, caller), "response", "usage", "input_tokens")


def is_text(chat: ChatRequest) -> bool:
    """Return whether `chat` contains only text."""
    parts = (part for message in chat["messages"] if isinstance(message.get("content"), list) for part in message["content"])
    return all(part.get("type") == "text" for part in parts)


def _without(chat: ChatRequest, names: frozenset[str]) -> ChatRequest:
    return {name: value for name, value in chat.items() if name not in names}


async def count_by_completion(upstream: Upstream, chat: ChatRequest, caller: Caller) -> int:
    """Request an answer of one token, and return the prompt tokens in its usage. Raises the same errors as `count_tokens`."""
    dialect = await upstream.dialect(caller)
    probe = {**_without(chat, _OF_THE_ANSWER), dialect.max_tokens: 1}
    return await _read_usage(await upstream.chat(probe, caller), "usage", "prompt_tokens")


async def _read_usage(answer: ChatStream, *members: str) -> int:
    """Return the last number at the path `members` in the chunks of `answer`. Raises `UpstreamError` if there is none."""
    count = None
    async with aclosing(answer):
        async for chunks in answer:
            for chunk in chunks:
                reported = member(chunk, *members)
                count = reported if isinstance(reported, int) else count
    if count is None:
        raise UpstreamError("The upstream has no tokenizer, and does not report the tokens of its answers.")
    return count
