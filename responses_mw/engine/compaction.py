"""Summaries of histories: asked of the upstream's model, sealed, and opened again (``protocol.compaction`` has the rules).

A summary is the answer of a run of its own, which is never stored: it is cut to the model's length, observed and broken off as
any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ..crypto import Sealer
from ..errors import UpstreamError
from ..ids import RunIds
from ..protocol.request.items import text_of, user_message
from ..protocol.response import compaction, document
from ..protocol.response.assembler import Assembler
from ..protocol.response.compaction import Compacted
from ..protocol.response.events import Event
from ..protocol.response.lifecycle import Options
from ..protocol.response.passthrough import ResponsesPassthrough
from ..protocol.types import Document
from ..settings import Settings
from ..state import Chain
from .history import RunContext
from .run import COMPACTION, Run
from .turns import Backend

Respond = Callable[[Run], AsyncGenerator[list[Event], None]]
"""All events of a run but the terminal one, for which its document is ready then; raises what goes wrong."""

PROMPT = """\
Your context is full. Write a summary of the whole conversation above, from which you (or another model) will go on without \
seeing any of it. Do not go on with the work, do not call a tool and do not answer the user: write the summary alone.

It must hold, as briefly as it can:
- what the user wants, with every requirement, preference and correction; the current request word for word
- what was done and decided so far, and why; what failed
- facts, names, paths, identifiers, figures, code and results of tools that are still needed, exactly as they are
- how things stand, and what is to be done next"""


class Compaction:
    """``turns`` shows what the model would see; ``respond`` runs what is asked of it."""

    def __init__(self, turns: Backend, sealer: Sealer, settings: Settings, respond: Respond) -> None:
        self._turns = turns
        self._sealer = sealer
        self._settings = settings
        self._respond = respond

    def is_wanted(self, run: Run) -> bool:
        """Whether ``run`` may have to begin with a compaction."""
        return compaction.is_asked(run.ground.input) or bool(run.request.context_management)

    async def due(self, run: Run) -> Compacted | None:
        """What comes before the turn that ``run`` is to begin: all that the model would see, compacted. None where it is not
        asked for, or there is little of it. What an approved call comes to is not summed up unseen.

        Raises ``APIError`` as a run does.
        """
        if compaction.is_asked(run.ground.input):
            return await self.compact(run)
        is_awaited = run.toolbox is not None and run.toolbox.approved is not None and not run.turns
        threshold = compaction.threshold_of(run.request, self._settings.compaction_threshold)
        if threshold is None or is_awaited:
            return None
        items = self._turns.items(run)
        if not compaction.can_shrink(items) or not await self._turns.exceeds(run, items, threshold):
            return None
        return await self.compact(run)

    async def compact(self, run: Run) -> Compacted:
        """All that the model would see in ``run``, compacted. Raises ``APIError`` as a run does, also where there is nothing
        to compact."""
        part = self.asking(run)
        async with aclosing(self._respond(part)) as batches:
            async for _ in batches:
                pass
        error = part.document["error"]
        if error is not None:  # half a summary would lose the rest
            raise UpstreamError(error["message"], code=error["code"])
        summary = _summary(part.document)
        if not summary:
            raise UpstreamError("The upstream's model was asked for a summary, and wrote none.")
        _, waiting = compaction.parted(self._turns.items(run))
        sealed = self._sealer.seal(compaction.envelope(summary, waiting), purpose=COMPACTION, owner=run.ground.owner)
        return Compacted({"type": "compaction", "encrypted_content": sealed}, part.document["usage"])

    def asking(self, run: Run) -> Run:
        """The run that makes the summary. Raises ``BadRequest`` where there is nothing to sum up."""
        matter, _ = compaction.parted(self._turns.items(run))
        items = [*matter, user_message(self._settings.compaction_prompt or PROMPT)]
        request = compaction.asking(run.request, self._settings.compaction_max_tokens)
        ids = RunIds()
        ground = RunContext(Chain.new(), ids, items, run.ground.owner, run.ground.token)
        created = document.create(
            request, response_id=ids.response, model=run.document["model"], created_at=run.document["created_at"]
        )
        if self._settings.upstream_api == "responses":
            return Run(request, run.caller, run.model, ground, ResponsesPassthrough(created, ids, list))
        assembler = Assembler(created, ids, Options(think_tag=self._settings.think_tag))
        return Run(request, run.caller, run.model, ground, assembler, results=run.results)


def _summary(answer: Document) -> str:
    """The text of an answer; what the model thought, where it got no further than that."""
    thought = "\n".join(text_of(item) for item in answer["output"] if item["type"] == "reasoning")
    return document.output_text(answer).strip() or thought.strip()
