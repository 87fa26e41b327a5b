"""Send turns to a Chat Completions upstream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import orjson

from ...crypto import Sealer
from ...errors import UpstreamError
from ...ids import RunIds
from ...protocol.chat.combination import Combination
from ...protocol.chat.request import Prefill, is_constrained, to_chat
from ...protocol.dialects import Dialect
from ...protocol.parts import is_unfinished, message_text, reasoning_text
from ...protocol.request.create import CreateResponse
from ...protocol.request.items import unsealed
from ...protocol.request.tools import offered
from ...protocol.response import compaction
from ...protocol.response.assembler import Assembler
from ...protocol.response.response_messages import ResponseMessages
from ...protocol.tool_kinds.form import OfferedFunction
from ...protocol.types import ChatRequest, Document, Item
from ...settings.upstreams import UpstreamSettings
from ...tasks import by_size
from ..client import Upstream
from ..context_window import ContextWindow
from ..continuation import PrefillProof, ShownPrompt, interrupted_usage
from ..servers import server_for
from ..token_counting import count_tokens, is_text
from .base import Backend, OpenTurn, Prefix, TurnState
from .combinations import Combinations

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ChatBackend(Backend):
    """A backend that requests each turn as a chat completion. This server runs the server-side tools."""

    can_take_over = True

    def __init__(self, upstream: Upstream, sealer: Sealer, settings: UpstreamSettings, *, open_reasoning: bool) -> None:
        super().__init__(upstream, sealer, settings, open_reasoning=open_reasoning)
        self._think_tag = settings.think_tag
        self._context_window = ContextWindow(upstream)
        self._proof = PrefillProof(upstream)
        self._combinations = Combinations(upstream)

    def builder(
        self, request: CreateResponse, document: Document, ids: RunIds, owner: str, call_ids: frozenset[str]
    ) -> Assembler:
        return Assembler(document, ids, self._options(request, owner, call_ids, think_tag=self._think_tag))

    def messages(self, request: CreateResponse) -> ResponseMessages | None:
        return ResponseMessages() if request.enable_response_messages else None

    async def functions(self, request: CreateResponse, items: Sequence[Item], size: int) -> list[OfferedFunction]:
        return await by_size(size, offered, request.tools, items)

    def items(self, turn: TurnState) -> list[Item]:
        own, owner = len(turn.earlier), turn.caller.owner
        opened = partial(self._open_reasoning, owner), partial(self._open_origins, owner)
        items = unsealed([*turn.earlier, *turn.input], *opened, offset=own)
        return compaction.open_last([*items, *turn.output], partial(self._unseal, owner), offset=own)

    async def begin(self, turn: TurnState, prefill: Prefill | None = None) -> OpenTurn:
        ask = partial(self._request, turn)
        try:
            return await self._fit(turn, ask, prefill)
        except UpstreamError as error:
            if not await self._combinations.is_refused(turn, await self._upstream.dialect(turn.caller), error):
                raise
        with self._combinations.separate(turn):
            return await self._fit(turn, ask, prefill)

    async def prefix(self, turn: TurnState, begins_at: int) -> Prefix | None:
        if not await self.continues(turn):
            return None
        output = turn.document["output"][begins_at:]
        text = "".join(message_text(item) for item in output if item["type"] == "message")
        # Interrupted reasoning is not counted, because the model was asked again.
        thoughts = [reasoning_text(one) for one in output if one["type"] == "reasoning" and one["status"] == "completed"]
        shown = await self._find_prompt(turn, text, thoughts)
        if shown is None:
            return None
        prompt, without_thinking = shown
        server = await server_for(self._upstream, turn.caller)
        before = replace(turn, document={**turn.document, "output": turn.document["output"][:begins_at]})
        tokens, usage = await interrupted_usage(server, await self._fit_chat(before, None), prompt, text, thoughts)
        seam = prompt.seam(text, await server.count_text(turn.model, text))
        return Prefix(Prefill(tokens, without_thinking), seam, usage)

    async def unfinished_prefix(self, turn: TurnState) -> Prefix | None:
        last = next(filter(_is_seen, _backwards(turn)), None)
        if last is None or not is_unfinished(last) or not (await self._upstream.dialect(turn.caller)).prefill:
            return None
        text = message_text(last)
        try:
            shown = await self._find_prompt(turn, text, ())
        except UpstreamError as error:  # the continuation does not depend on this check
            logger.debug("could not read the prompt of an unfinished message: %s", error.message)
            shown = None
        if shown is None:
            return Prefix(Prefill(without_thinking=True))
        prompt, without_thinking = shown
        return Prefix(Prefill(without_thinking=without_thinking), prompt.seam(text[len(text.rstrip()) :]))

    async def _find_prompt(self, turn: TurnState, text: str, thoughts: Sequence[str]) -> tuple[ShownPrompt, bool] | None:
        """Return the prompt that ends with `text`, and whether reasoning is off. Return None if there is no such prompt.

        Reasoning is turned off if the model still sees the same prompt, so that the server's parser does not expect any.
        """
        thought = "".join(thoughts)
        off = await self._proof.prompt(await self._fit_chat(turn, Prefill(without_thinking=True)), text, turn.caller, thought)
        chat = await self._fit_chat(turn, Prefill())
        server = await server_for(self._upstream, turn.caller)
        if off is not None and await server.prompt_tokens(chat) == off.tokens:
            return off, True
        prompt = await self._proof.prompt(chat, text, turn.caller, thought)
        return None if prompt is None else (prompt, False)

    async def continues(self, turn: TurnState) -> bool:
        if turn.messages is not None or is_constrained(turn.request, first_turn=turn.turns <= 1):
            return False
        return await self._proof.holds(turn.model, turn.caller)

    async def count_text(self, turn: TurnState, text: str) -> int:
        try:
            return await (await server_for(self._upstream, turn.caller)).count_text(turn.model, text)
        except UpstreamError as error:  # the answer itself is complete
            logger.debug("could not count the tokens of an answer: %s", error.message)
            return 0

    async def count(self, turn: TurnState) -> int:
        return await self._fit(turn, lambda _, chat: count_tokens(self._upstream, chat, turn.caller))

    async def check(self, turn: TurnState) -> None:
        items = self.items(turn)
        await self._chat(turn, await self._upstream.dialect(turn.caller), items)

    async def exceeds(self, turn: TurnState, items: Sequence[Item], tokens: int) -> bool:
        chat = await self._chat(turn, await self._upstream.dialect(turn.caller), items)
        if is_text(chat) and len(orjson.dumps(chat)) <= tokens:  # a token has at least one byte
            return False
        return await count_tokens(self._upstream, chat, turn.caller) > tokens

    async def _fit(
        self, turn: TurnState, ask: Callable[[Dialect, ChatRequest], Awaitable[T]], prefill: Prefill | None = None
    ) -> T:
        """Call `ask` with the dialect and the turn's chat request.

        If `truncation` is `auto`, omit old items that exceed the context window.
        """
        items = await by_size(turn.size, self.items, turn)  # first, so that its errors do not depend on the upstream
        dialect = await self._upstream.dialect(turn.caller)
        combination = await self._combinations.of(turn, dialect)
        chat_of = partial(self._chat, turn, dialect, prefill=prefill, combination=combination)
        if turn.request.truncation == "auto":
            return await self._context_window.ask(items, chat_of, partial(ask, dialect), turn.caller)
        return await ask(dialect, await chat_of(items))

    async def _fit_chat(self, turn: TurnState, prefill: Prefill | None) -> ChatRequest:
        async def take(_: Dialect, chat: ChatRequest) -> ChatRequest:
            return chat

        return await self._fit(turn, take, prefill)

    async def _request(self, turn: TurnState, dialect: Dialect, chat: ChatRequest) -> OpenTurn:
        raw = dialect.raw_parameters if turn.messages is not None else {}
        opened = await self._open(turn, {**chat, **raw}, dialect.name, partial(self._upstream.chat, dialect=dialect))
        if turn.messages is not None:
            turn.messages.begin(chat, turn.offered)
        is_draft = turn.request.wants_format and "response_format" not in chat
        return replace(opened, is_draft=True) if is_draft else opened

    async def _chat(
        self,
        turn: TurnState,
        dialect: Dialect,
        items: Sequence[Item],
        prefill: Prefill | None = None,
        combination: Combination = Combination.TOGETHER,
    ) -> ChatRequest:
        return await by_size(
            turn.size,
            to_chat,
            turn.request,
            items,
            dialect,
            model=turn.model,
            offered=[function for function in turn.offered if not (function.form.served and turn.is_last_turn)],
            own=len(items) - len(turn.input) - len(turn.output),  # truncation may have removed earlier items
            first_turn=turn.turns <= 1,
            results=turn.results,
            prefill=prefill,
            combination=combination,
        )


def _backwards(turn: TurnState) -> Iterator[Item]:
    """Iterate over all items of the turn, from the last to the first."""
    return chain.from_iterable(map(reversed, (turn.output, turn.input, turn.earlier)))


def _is_seen(item: Item) -> bool:
    """Return whether `item` may be part of the prompt. Tool lists and interrupted reasoning are not."""
    return item["type"] != "mcp_list_tools" and (item["type"] != "reasoning" or item.get("status") != "incomplete")
