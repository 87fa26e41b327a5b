"""Send turns to an upstream with its own Responses API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import orjson

from ...crypto import Sealer
from ...ids import RunIds
from ...protocol import origin
from ...protocol.chat.request import Prefill
from ...protocol.request.configuration import CONFIGURATION_UPDATE
from ...protocol.request.create import CreateResponse
from ...protocol.response import compaction
from ...protocol.response.events import readable
from ...protocol.response.passthrough import ResponsesPassthrough
from ...protocol.types import Document, Item, Tool
from ...settings.upstreams import UpstreamSettings
from ...tasks import by_size
from ..client import Upstream
from ..token_counting import count_input
from .base import Backend, OpenTurn, TurnState

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
        if text is None and origin.is_kept(item) and self._open_origins(owner, item["encrypted_content"]) is not None:
            return origin.decrypted(item)
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
        # Configuration updates have changed the parameters of the request, and not all upstreams know them.
        "input": [_sent(item) for item in items if item["type"] != CONFIGURATION_UPDATE and _says_something(item)],
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
    item = origin.without(item)
    is_callers = item["type"] == "message" and item["role"] != "assistant"
    # OpenAI rejects encrypted reasoning with another id ("Encrypted content item_id did not match the target item id").
    if is_callers or item.get("encrypted_content"):
        return {name: value for name, value in item.items() if name != "id"}
    return item
