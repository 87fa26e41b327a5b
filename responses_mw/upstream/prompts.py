"""Count the tokens of prompts, truncate histories (`truncation: auto`), and check that interrupted messages can be continued.

The server's tokenizer is used if the prompt contains only text and the tokenizer accepts every parameter that the chat template
uses. Otherwise, the number of tokens is read from the `usage` of a short completion.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from ..errors import UpstreamError, UpstreamTimeout
from ..protocol.chat.truncation import Truncation, truncated
from ..protocol.types import ChatRequest, Item
from .caller import Caller
from .client import Upstream, member
from .servers import accepted, server_for
from .stream import ChatStream

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_MODELS = 1000
"""Maximum number of models in each cache."""
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
    counted = await accepted(upstream.post("/v1/responses/input_tokens", _without(body, _UNCOUNTED), caller))
    if isinstance(count := member(counted, "input_tokens"), int):
        return count
    probe = {**_without(body, _OF_THE_ANSWER), "max_output_tokens": _MIN_OUTPUT}
    if "tools" in probe:
        probe["tool_choice"] = "none"  # otherwise, the server would run the tools that the model calls
    return await _used(await upstream.responses(probe, caller), "response", "usage", "input_tokens")


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
    return await _used(await upstream.chat(probe, caller), "usage", "prompt_tokens")


async def _used(answer: ChatStream, *members: str) -> int:
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


# -- the context window ------------------------------------------------------------------------------------------------

ChatOf = Callable[[Sequence[Item]], Awaitable[ChatRequest]]
"""Returns the chat request that shows a list of items to the model."""

_LENGTH_TTL = 300.0  # seconds
_MIN_BYTES_PER_TOKEN = 2.0  # low, because it is better to remove too much than too little
_BYTES_PER_TOKEN = 4.0  # of English text
_ANSWER_SHARE = 8  # after a cut, at least one eighth of the length is left for the answer
_MAX_CUTS = 10  # if the prompt is then still too long, all items that can be removed are removed
_MARGIN = 0.9  # share of the limit to use if tokens are estimated

_LENGTH = re.compile(
    r"(?:maximum context length (?:is|of)|context length is only|max_model_len|model length of|model's context length \("
    r"|available context size \(|`inputs` must have less than|`max_new_tokens` must be <=)\s*(\d{1,12})"
)
_COUNT = re.compile(
    r"(\d{1,12}) in the messages|(\d{1,12}) tokens from the input messages|resulted in (\d{1,12}) tokens"
    r"|contains (\d{1,12}) input tokens|The input \((\d{1,12}) tokens|request \((\d{1,12}) tokens|[Gg]iven: (\d{1,12})"
    r"|prompt length (\d{1,12})"
)


class ContextWindow:
    """Fits requests into the context windows of one upstream's models.

    The context length comes from the server's metadata. If it is not there, it is read from the error that the server sends
    for a prompt that is too long. After this error, a shorter request is sent once. If the server has no tokenizer, the number
    of tokens is also read from the error, or estimated.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._lengths: dict[str, tuple[float, int | None]] = {}
        """The expiry time and the context length, if known, of each model."""

    async def ask(
        self, items: Sequence[Item], chat_of: ChatOf, ask: Callable[[ChatRequest], Awaitable[T]], caller: Caller
    ) -> T:
        """Call `ask` with a request for the `items` that fit the context window, and return the result.

        If the upstream reports that the prompt is still too long, call `ask` once more with fewer items. If that is
        impossible, raise the upstream's error.
        """
        chat = await chat_of(items)
        length = await self._length(chat["model"], caller)
        if length is not None and len(orjson.dumps(chat)) > length - _answer_of(chat):  # a token has at least one byte
            chat = await self._cut(items, chat_of, length, caller)
        try:
            return await ask(chat)
        except UpstreamError as refusal:
            stated = _LENGTH.search(refusal.message)
            if refusal.code != "context_length_exceeded" or stated is None:
                raise
            length = int(stated[1])
            self._remember(chat["model"], length)
            shorter = await self._cut(items, chat_of, length, caller, refusal.message)
            if shorter["messages"] == chat["messages"]:
                raise
        return await ask(shorter)

    async def _cut(
        self, items: Sequence[Item], chat_of: ChatOf, length: int, caller: Caller, refusal: str | None = None
    ) -> ChatRequest:
        """Remove the oldest items until the rest fits, and return the request for the rest.

        If the tokens cannot be counted, their number is estimated from the error message `refusal`, if there is one. Otherwise,
        all items are kept.
        """
        chat = await chat_of(items)
        if not (is_text(chat) and (await server_for(self._upstream, caller)).has_tokenizer):
            if refusal is None or not len(Truncation(items)):
                return chat
            share = _MARGIN * _target(chat, length) / _estimate(chat, refusal, _MIN_BYTES_PER_TOKEN)
            return await chat_of(_cut_to_share(items, chat, share))
        limit, cuts = length - _answer_of(chat), 0
        while len(Truncation(items)) and (count := await self._count(chat, length, caller)) > limit:
            limit = _target(chat, length)
            cuts += 1
            items = _cut_to_share(items, chat, limit / max(count, 1) if cuts < _MAX_CUTS else 0.0)
            chat = await chat_of(items)
        return chat

    async def _count(self, chat: ChatRequest, length: int, caller: Caller) -> float:
        try:
            return await count_tokens(self._upstream, chat, caller)
        except UpstreamError as refusal:
            if refusal.code != "context_length_exceeded":
                raise
            # A low estimate is sufficient, because `_cut` counts again after it has removed items.
            return max(_estimate(chat, refusal.message, _BYTES_PER_TOKEN), length + 1)

    async def _length(self, model: str, caller: Caller) -> int | None:
        until, length = self._lengths.get(model, (0.0, None))
        if until > time.monotonic():
            return length
        server = await server_for(self._upstream, caller)
        try:
            stated = await server.context_length(model)
        except UpstreamError as error:
            logger.debug("could not read the context length of %s from the upstream: %s", model, error.message)
            return None
        length = stated if type(stated) is int and stated > 0 else length
        self._remember(model, length)
        return length

    def _remember(self, model: str, length: int | None) -> None:
        if len(self._lengths) >= _MAX_MODELS:  # clients choose the names
            self._lengths.clear()
        self._lengths[model] = (time.monotonic() + _LENGTH_TTL, length)


def _answer_of(chat: ChatRequest) -> int:
    """Return the maximum number of tokens in the answer to `chat`, or 1 if `chat` sets no maximum."""
    wanted = chat.get("max_completion_tokens") or chat.get("max_tokens")
    return wanted if isinstance(wanted, int) else 1


def _target(chat: ChatRequest, length: int) -> int:
    """Return the maximum number of tokens of a truncated prompt, so that there is room for a useful answer."""
    return length - max(_answer_of(chat), length // _ANSWER_SHARE)


def _estimate(chat: ChatRequest, refusal: str, bytes_per_token: float) -> float:
    """Return the token count stated in the error message `refusal`, or an estimate from the size of `chat`."""
    count = _COUNT.search(refusal)
    if count is not None:
        return max(1, int(next(filter(None, count.groups()))))
    return len(orjson.dumps(chat)) / bytes_per_token


def _cut_to_share(items: Sequence[Item], chat: ChatRequest, share: float) -> list[Item]:
    """Remove at least one of the oldest blocks of `items`, so that `chat` shrinks to `share` of its size. Return the rest."""
    sizes = {id(item): len(orjson.dumps(item)) for item in items}
    cut = (1 - share) * len(orjson.dumps(chat)) / len(orjson.dumps(chat["messages"]))
    limit = (1 - cut) * sum(sizes[id(item)] for item in items)
    return truncated(Truncation(items).without(1), lambda some: sum(sizes[id(item)] for item in some) <= limit)


# -- the continuation of messages --------------------------------------------------------------------------------------

_REFUSAL_TTL = 300.0
"""Seconds that a negative result is cached for a model."""
_EXTRA_TOKENS = 16
"""Number of tokens to decode before the text, because the text may begin within a token."""
_SAMPLE = "One two three"


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt that ends with the text to continue."""

    tokens: list[Any]
    is_trimmed: bool
    """Whether the chat template removed white space from the end of the text."""


class PrefillProof:
    """Checks whether one upstream continues the last message of a request instead of answering it.

    The result depends on the server, the model and its chat template. A server that does not continue the message reports no
    error, but begins a new message. Two conditions are therefore checked:

    1. The prompt that the server renders for the request must end with the text. vLLM returns the prompt through `/tokenize`
       and `/detokenize`, llama.cpp through `/apply-template`.
    2. The server must use this prompt, which vLLM with gpt-oss does not. Therefore, each model answers a sample. The
       sample's rendered prompt must have as many tokens as the usage of the answer reports. This result is cached.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._verdicts: dict[str, tuple[float, bool]] = {}
        """The expiry time of each model's result, and whether the model continues messages."""
        self._timed_out = 0.0
        """The time when the upstream last failed to answer a sample in time."""
        self._trying = asyncio.Lock()

    async def holds(self, model: str, caller: Caller) -> bool:
        """Return whether `model` continues the last message. Raises `UpstreamError` if a request to the upstream fails."""
        dialect = await self._upstream.dialect(caller)
        if not (dialect.prefill and (await server_for(self._upstream, caller)).shows_prompts):
            return False
        asked = time.monotonic()
        async with self._trying:  # when a server dies, many answers are interrupted at once
            expires, verdict = self._verdicts.get(model, (0.0, False))
            if time.monotonic() < expires:
                return verdict
            if self._timed_out > asked:  # the server hangs, and these answers must not wait for it one after the other
                raise UpstreamTimeout("The upstream did not answer in time.")
            try:
                verdict = await self._try_sample(model, dialect.prefill, caller)
            except UpstreamTimeout:
                self._timed_out = time.monotonic()
                raise
            if len(self._verdicts) >= _MAX_MODELS:
                self._verdicts.clear()
            self._verdicts[model] = (float("inf") if verdict else time.monotonic() + _REFUSAL_TTL, verdict)
            logger.info("interrupted answers of %s %s continued", model, "can be" if verdict else "cannot be")
            return verdict

    async def _try_sample(self, model: str, prefill: str, caller: Caller) -> bool:
        messages = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": _SAMPLE}]
        chat = {"model": model, "messages": messages, prefill: True, "add_generation_prompt": False}
        shown = await self.prompt(chat, _SAMPLE, caller)
        if shown is None:
            return False
        return await accepted(count_by_completion(self._upstream, chat, caller)) == len(shown.tokens)

    async def prompt(self, chat: ChatRequest, text: str, caller: Caller) -> ShownPrompt | None:
        """Return the prompt that the server renders for `chat`. The last message of `chat` must be `text`.

        Return None if the server cannot return the prompt, or if the prompt does not end with `text` (apart from white
        space). Raises `UpstreamError` if a request fails.
        """
        server = await server_for(self._upstream, caller)
        tokens = await server.prompt_tokens(chat)
        if tokens is None:
            return None
        prompt = await server.prompt_end(chat, tokens[-(len(text.encode()) + _EXTRA_TOKENS) :])
        if prompt is None or not prompt.rstrip().endswith(text.strip()):
            return None
        return ShownPrompt(tokens, is_trimmed=not prompt.endswith(text.lstrip()))
