"""The two backends: one for Chat Completions upstreams, and one for upstreams with their own Responses API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson

from ..crypto import Sealer
from ..ids import RunIds
from ..protocol.chat.dialects import Dialect
from ..protocol.chat.request import Prefill, is_constrained, to_chat
from ..protocol.parts import reasoning_text
from ..protocol.request.create import CreateResponse
from ..protocol.request.items import unsealed
from ..protocol.request.tools import offered
from ..protocol.response import compaction
from ..protocol.response.assembler import Assembler
from ..protocol.response.events import readable
from ..protocol.response.passthrough import ResponsesPassthrough
from ..protocol.response.response_messages import ResponseMessages
from ..protocol.tool_kinds.form import OfferedFunction
from ..protocol.types import ChatRequest, Document, Item, Tool
from ..settings.groups import UpstreamSettings
from ..threads import by_size
from .backend import Backend, OpenTurn, Prefix, TurnState
from .client import Upstream
from .prompts import ContextWindow, PrefillProof, ShownPrompt, count_input, count_tokens, is_text
from .servers import server_for

T = TypeVar("T")


class ChatBackend(Backend):
    """A backend that requests each turn as a chat completion. This server runs the server-side tools."""

    can_take_over = True

    def __init__(self, upstream: Upstream, sealer: Sealer, settings: UpstreamSettings, *, open_reasoning: bool) -> None:
        super().__init__(upstream, sealer, settings, open_reasoning=open_reasoning)
        self._think_tag = settings.think_tag
        self._context_window = ContextWindow(upstream)
        self._proof = PrefillProof(upstream)

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
        items = unsealed([*turn.earlier, *turn.input], partial(self._open_reasoning, owner), offset=own)
        return compaction.open_last([*items, *turn.document["output"]], partial(self._unseal, owner), offset=own)

    async def begin(self, turn: TurnState, prefill: Prefill | None = None) -> OpenTurn:
        return await self._fit(turn, partial(self._request, turn), prefill)

    async def prefix(self, turn: TurnState, begins_at: int) -> Prefix | None:
        if not await self.continues(turn):
            return None
        output = turn.document["output"]
        text = "".join(part["text"] for item in output[begins_at:] if item["type"] == "message" for part in item["content"])
        prompt = await self._proof.prompt(await self._fit_chat(turn, Prefill()), text, turn.caller)
        if prompt is None:
            return None
        # Turn reasoning off only if the model still sees the same prompt.
        server = await server_for(self._upstream, turn.caller)
        fast = await server.prompt_tokens(await self._fit_chat(turn, Prefill(without_thinking=True)))
        before = replace(turn, document={**turn.document, "output": output[:begins_at]})
        usage = await self._usage(prompt, before, output[begins_at:])
        tokens = usage["completion_tokens"] if usage else await server.count_text(turn.model, text)
        return Prefix(text, prompt.is_trimmed, Prefill(tokens, fast == prompt.tokens), usage)

    async def _usage(self, prompt: ShownPrompt, before: TurnState, items: Sequence[Item]) -> dict[str, Any] | None:
        """Return an interrupted turn's usage, or None if unknown. `items` are its output, which `before` lacks."""
        chat = await self._fit_chat(before, None)
        server = await server_for(self._upstream, before.caller)
        tokens = await server.prompt_tokens(chat) if is_text(chat) else None
        if tokens is None:
            return None
        # Interrupted reasoning is not counted, because the model was asked again.
        thought = "".join(reasoning_text(one) for one in items if one["type"] == "reasoning" and one["status"] == "completed")
        reasoning = await server.count_text(before.model, thought) if thought else 0
        return {
            "prompt_tokens": len(tokens),
            "completion_tokens": max(len(prompt.tokens) - len(tokens), 0),
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    async def continues(self, turn: TurnState) -> bool:
        if turn.messages is not None or is_constrained(turn.request, first_turn=turn.turns <= 1):
            return False
        return await self._proof.holds(turn.model, turn.caller)

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
        chat_of = partial(self._chat, turn, dialect, prefill=prefill)
        if turn.request.truncation == "auto":
            return await self._context_window.ask(items, chat_of, partial(ask, dialect), turn.caller)
        return await ask(dialect, await chat_of(items))

    async def _fit_chat(self, turn: TurnState, prefill: Prefill | None) -> ChatRequest:
        async def take(_: Dialect, chat: ChatRequest) -> ChatRequest:
            return chat

        return await self._fit(turn, take, prefill)

    async def _request(self, turn: TurnState, dialect: Dialect, chat: ChatRequest) -> OpenTurn:
        raw = dialect.raw_parameters if turn.messages is not None else {}
        opened = await self._open(turn, {**chat, **raw}, dialect.name, self._upstream.chat)
        if turn.messages is not None:
            turn.messages.begin(chat, turn.offered)
        return opened

    async def _chat(
        self, turn: TurnState, dialect: Dialect, items: Sequence[Item], prefill: Prefill | None = None
    ) -> ChatRequest:
        return await by_size(
            turn.size,
            to_chat,
            turn.request,
            items,
            dialect,
            model=turn.model,
            offered=[function for function in turn.offered if not (function.form.served and turn.is_last_turn)],
            own=len(items) - len(turn.input) - len(turn.document["output"]),  # truncation may have removed earlier items
            first_turn=turn.turns <= 1,
            results=turn.results,
            prefill=prefill,
        )


# -- upstreams with their own Responses API ---------------------------------------------------------------------------

_NOT_TEXT = (b'"input_image"', b'"input_file"', b'"input_audio"')

_FORWARDED = (
    *("enable_response_messages", "frequency_penalty", "instructions", "max_output_tokens", "max_tool_calls"),
    *("parallel_tool_calls", "presence_penalty", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning", "safety_identifier", "service_tier", "temperature", "text", "tool_choice", "tools", "top_logprobs"),
    *("top_p", "truncation", "user"),
)
"""The forwarded parameters. A default is not sent."""
_DEFAULTS = CreateResponse(items=[], extra={})


class ResponsesBackend(Backend):
    """A backend that requests each turn as a whole response.

    The upstream runs the tools, truncates long inputs, and adds vLLM's messages to its document. This server stores the state,
    so the upstream receives all items and stores nothing. Parameters that concern only this server, such as `conversation` and
    `background`, are not sent. Other parameters are forwarded unchanged.
    """

    def __init__(
        self,
        upstream: Upstream,
        sealer: Sealer,
        settings: UpstreamSettings,
        echo: Callable[[Iterable[Tool]], list[Tool]],
        *,
        open_reasoning: bool,
    ) -> None:
        """`echo` returns tools without secrets, as they are shown in a response."""
        super().__init__(upstream, sealer, settings, open_reasoning=open_reasoning)
        self._echo = echo

    def builder(
        self, request: CreateResponse, document: Document, ids: RunIds, owner: str, call_ids: frozenset[str]
    ) -> ResponsesPassthrough:
        return ResponsesPassthrough(document, ids, self._echo, self._options(request, owner, call_ids))

    def items(self, turn: TurnState) -> list[Item]:
        owner = turn.caller.owner
        items = [self._opened(item, owner) for item in (*turn.earlier, *turn.input, *turn.document["output"])]
        # The upstream may have encrypted what this server did not encrypt.
        return compaction.open_last(items, partial(self._unseal, owner), keeps_foreign=True)

    def _opened(self, item: Item, owner: str) -> Item:
        if item["type"] != "reasoning" or not item.get("encrypted_content"):
            return item
        text = self._open_reasoning(owner, item["encrypted_content"])
        if text is None:
            return item
        plain = {name: value for name, value in item.items() if name != "encrypted_content"}
        return plain if item.get("content") else {**plain, "content": [{"type": "reasoning_text", "text": text}]}

    async def begin(self, turn: TurnState, prefill: Prefill | None = None) -> OpenTurn:
        return await self._open(turn, await self._whole_body(turn), "openai", self._upstream.responses)

    async def count(self, turn: TurnState) -> int:
        return await count_input(self._upstream, await self._whole_body(turn), turn.caller)

    async def exceeds(self, turn: TurnState, items: Sequence[Item], tokens: int) -> bool:
        body = await self._body(turn, items)
        encoded = orjson.dumps(body)
        if len(encoded) <= tokens and not any(kind in encoded for kind in _NOT_TEXT):  # a token has at least one byte
            return False
        return await count_input(self._upstream, body, turn.caller) > tokens

    async def _whole_body(self, turn: TurnState) -> dict[str, Any]:
        return await self._body(turn, await by_size(turn.size, self.items, turn))

    async def _body(self, turn: TurnState, items: Sequence[Item]) -> dict[str, Any]:
        if any(map(_is_summary, items)) and (await self._upstream.dialect(turn.caller)).reasoning_field:
            items = [readable(item) if _is_summary(item) else item for item in items]
        return to_responses(turn.request, items, model=turn.model)


def _is_summary(item: Item) -> bool:
    """Return whether a reasoning item has only a summary. Servers that accept reasoning as text get the summary as text."""
    return item["type"] == "reasoning" and bool(item.get("summary")) and not _says_something(item)


def to_responses(request: CreateResponse, items: Sequence[Item], *, model: str) -> dict[str, Any]:
    """Return the body of a Responses request with `items` as input. `model` is the upstream's name for the model."""
    body: dict[str, Any] = {
        **request.extra,
        "model": model,
        "input": [_sent(item) for item in items if _says_something(item)],
        "store": False,
    }
    for name in _FORWARDED:
        value = getattr(request, name)
        if value != getattr(_DEFAULTS, name):
            body[name] = value
    if request.include:
        body["include"] = sorted(request.include)
    if request.stream:
        body["stream"] = True
        if "include_obfuscation" in request.stream_options:  # include_usage exists only in Chat Completions
            body["stream_options"] = {"include_obfuscation": request.stream_options["include_obfuscation"]}
    return body


def _says_something(item: Item) -> bool:
    # A reasoning item without text refers to an item stored by the upstream, but the upstream is asked to store no items.
    return item["type"] != "reasoning" or bool(item.get("content") or item.get("encrypted_content"))


def _sent(item: Item) -> Item:
    """Return `item` in the form that the upstream accepts."""
    if item["type"] == "compaction" and "content" in item:
        return {"type": "message", "role": "user", "content": item["content"]}
    is_callers = item["type"] == "message" and item["role"] != "assistant"
    # OpenAI rejects encrypted reasoning with another id ("Encrypted content item_id did not match the target item id").
    if is_callers or item.get("encrypted_content"):
        return {name: value for name, value in item.items() if name != "id"}
    return item
