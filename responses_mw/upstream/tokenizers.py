"""How many tokens the prompt of a chat request has: the server's own tokenizer says, or one token of an answer.

A server's tokenizer renders the chat as its completions do, if it is given all that its template sees. What it cannot be
given, or cannot count (images), is counted by asking for one token: the ``usage`` then tells.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ..errors import UpstreamError
from ..protocol.types import ChatRequest
from .client import Caller, Upstream

Counter = Callable[[Upstream, ChatRequest, Caller], Awaitable[Any]]
"""What the server's tokenizer counts; None (or anything but a number) where it does not."""

_SHOWN_BY_VLLM = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
_SHOWN_BY_LLAMACPP = ("messages", "tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs")
_UNSEEN_BY_SGLANG = frozenset({"chat_template_kwargs", "reasoning_effort", "continue_final_message"})
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
    count = None
    async with aclosing(upstream.chat(chat, caller)) as answer:
        await answer.open()
        async for chunks in answer:
            for chunk in chunks:
                usage = chunk.get("usage") if isinstance(chunk, dict) else None
                count = usage.get("prompt_tokens") if isinstance(usage, dict) else count
    if not isinstance(count, int):
        raise UpstreamError("The upstream has no tokenizer, and does not count the tokens of its completions.")
    return count
