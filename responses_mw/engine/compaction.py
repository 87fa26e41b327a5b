"""Compaction replaces a history with a summary that the upstream's model writes. `protocol.response.compaction` has the rules.

A separate run, which is never stored, writes the summary. It is truncated, traced and cancelled like any other run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ..crypto import Sealer
from ..errors import UpstreamError
from ..ids import RunIds
from ..protocol.request.items import text_of, user_message
from ..protocol.response import compaction, document
from ..protocol.response.compaction import Compacted
from ..protocol.response.events import Event
from ..protocol.types import Document, Item
from ..settings import CompactionSettings
from ..state import Chain
from ..upstream.backend import COMPACTION, Backend
from .history import NO_HISTORY, RunContext
from .run import Run, RunMode

RunEventsOf = Callable[[Run, RunMode], AsyncGenerator[list[Event], None]]
"""Runs a prepared run and yields its events."""

PROMPT = """\
Your context is full. Write a summary of the whole conversation above, from which you (or another model) will go on without \
seeing any of it. Do not go on with the work, do not call a tool and do not answer the user: write the summary alone.

It must hold, as briefly as it can:
- what the user wants, with every requirement, preference and correction; the current request word for word
- what was done and decided so far, and why; what failed
- facts, names, paths, identifiers, figures, code and results of tools that are still needed, exactly as they are
- how things stand, and what is to be done next"""


class Compaction:
    """Summarizes the histories of runs."""

    def __init__(self, backend: Backend, sealer: Sealer, settings: CompactionSettings, events_of: RunEventsOf) -> None:
        self._backend = backend
        self._sealer = sealer
        self._settings = settings
        self._events_of = events_of

    def is_wanted(self, run: Run) -> bool:
        """Whether `run` may have to begin with a compaction."""
        return compaction.is_asked(run.context.input) or bool(run.request.context_management)

    async def due(self, run: Run) -> Compacted | None:
        """Compact everything the model would see in the next turn if the request asks for it or the threshold is exceeded.

        Returns None if no compaction is due. Approved calls that have not run yet are never compacted: the model must see their
        results first. Raises `APIError`.
        """
        if compaction.is_asked(run.context.input):
            return await self.compact(run)
        is_awaited = run.toolbox is not None and run.toolbox.approved is not None and not run.turns
        threshold = compaction.threshold_of(run.request, self._settings.threshold)
        if threshold is None or is_awaited:
            return None
        turn = run.turn_request()
        items = self._backend.items(turn)
        if not compaction.can_shrink(items) or not await self._backend.exceeds(turn, items, threshold):
            return None
        return await self.compact(run)

    async def compact(self, run: Run) -> Compacted:
        """Compact everything the model would see in `run`. Raises `APIError`, including when there is nothing to compact."""
        inner = self.summary_run(run)
        async with aclosing(self._events_of(inner, RunMode.WHOLE)) as batches:
            async for _ in batches:
                pass
        error = inner.document["error"]
        if error is not None:  # a truncated summary would lose the rest of the history
            raise UpstreamError(error["message"], code=error["code"])
        summary = _text(inner.document)
        if not summary:
            raise UpstreamError("The upstream's model was asked for a summary but returned no text.")
        _, waiting = compaction.split_history(self._backend.items(run.turn_request()))
        sealed = self._sealer.seal(compaction.envelope(summary, waiting), purpose=COMPACTION, owner=run.context.owner)
        return Compacted({"type": "compaction", "encrypted_content": sealed}, inner.document["usage"])

    def user_messages(self, run: Run) -> list[Item]:
        """Return the user messages that the model would see in `run`. Raises `BadRequest`."""
        seen = self._backend.items(run.turn_request())
        messages = [item for item in seen if item["type"] == "message" and item["role"] == "user"]
        # Messages from the envelope of an earlier compaction have no ids.
        return [{"id": run.context.ids.item("msg"), "status": "completed", **message} for message in messages]

    def summary_run(self, run: Run) -> Run:
        """Return the run that writes the summary. Raises `BadRequest` if there is nothing to summarize."""
        matter, _ = compaction.split_history(self._backend.items(run.turn_request()))
        items = [*matter, user_message(self._settings.prompt or PROMPT)]
        request = compaction.summary_request(run.request)
        ids, owner = RunIds(), run.context.owner
        context = RunContext(Chain.new(), ids, items, owner, run.context.token)
        created = document.create(
            request, response_id=ids.response, model=run.document["model"], created_at=run.document["created_at"]
        )
        assembler = self._backend.builder(request, created, ids, owner, frozenset())
        return Run(request, run.caller, run.model, context, assembler, NO_HISTORY, results=run.results)


def _text(answer: Document) -> str:
    """Return the text of an answer, or its reasoning if the model wrote nothing else."""
    reasoning = "\n".join(text_of(item) for item in answer["output"] if item["type"] == "reasoning")
    return document.output_text(answer).strip() or reasoning.strip()
