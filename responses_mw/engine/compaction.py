"""Replace the history of a run with a summary that the upstream's model writes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from ..crypto import Sealer
from ..errors import UpstreamError, cause_of, cause_of_code
from ..ids import RunIds
from ..protocol.parts import reasoning_text
from ..protocol.request.items import user_message
from ..protocol.response import compaction, document
from ..protocol.response.compaction import Compacted
from ..protocol.types import Document, Event, Item
from ..settings.groups import CompactionSettings
from ..state import Chain
from ..tasks import by_size
from ..upstream.backends.base import COMPACTION
from .history import NO_HISTORY, RunContext
from .run import Run, RunMode

PROMPT = """\
The context window is full. Write a summary of the conversation above. The summary replaces the conversation: you, or another \
model, will continue the work with the summary alone. Do not continue the work now, do not call tools, and do not answer the \
user. Write only the summary.

Include, as briefly as possible:
- the user's goals, with all requirements, preferences and corrections, and the current request word for word
- what has been done and decided so far, and why, and what has failed
- the facts, names, paths, identifiers, figures, code and tool results that are still needed, unchanged
- the current state and the next steps"""


def add_compaction(run: Run) -> list[Event]:
    """Add the run's compaction to the output, and return the events."""
    assert run.compacted is not None
    return run.assembler.add_whole(run.compacted.item, run.compacted.usage)


class Compaction:
    """Replaces histories with summaries that the upstream's model writes (see `protocol.response.compaction`).

    A summary is the answer of a separate run, which is never stored.
    """

    def __init__(
        self,
        sealer: Sealer,
        settings: CompactionSettings,
        events_of: Callable[[Run, RunMode], AsyncGenerator[list[Event], None]],
    ) -> None:
        """`events_of` runs a prepared run and yields its events."""
        self._sealer = sealer
        self._settings = settings
        self._events_of = events_of

    def is_wanted(self, run: Run) -> bool:
        """Return whether `run` may have to begin with a compaction."""
        return compaction.is_asked(run.context.input) or bool(run.request.context_management)

    async def due(self, run: Run) -> Compacted | None:
        """Return a compaction if the request asks for one, or if the next turn's input is too long. Otherwise, return None.

        The input is too long if it has more tokens than the request's threshold, and a summary can replace items. Raises
        `APIError` if the tokens cannot be counted or the compaction fails.
        """
        if compaction.is_asked(run.context.input):
            return await self.compact(run, await self.items(run))
        # The model must first see the results of approved calls.
        is_awaited = run.toolbox is not None and run.toolbox.approved is not None and not run.turns
        threshold = compaction.threshold_of(run.request)
        if threshold is None or is_awaited:
            return None
        items = await self.items(run)
        if not compaction.can_shrink(items) or not await run.route.backend.exceeds(run, items, threshold):
            return None
        return await self.compact(run, items)

    async def compact(self, run: Run, items: Sequence[Item]) -> Compacted:
        """Return a compaction of `items`, which the model would see in the next turn. Raises `APIError` if that fails."""
        inner, waiting = self.summary_run(run, items)
        async with aclosing(self._events_of(inner, RunMode.WHOLE)) as batches:
            async for _ in batches:
                pass
        error = inner.document["error"]
        if error is not None:  # a truncated summary would lose the rest of the history
            cause = cause_of(inner.error) if inner.error is not None else cause_of_code(error["code"])
            raise UpstreamError(error["message"], code=error["code"], cause=cause)
        summary = _text(inner.document)
        if not summary:
            raise UpstreamError("The upstream's model was asked for a summary but returned no text.")
        sealed = self._sealer.seal(compaction.envelope(summary, waiting), purpose=COMPACTION, owner=run.context.owner)
        return Compacted({"type": "compaction", "encrypted_content": sealed}, inner.document["usage"])

    def summary_run(self, run: Run, items: Sequence[Item]) -> tuple[Run, list[Item]]:
        """Return the run that writes the summary of `items`, and the user messages at the end, which follow the summary.

        Raises `BadRequest` if there is nothing to summarize.
        """
        matter, waiting = compaction.split_history(items)
        asked, ids, owner = [*matter, user_message(self._settings.prompt or PROMPT)], RunIds(), run.context.owner
        request = compaction.summary_request(run.request)
        context = RunContext(Chain.new(), ids, asked, owner, run.context.token, run.context.size)
        created = document.create(
            request, response_id=ids.response, model=run.document["model"], created_at=run.document["created_at"]
        )
        assembler = run.route.backend.builder(request, created, ids, owner, frozenset())
        inner = Run(
            request=request,
            caller=run.caller,
            model=run.model,
            route=run.route,
            asked=request,
            earlier=context.chain.items,
            input=asked,
            document=created,
            size=context.size,
            results=run.results,
            context=context,
            assembler=assembler,
            history=NO_HISTORY,
        )
        return inner, waiting

    async def items(self, run: Run) -> list[Item]:
        """Return the items that the model would see in the next turn. Raises `BadRequest` if an item cannot be decrypted."""
        return await by_size(run.size, run.route.backend.items, run)


def _text(answer: Document) -> str:
    """Return the text of an answer or, if it has no text, its reasoning."""
    reasoning = "\n".join(reasoning_text(item) for item in answer["output"] if item["type"] == "reasoning")
    return document.output_text(answer).strip() or reasoning.strip()
