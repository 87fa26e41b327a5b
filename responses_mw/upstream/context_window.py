"""Truncate histories to the context windows of models (`truncation: auto`)."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import orjson

from ..errors import UpstreamError
from ..protocol.chat.truncation import Truncation, truncated
from ..protocol.types import ChatRequest, Item
from .caller import Caller
from .client import Upstream
from .servers import server_for
from .token_counting import count_tokens, is_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_MODELS = 1000
"""Maximum number of models in each cache."""
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
