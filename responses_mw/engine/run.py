"""One run: what it is made of, and what is known of it while it lasts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from .. import telemetry
from ..cache import Hit, Miss
from ..crypto import Sealer, Unsealable
from ..errors import APIError, BadRequest, UpstreamError
from ..protocol.chat.chunks import Text
from ..protocol.request.body import RequestLimits
from ..protocol.request.create import CreateResponse
from ..protocol.response.assembler import Assembler
from ..protocol.response.compaction import Compacted
from ..protocol.response.events import Event
from ..protocol.response.lifecycle import Options
from ..protocol.tool_kinds.form import Offered
from ..protocol.types import Chunk, Document, Part
from ..protocol.vllm.response_messages import ResponseMessages
from ..settings import Settings
from ..tools import Toolbox
from ..tools.tool import ToolResult
from ..upstream import Caller, ChatStream
from ..upstream.errors import as_response_error
from .history import RunContext

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """One response in the making."""

    request: CreateResponse
    caller: Caller
    model: str
    """The upstream's name of it."""
    ground: RunContext
    assembler: Assembler
    toolbox: Toolbox | None = None
    offered: list[Offered] = field(default_factory=list)
    """The functions that the model may call."""
    results: dict[str, str | list[Part]] = field(default_factory=dict)
    """What the model sees of the calls carried out in this run, by their items."""
    found: Hit | Miss | None = None
    """What the cache said, where it was asked."""
    stream: ChatStream | None = None
    calls: Sequence[asyncio.Task[ToolResult]] = ()
    """Those of the last turn, as they are carried out."""
    turn: telemetry.TurnSpan | None = None
    """The last one, as it is observed."""
    turns: int = 0
    received: int = 0
    """Bytes of the turns that are over, and of the results of tools."""
    is_last_turn: bool = False
    compacted: Compacted | None = None
    """What comes before the turn that is to begin, where the history was too long, or a compaction was asked for."""
    messages: ResponseMessages | None = None
    """Where vLLM's ``input_messages`` and ``output_messages`` were asked for."""

    @property
    def document(self) -> Document:
        return self.assembler.response

    def feed(self, chunks: Sequence[Chunk | Text]) -> list[Event]:
        """One read of the turn's answer; returns the events that it causes."""
        if self.messages is not None:
            self.messages.take(chunks)
        return self.assembler.feed(*chunks)

    def receive(self, size: int, most: int) -> None:
        """Counts what came for the response. Raises ``UpstreamError`` beyond ``most`` bytes in all."""
        self.received += size
        if self.received > most:
            raise UpstreamError(f"The response has grown beyond {most} bytes.")

    def conclude(self, now: int) -> None:
        self.assembler.conclude(now)
        if self.messages is not None:
            self.document.update(self.messages.members(self.model, self.document["output"], self.results))


def limits_of(settings: Settings) -> RequestLimits:
    """What one request may hold."""
    return RequestLimits(settings.max_input_items, settings.max_tools, settings.max_depth, settings.max_values)


def options(request: CreateResponse, ground: RunContext, sealer: Sealer, settings: Settings) -> Options:
    """What of ``request`` shapes the events of its run."""
    return Options(
        summary=request.wants_summary,
        open_reasoning=settings.reasoning_events == "open_responses",
        logprobs=request.wants_logprobs,
        think_tag=settings.think_tag,
        single_call=request.parallel_tool_calls is False,
        most_calls=request.max_tool_calls,
        include=request.include,
        used_call_ids=ground.chain.call_ids,
        seal=partial(_seal_reasoning, sealer, ground.owner) if "reasoning.encrypted_content" in request.include else None,
    )


def _seal_reasoning(sealer: Sealer, owner: str, text: str) -> str:
    return sealer.seal(text.encode(), purpose="reasoning", owner=owner)


COMPACTION = "compaction"
"""What a summary is sealed for."""


def unseal_compaction(sealer: Sealer, owner: str, envelope: str) -> bytes | None:
    """What a compaction item's ``encrypted_content`` holds; None for another's."""
    try:
        return sealer.open(envelope, purpose=COMPACTION, owner=owner)
    except Unsealable:
        return None


def unseal_reasoning(sealer: Sealer, owner: str, envelope: str) -> str | None:
    """The text of a reasoning item's ``encrypted_content``; None for another's."""
    try:
        return sealer.open(envelope, purpose="reasoning", owner=owner).decode()
    except Unsealable:
        return None


def fail(run: Run, error: Exception) -> None:
    """Makes ``error`` the end of the run's document."""
    if isinstance(error, UpstreamError):
        run.assembler.fail(*as_response_error(error))
    elif isinstance(error, BadRequest):
        run.assembler.fail("invalid_prompt", error.message)
    elif isinstance(error, APIError):
        run.assembler.fail("server_error", error.message)
    else:
        logger.error("response %s failed", run.document["id"], exc_info=error)
        run.assembler.fail("server_error", "The server had an error while making the response.")
