"""How many tokens the prompt of a request has: the server's own tokenizer says, or one token of an answer.

A server's tokenizer renders the chat as its completions do, if it is given all that its template sees. What it cannot be
given, or cannot count (images), is counted by asking for one token: the ``usage`` then tells.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ..errors import UpstreamError
from ..protocol.types import ChatRequest
from .caller import Caller
from .client import Upstream
from .stream import ChatStream

Counter = Callable[[Upstream, ChatRequest, Caller], Awaitable[Any]]
"""What the server's tokenizer counts; None (or anything but a number) where it does not."""

_SHOWN_BY_VLLM = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
_SHOWN_BY_LLAMACPP = ("messages", "tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs")
_UNSEEN_BY_SGLANG = frozenset({"chat_template_kwargs", "reasoning_effort", "continue_final_message"})
_UNCOUNTED = frozenset(
    {"enable_response_messages", "frequency_penalty", "include", "max_output_tokens", "max_tool_calls", "presence_penalty"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store"}
    | {"stream", "stream_options", "temperature", "top_logprobs", "top_p", "user"}
)
_LEAST_OUTPUT = 16  # what the Open Responses specification allows
_OF_THE_ANSWER = frozenset({"stream", "stream_options", "n", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens"})


async def count_tokens(upstream: Upstream, chat: ChatRequest, caller: Caller) -> int:
    """The tokens of the prompt that ``chat`` makes. Raises ``UpstreamError``, also where the server counts none."""
    dialect = await upstream.dialect(caller)
    tokenizer = TOKENIZERS.get(dialect.name)
    if tokenizer is not None and is_text(chat):
        count = await tokenizer(upstream, chat, caller)
        if isinstance(count, int):
            return count
    return await _by_completion(upstream, {**_without(chat, _OF_THE_ANSWER), dialect.max_tokens: 1}, caller)


async def count_input(upstream: Upstream, body: dict[str, Any], caller: Caller) -> int:
    """As ``count_tokens``, of a request for a whole response: such a server may count by itself, or an answer tells."""
    count = _member(await _asked(upstream, "/v1/responses/input_tokens", _without(body, _UNCOUNTED), caller), "input_tokens")
    if isinstance(count, int):
        return count
    asked = {**_without(body, _OF_THE_ANSWER), "max_output_tokens": _LEAST_OUTPUT}
    if "tools" in asked:
        asked["tool_choice"] = "none"  # such a server would carry out what the model calls
    return await _used(upstream.responses(asked, caller), _of_response)


def can_count(dialect: str, chat: ChatRequest) -> bool:
    """Whether the server's tokenizer may count ``chat``, so that no answer need be begun."""
    return dialect in TOKENIZERS and is_text(chat)


def is_text(chat: ChatRequest) -> bool:
    """Whether ``chat`` has nothing in it but text."""
    parts = (part for message in chat["messages"] if isinstance(message.get("content"), list) for part in message["content"])
    return all(part.get("type") == "text" for part in parts)


def _without(chat: ChatRequest, names: frozenset[str]) -> ChatRequest:
    return {name: value for name, value in chat.items() if name not in names}


def _only(chat: ChatRequest, names: tuple[str, ...]) -> ChatRequest:
    return {name: chat[name] for name in names if name in chat}


# -- one function for each tokenizer ------------------------------------------------------------------------------------------


async def _vllm(upstream: Upstream, chat: ChatRequest, caller: Caller) -> Any:
    """``/tokenize`` has no ``reasoning_effort`` and ``documents``: the template gets them another way."""
    given = _only(chat, ("reasoning_effort", "documents"))
    arguments = {**(chat.get("chat_template_kwargs") or {}), **given}
    body = {**_only(chat, _SHOWN_BY_VLLM), **({"chat_template_kwargs": arguments} if arguments else {})}
    return _member(await _asked(upstream, "/tokenize", body, caller), "count")


async def _sglang(upstream: Upstream, chat: ChatRequest, caller: Caller) -> Any:
    if chat.keys() & _UNSEEN_BY_SGLANG:
        return None
    return _member(await _asked(upstream, "/tokenize", _only(chat, ("model", "messages", "tools")), caller), "count")


async def _tgi(upstream: Upstream, chat: ChatRequest, caller: Caller) -> Any:
    tokens = _member(await _asked(upstream, "/chat_tokenize", chat, caller), "tokenize_response")
    return len(tokens) if isinstance(tokens, list) else None


async def _llamacpp(upstream: Upstream, chat: ChatRequest, caller: Caller) -> Any:
    prompt = _member(await _asked(upstream, "/apply-template", _only(chat, _SHOWN_BY_LLAMACPP), caller), "prompt")
    if not isinstance(prompt, str):
        return None
    body = {"content": prompt, "add_special": True, "parse_special": True}
    tokens = _member(await _asked(upstream, "/tokenize", body, caller), "tokens")
    return len(tokens) if isinstance(tokens, list) else None


TOKENIZERS: dict[str, Counter] = {"vllm": _vllm, "sglang": _sglang, "tgi": _tgi, "llamacpp": _llamacpp}


async def _asked(upstream: Upstream, path: str, body: ChatRequest, caller: Caller) -> Any:
    """The server's answer; None where it refuses, so that its completions say why, or know better."""
    try:
        return await upstream.post(path, body, caller)
    except UpstreamError as error:
        if error.status in (401, 403) or error.status >= 500:
            raise
        return None


def _member(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None


async def _by_completion(upstream: Upstream, chat: ChatRequest, caller: Caller) -> int:
    return await _used(upstream.chat(chat, caller), _of_chunk)


async def _used(answer: ChatStream, count_of: Callable[[dict[str, Any]], Any]) -> int:
    """What ``answer`` says that its prompt had."""
    count = None
    async with aclosing(answer):
        await answer.open()
        async for chunks in answer:
            for chunk in chunks:
                told = count_of(chunk) if isinstance(chunk, dict) else None
                count = told if isinstance(told, int) else count
    if count is None:
        raise UpstreamError("The upstream has no tokenizer, and does not count the tokens of its answers.")
    return count


def _of_chunk(chunk: dict[str, Any]) -> Any:
    return _member(chunk.get("usage"), "prompt_tokens")


def _of_response(event: dict[str, Any]) -> Any:
    return _member(_member(event.get("response"), "usage"), "input_tokens")
