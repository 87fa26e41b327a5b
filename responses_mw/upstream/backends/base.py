"""The interface to an upstream, independent of its API.

A run is a `TurnState`, which describes its current turn. A `Backend` converts the turn to a request in the format of the
upstream's API, and opens the stream of the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from ...crypto import InvalidEnvelope, Sealer
from ...ids import RunIds
from ...network import host_and_port
from ...protocol.chat.request import Prefill
from ...protocol.request.create import CreateResponse
from ...protocol.response.builder import ResponseBuilder, ResponseOptions
from ...protocol.response.response_messages import ResponseMessages
from ...protocol.response.seam import Seam
from ...protocol.tool_kinds.form import OfferedFunction
from ...protocol.types import Document, Item, Part
from ...settings.upstreams import UpstreamSettings
from ...settings.values import DNS_PREFIX
from ...telemetry.turn import TurnSpan
from ..caller import Caller
from ..client import Upstream
from ..stream import ChatStream

COMPACTION = "compaction"
"""Purpose of the envelopes that contain the summary of a compaction."""
REASONING = "reasoning"
"""Purpose of the envelopes that contain the text of a reasoning item."""
ORIGINS = "origins"
"""Purpose of the envelopes that contain copies of what items keep of the upstream's messages."""


@dataclass(slots=True, kw_only=True)
class TurnState:
    """The part of a run that backends use: the response in progress, and its current turn or, before that, its first turn."""

    request: CreateResponse
    caller: Caller
    model: str
    """The upstream's name for the model."""
    earlier: Sequence[Item]
    """The items before the request's input."""
    input: Sequence[Item]
    document: Document
    """The response so far."""
    size: int = 0
    """Size of the earlier items and the input as JSON in bytes, or 0 if the size is unknown."""
    messages: ResponseMessages | None = None
    """The recorder of vLLM's `input_messages` and `output_messages`, or None if the messages were not requested."""
    offered: list[OfferedFunction] = field(default_factory=list)
    """The functions that the model may call."""
    results: dict[str, str | list[Part]] = field(default_factory=dict)
    """Maps the ids of call items to the results of the calls made in this run."""
    refused_calls: dict[int, list[Item]] = field(default_factory=dict)
    """Calls of functions that nobody offers, with outputs. Only the model sees them. The keys are places in the output."""
    turns: int = 0
    """Number of turns begun. After a takeover, it starts at the number of server-side calls that have ended."""
    is_last_turn: bool = False
    """Whether this is the last turn. If so, no server-side function is offered."""
    draft_begins_at: int | None = None
    """If the last turn was a draft (see `protocol.chat.combination`), the number of items before it. The current turn then
    requests the answer, and the model does not see the items of the draft."""

    @property
    def output(self) -> list[Item]:
        """The items of the response that the model sees, and the refused calls."""
        shown: list[Item] = self.document["output"][: self.draft_begins_at]
        output: list[Item] = []
        for index, item in enumerate(shown):
            output += [*self.refused_calls.get(index, ()), item]
        return output + self.refused_calls.get(len(shown), [])


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a message that the upstream will continue."""

    prefill: Prefill
    seam: Seam | None = None
    """The check of the continuation. Only messages of the request are continued without a check."""
    usage: dict[str, Any] | None = None
    """The usage of the interrupted turn so far, as in a chat completion, or None if the tokens cannot be counted."""


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn whose answer has begun."""

    stream: ChatStream
    span: TurnSpan
    is_draft: bool = False
    """Whether the turn was requested without the format of the answer."""

    async def aclose(self) -> None:
        """Close the stream of the answer. If the span has not ended, end it as cancelled."""
        self.span.close()
        await self.stream.aclose()


class Backend(ABC):
    """Requests turns from one upstream, for all runs."""

    can_take_over = False
    """Whether a run can continue a response from another worker's output."""

    def __init__(self, upstream: Upstream, sealer: Sealer, settings: UpstreamSettings, *, open_reasoning: bool) -> None:
        """With `open_reasoning`, reasoning events have the names of the Open Responses specification."""
        self._upstream = upstream
        self._sealer = sealer
        self._reasoning_is_open = open_reasoning
        self._is_in_process = not settings.url
        self._server = host_and_port(settings.url[0].removeprefix(DNS_PREFIX)) if len(settings.url) == 1 else None

    @abstractmethod
    def builder(
        self, request: CreateResponse, document: Document, ids: RunIds, owner: str, call_ids: frozenset[str]
    ) -> ResponseBuilder:
        """Return the builder of the response. `call_ids` are the call ids in the history, which new calls must not repeat."""

    def messages(self, request: CreateResponse) -> ResponseMessages | None:
        """Return a recorder of `input_messages` and `output_messages`, or None if this server does not add these members."""
        return None

    async def functions(self, request: CreateResponse, items: Sequence[Item], size: int) -> list[OfferedFunction]:
        """Return the functions for the client-side tools in `request` and `items`. `size` is as in `TurnState`.

        If the upstream handles all tools itself, the list is empty.
        """
        return []

    @abstractmethod
    def items(self, turn: TurnState) -> list[Item]:
        """Return all items that the model sees, decrypted.

        `ChatBackend` raises `BadRequest` if it cannot decrypt the last compaction, or reasoning without readable text in the
        request's own input. `ResponsesBackend` leaves such items to the upstream.
        """

    @abstractmethod
    async def begin(self, turn: TurnState, prefill: Prefill | None = None) -> OpenTurn:
        """Send the turn, and return it once its answer has begun. With `prefill`, continue an interrupted message.

        Raises `BadRequest` if the upstream's API cannot express the turn, and the errors of `items` and `Upstream.chat`.
        """

    async def prefix(self, turn: TurnState, begins_at: int) -> Prefix | None:
        """Return the interrupted text of `turn`, or None if the upstream cannot continue it.

        `begins_at` is the index of the turn's first item in the output. Raises `APIError` if a request to the upstream fails.
        """
        return None

    async def unfinished_prefix(self, turn: TurnState) -> Prefix | None:
        """Return the unfinished message at the end of the history or the input, or None if there is none to continue."""
        return None

    async def continues(self, turn: TurnState) -> bool:
        """Return whether the upstream may be able to continue interrupted text of `turn`. `prefix` also checks the text itself.

        Raises `APIError` if a request to the upstream fails.
        """
        return False

    async def count_text(self, turn: TurnState, text: str) -> int:
        """Return the number of tokens of `text`, or 0 if the upstream cannot count them."""
        return 0

    @abstractmethod
    async def count(self, turn: TurnState) -> int:
        """Return the number of input tokens of the turn. Raises `APIError` if the tokens cannot be counted."""

    async def check(self, turn: TurnState) -> None:  # noqa: B027 (by default, the upstream checks the request)
        """Check that the upstream's API can express the turn. `ResponsesBackend` leaves this check to the upstream.

        Raises `BadRequest` if the API cannot express the turn, and the errors of `items` and `Upstream.dialect`.
        """

    @abstractmethod
    async def exceeds(self, turn: TurnState, items: Sequence[Item], tokens: int) -> bool:
        """Return whether the input of `turn` has more than `tokens` tokens.

        `items` are the turn's items, as returned by the method `items`. Raises `APIError` if the tokens cannot be counted.
        """

    async def _open(
        self,
        turn: TurnState,
        body: dict[str, Any],
        provider: str,
        ask: Callable[[dict[str, Any], Caller], Awaitable[ChatStream]],
    ) -> OpenTurn:
        span = TurnSpan(body, turn.document, provider, self._upstream.name, self._server)
        caller = turn.caller
        if span.is_traced:
            caller = replace(caller, headers=span.with_trace_context(caller.headers))
        try:
            stream = await ask(body, caller)
        except BaseException as error:
            if isinstance(error, Exception):
                span.fail(error)
            span.close()
            raise
        span.reach(self._upstream.name, None if self._is_in_process else stream.endpoint.location)
        if stream.head:  # an answer may end without a chunk
            span.start_answer(stream.head)
        return OpenTurn(stream, span)

    def _options(
        self, request: CreateResponse, owner: str, call_ids: frozenset[str], *, think_tag: str | None = None
    ) -> ResponseOptions:
        is_sealed = "reasoning.encrypted_content" in request.include
        return ResponseOptions(
            summary=request.wants_summary,
            open_reasoning=self._reasoning_is_open,
            logprobs=request.wants_logprobs,
            think_tag=think_tag,
            single_call=request.parallel_tool_calls is False,
            max_calls=request.max_tool_calls,
            include=request.include,
            used_call_ids=call_ids,
            seal=partial(self._seal, owner, REASONING) if is_sealed else None,
            seal_origins=partial(self._seal, owner, ORIGINS) if is_sealed else None,
        )

    def _seal(self, owner: str, purpose: str, text: str) -> str:
        return self._sealer.seal(text.encode(), purpose=purpose, owner=owner)

    def _unseal(self, owner: str, envelope: str, purpose: str = COMPACTION) -> bytes | None:
        """Return the decrypted content of `envelope`, or None if this server cannot open it for this owner and purpose."""
        try:
            return self._sealer.open(envelope, purpose=purpose, owner=owner)
        except InvalidEnvelope:
            return None

    def _open_reasoning(self, owner: str, envelope: str) -> str | None:
        text = self._unseal(owner, envelope, REASONING)
        return text.decode() if text is not None else None

    def _open_origins(self, owner: str, envelope: str) -> dict[str, Any] | None:
        copies = self._unseal(owner, envelope, ORIGINS)
        return orjson.loads(copies) if copies is not None else None
