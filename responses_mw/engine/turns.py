"""The turns of a run: what each of them asks of the upstream, how many tokens that has, and how the answer begins.

There are two ways to ask: chat completions, or a whole response of an upstream that speaks the Responses API itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import orjson

from .. import telemetry
from ..crypto import Sealer
from ..protocol.chat.dialects import Dialect
from ..protocol.chat.reasoning import unsealed
from ..protocol.chat.request import to_chat
from ..protocol.response import compaction
from ..protocol.response.passthrough import to_responses
from ..protocol.types import ChatRequest, Item
from ..protocol.vllm.response_messages import RAW_PARAMETERS
from ..settings import Settings
from ..threads import by_size
from ..upstream import Caller, ChatStream, Upstream
from ..upstream.context_window import Begin, ContextWindow
from ..upstream.tokenizers import count_input, count_tokens, is_text
from .run import Run, unseal_compaction, unseal_reasoning

Ask = Callable[[dict[str, Any], Caller], ChatStream]

_NOT_TEXT = (b'"input_image"', b'"input_file"', b'"input_audio"')


class Backend(ABC):
    """The turns of all runs before one upstream."""

    def __init__(self, upstream: Upstream, sealer: Sealer, settings: Settings) -> None:
        self._upstream = upstream
        self._sealer = sealer
        self._most = settings.max_turns
        self._address = _address(settings)

    @abstractmethod
    def items(self, run: Run) -> list[Item]:
        """All that the model is to see. Raises ``BadRequest`` for what is sealed by none of us."""

    @abstractmethod
    async def begin(self, run: Run) -> None:
        """Begins a turn: asks for it, and waits for the first read of the answer. Raises ``APIError``."""

    @abstractmethod
    async def count(self, run: Run) -> int:
        """How many tokens the model would be shown, did the next turn begin now. Raises ``APIError``."""

    @abstractmethod
    async def check(self, run: Run) -> None:
        """Raises ``BadRequest`` for a ``run`` that cannot be asked for."""

    @abstractmethod
    async def exceeds(self, run: Run, items: Sequence[Item], tokens: int) -> bool:
        """Whether a turn that shows the model ``items`` has more than so many tokens. Raises ``APIError``."""

    async def _open(self, run: Run, body: dict[str, Any], provider: str, ask: Ask) -> None:
        turn = run.turn = telemetry.TurnSpan(body, run.document, telemetry.UpstreamServer(provider, *self._address))
        caller = replace(run.caller, headers=turn.with_trace_context(run.caller.headers))
        run.stream = stream = ask(body, caller)
        try:
            await self._upstream.open(stream, caller, run.model)
        except Exception as error:
            turn.fail(error)
            raise
        turn.answer_started(stream.head)


class ChatBackend(Backend):
    """A turn is a chat completion."""

    def __init__(self, upstream: Upstream, sealer: Sealer, settings: Settings) -> None:
        super().__init__(upstream, sealer, settings)
        self._room = ContextWindow(upstream)

    def items(self, run: Run) -> list[Item]:
        ground = run.ground
        own = len(ground.chain.items)
        items = unsealed(ground.items, partial(unseal_reasoning, self._sealer, ground.owner), offset=own)
        open_ = partial(unseal_compaction, self._sealer, ground.owner)
        return compaction.opened([*items, *run.document["output"]], open_, offset=own)

    async def begin(self, run: Run) -> None:
        run.turns += 1
        run.is_last_turn = run.assembler.rules.is_exhausted or run.turns >= self._most
        await self._fit(run, partial(self._ask, run))

    async def count(self, run: Run) -> int:
        counts: list[int] = []

        async def count(chat: ChatRequest) -> None:
            counts.append(await count_tokens(self._upstream, chat, run.caller))

        await self._fit(run, count)
        return counts[-1]

    async def check(self, run: Run) -> None:
        await self._chat(run, await self._upstream.dialect(run.caller), self.items(run))

    async def exceeds(self, run: Run, items: Sequence[Item], tokens: int) -> bool:
        chat = await self._chat(run, await self._upstream.dialect(run.caller), items)
        if is_text(chat) and len(orjson.dumps(chat)) <= tokens:  # a token has a byte, at the least
            return False
        return await count_tokens(self._upstream, chat, run.caller) > tokens

    async def _fit(self, run: Run, begin: Begin) -> None:
        """Begins with what the model is to see; with ``truncation: auto``, with as much of it as it takes."""
        items = await by_size(run.ground.size, self.items, run)
        chat_of = partial(self._chat, run, await self._upstream.dialect(run.caller))
        if run.request.truncation == "auto":
            await self._room.ask(items, chat_of, begin, run.caller)
        else:
            await begin(await chat_of(items))

    async def _ask(self, run: Run, chat: ChatRequest) -> None:
        if run.stream is not None:  # the turn was begun before, and refused
            await run.stream.aclose()
        dialect = await self._upstream.dialect(run.caller)
        asks_raw = run.messages is not None and dialect.name == "vllm"
        body = {**chat, **RAW_PARAMETERS} if asks_raw else chat
        await self._open(run, body, dialect.name, self._upstream.chat)
        if run.messages is not None:
            run.messages.begin(chat, run.offered)

    async def _chat(self, run: Run, dialect: Dialect, items: Sequence[Item]) -> ChatRequest:
        """The chat request of the turn that begins."""
        return await by_size(
            run.ground.size,
            to_chat,
            run.request,
            items,
            dialect,
            model=run.model,
            offered=[one for one in run.offered if not (one.form.served and run.is_last_turn)],
            own=len(items) - len(run.ground.input) - len(run.document["output"]),  # items before it may have been left out
            first_turn=run.turns <= 1,
            results=run.results,
        )


class ResponsesBackend(Backend):
    """A turn is a whole response: the upstream carries out the tools, and cuts what is too long by itself."""

    def items(self, run: Run) -> list[Item]:
        """Of what is sealed, only summaries of ours are opened: the rest is the upstream's."""
        ground = run.ground
        open_ = partial(unseal_compaction, self._sealer, ground.owner)
        return compaction.opened([*ground.items, *run.document["output"]], open_, keeps_foreign=True)

    async def begin(self, run: Run) -> None:
        await self._open(run, self._body(run, self.items(run)), "openai", self._upstream.responses)

    async def count(self, run: Run) -> int:
        return await count_input(self._upstream, self._body(run, self.items(run)), run.caller)

    async def check(self, run: Run) -> None:
        """The upstream checks what it is asked."""

    async def exceeds(self, run: Run, items: Sequence[Item], tokens: int) -> bool:
        body = self._body(run, items)
        encoded = orjson.dumps(body)
        if len(encoded) <= tokens and not any(kind in encoded for kind in _NOT_TEXT):
            return False
        return await count_input(self._upstream, body, run.caller) > tokens

    def _body(self, run: Run, items: Sequence[Item]) -> dict[str, Any]:
        return to_responses(run.request, items, model=run.model)


def _address(settings: Settings) -> tuple[str | None, int | None]:
    """Host and port of the upstream, for spans; none of one in this process."""
    if settings.upstream is None:
        return None, None
    parts = urlsplit(settings.upstream)
    return parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
