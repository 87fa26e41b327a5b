"""``truncation: auto`` against a running server: how much its model takes, and what of a history fits.

The length is what the server says of itself, or what its refusal says. What does not fit is counted by the server's tokenizer,
where it has one; else the refusal tells how many tokens there were, or a guess must do. A refusal is answered once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import orjson

from ..errors import UpstreamError
from ..protocol.chat.truncation import Cuts, truncated
from ..protocol.types import ChatRequest, Item
from .caller import Caller
from .client import Upstream
from .tokenizers import can_count, count_tokens

logger = logging.getLogger(__name__)

ChatOf = Callable[[Sequence[Item]], Awaitable[ChatRequest]]
"""The chat request that shows the model these items."""
T = TypeVar("T")

_LENGTHS_LAST = 300.0  # seconds
_BYTES_A_TOKEN = 2.0  # where nothing tells; few, so that what remains is rather too little than too much
_BYTES_OF_TEXT = 4.0  # as it is in English
_FOR_AN_ANSWER = 8  # the share of the length that is left for it, at the least, where something is cut
_MARGIN = 0.9  # of the room, where tokens are not counted

_LENGTH = re.compile(
    r"(?:maximum context length (?:is|of)|context length is only|max_model_len|model length of|model's context length \("
    r"|available context size \(|`inputs` must have less than|`max_new_tokens` must be <=)\s*(\d+)"
)
_COUNT = re.compile(
    r"(\d+) in the messages|(\d+) tokens from the input messages|resulted in (\d+) tokens|contains (\d+) input tokens"
    r"|The input \((\d+) tokens|request \((\d+) tokens|[Gg]iven: (\d+)|prompt length (\d+)"
)


class ContextWindow:
    """What the models of one upstream take."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def ask(
        self, items: Sequence[Item], chat_of: ChatOf, ask: Callable[[ChatRequest], Awaitable[T]], caller: Caller
    ) -> T:
        """Call `ask` with the chat request of as many of the `items` as the model takes. Raises what `ask` raises."""
        chat = await self._fitting(items, chat_of, caller)
        try:
            return await ask(chat)
        except UpstreamError as refusal:
            if refusal.code != "context_length_exceeded":
                raise
            again = await self._refitted(items, chat_of, chat, refusal.message, caller)
            if again is None:
                raise
        return await ask(again)

    async def _fitting(self, items: Sequence[Item], chat_of: ChatOf, caller: Caller) -> ChatRequest:
        """All of the items, if it cannot be known that they are too many."""
        chat = await chat_of(items)
        length = await self._length(chat["model"], caller)
        dialect = await self._upstream.dialect(caller)
        if length is None or not can_count(dialect.name, chat) or not len(Cuts(items)):
            return chat
        if len(orjson.dumps(chat)) <= length - _answer_of(chat):  # a token has a byte, at the least
            return chat
        return await self._cut(items, chat_of, length, caller)

    async def _cut(self, items: Sequence[Item], chat_of: ChatOf, length: int, caller: Caller) -> ChatRequest:
        """Cuts and counts by turns, until it fits or nothing more may go."""
        most = None
        while True:
            chat = await chat_of(items)
            count = await self._count(chat, length, caller)
            if count <= (most or length - _answer_of(chat)) or not len(Cuts(items)):
                return chat
            most = _goal(chat, length)
            items = _lighter(items, chat, most / count)

    async def _count(self, chat: ChatRequest, length: int, caller: Caller) -> float:
        """How many tokens ``chat`` has; roughly, where the server has to be asked for an answer, and refuses it. As it is asked
        again then, too few are guessed rather than too many."""
        try:
            return await count_tokens(self._upstream, chat, caller)
        except UpstreamError as refusal:
            if refusal.code != "context_length_exceeded":
                raise
            return max(_guess(chat, refusal.message, _BYTES_OF_TEXT), length + 1)

    async def _refitted(
        self, items: Sequence[Item], chat_of: ChatOf, refused: ChatRequest, message: str, caller: Caller
    ) -> ChatRequest | None:
        """What to ask in place of what was ``refused``; None where nothing may go, or the refusal does not tell enough."""
        told = _LENGTH.search(message)
        if told is None or not len(Cuts(items)):
            return None
        length = int(told[1])
        self._upstream.lengths[refused["model"]] = (_now() + _LENGTHS_LAST, length)
        dialect = await self._upstream.dialect(caller)
        if can_count(dialect.name, refused):
            again = await self._cut(items, chat_of, length, caller)
        else:
            again = await chat_of(_lighter(items, refused, _MARGIN * _goal(refused, length) / _guess(refused, message)))
        return again if again["messages"] != refused["messages"] else None

    # -- what the server says of itself -------------------------------------------------------------------------------------

    async def _length(self, model: str, caller: Caller) -> int | None:
        until, length = self._upstream.lengths.get(model, (0.0, None))
        if until > _now():
            return length
        dialect = await self._upstream.dialect(caller)
        says = LENGTHS.get(dialect.name)
        try:
            told = await says(self._upstream, model, caller) if says else None
        except UpstreamError as error:
            logger.debug("the upstream does not tell the length of %s: %s", model, error.message)
            return None
        length = told if isinstance(told, int) and told > 0 else length
        self._upstream.lengths[model] = (_now() + _LENGTHS_LAST, length)
        return length


async def _of_models(upstream: Upstream, model: str, caller: Caller) -> Any:
    """``max_model_len`` of ``/v1/models``; an adapter has its parent's."""
    listed = {one["id"]: one for one in await upstream.models(caller)}
    found = listed.get(model, {})
    return found.get("max_model_len") or listed.get(found.get("parent") or "", {}).get("max_model_len")


async def _of_props(upstream: Upstream, _model: str, caller: Caller) -> Any:
    props = await upstream.get("/props", caller)
    return props.get("default_generation_settings", {}).get("n_ctx") if isinstance(props, dict) else None


async def _of_info(upstream: Upstream, _model: str, caller: Caller) -> Any:
    info = await upstream.get("/info", caller)
    return info.get("max_total_tokens") if isinstance(info, dict) else None


LENGTHS: dict[str, Callable[[Upstream, str, Caller], Awaitable[Any]]] = {
    "vllm": _of_models,
    "sglang": _of_models,
    "llamacpp": _of_props,
    "tgi": _of_info,
}


def _answer_of(chat: ChatRequest) -> int:
    """How many tokens are to be left for the answer."""
    wanted = chat.get("max_completion_tokens") or chat.get("max_tokens")
    return wanted if isinstance(wanted, int) else 1


def _goal(chat: ChatRequest, length: int) -> int:
    """Down to how many tokens to cut: where cutting begins, an answer of a few tokens is not what is meant."""
    return length - max(_answer_of(chat), length // _FOR_AN_ANSWER)


def _guess(chat: ChatRequest, refusal: str, bytes_a_token: float = _BYTES_A_TOKEN) -> float:
    """How many tokens ``chat`` has by the words of the refusal, or by its bytes."""
    count = _COUNT.search(refusal)
    return int(next(filter(None, count.groups()))) if count else len(orjson.dumps(chat)) / bytes_a_token


def _lighter(items: Sequence[Item], chat: ChatRequest, share: float) -> list[Item]:
    """``items`` cut so that that share of their ``chat`` is left (its tools stay), but by one block at the least."""
    sizes = {id(item): len(orjson.dumps(item)) for item in items}
    cut = (1 - share) * len(orjson.dumps(chat)) / len(orjson.dumps(chat["messages"]))
    most = (1 - cut) * sum(sizes[id(item)] for item in items)
    return truncated(Cuts(items).without(1), lambda some: sum(sizes[id(item)] for item in some) <= most)


def _now() -> float:
    return asyncio.get_running_loop().time()
