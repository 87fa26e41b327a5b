"""Summaries of histories: asked of the upstream's model, sealed, and opened again (``protocol.compaction`` has the rules).

A summary is the answer of a run of its own, which is never stored: it is cut to the model's length, observed and broken off as
any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import orjson

from .chains import Ground
from .config import Settings
from .errors import UpstreamError
from .ids import RunIds
from .protocol import compaction, document
from .protocol.assembler import Assembler
from .protocol.compaction import Compacted
from .protocol.events import Event
from .protocol.items import user_message
from .protocol.options import Options
from .protocol.types import ChatRequest, Item
from .run import Run
from .sealing import Sealer, Unsealable
from .state import Chain
from .upstream import Upstream
from .upstream.tokenizers import count_tokens, is_text

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

_PURPOSE = "compaction"


class Compaction:
    """``respond`` runs what is asked of the model."""

    def __init__(self, upstream: Upstream, sealer: Sealer, settings: Settings, respond: Respond) -> None:
        self._upstream = upstream
        self._sealer = sealer
        self._settings = settings
        self._respond = respond

    def opened(self, items: Sequence[Item], owner: str, *, offset: int) -> list[Item]:
        """``items`` as the model is to see them. Raises ``BadRequest`` for a compaction that is not its owner's."""
        return compaction.opened(items, partial(self._open, owner), offset=offset)

    def is_wanted(self, run: Run) -> bool:
        """Whether the run may have to begin with a compaction; what an approved call comes to is not summed up unseen."""
        if compaction.is_asked(run.ground.input):
            return True
        has_approved = run.toolbox is not None and run.toolbox.approved is not None
        return bool(run.request.context_management) and not has_approved

    async def due(self, run: Run, items: Sequence[Item], chat: Callable[[Sequence[Item]], ChatRequest]) -> Compacted | None:
        """What the run begins with: ``items``, all that the model would see, compacted. None where they are few enough.

        Raises ``APIError`` as a run does.
        """
        if not compaction.is_asked(run.ground.input):
            threshold = compaction.threshold_of(run.request, self._settings.compaction_threshold)
            if threshold is None or not compaction.can_shrink(items):
                return None
            if not await self._is_above(threshold, chat(items), run):
                return None
        return await self.compact(run, items)

    async def _is_above(self, threshold: int, chat: ChatRequest, run: Run) -> bool:
        if is_text(chat) and len(orjson.dumps(chat)) <= threshold:  # a token has a byte, at the least
            return False
        return await count_tokens(self._upstream, chat, run.caller) > threshold

    async def compact(self, run: Run, items: Sequence[Item]) -> Compacted:
        """``items`` compacted, as ``run`` would show them to the model. Raises ``APIError`` as a run does, also where there is
        nothing to compact."""
        matter, waiting = compaction.parted(items)
        part = self._part(run, [*matter, user_message(self._settings.compaction_prompt or PROMPT)])
        async with aclosing(self._respond(part)) as batches:
            async for _ in batches:
                pass
        summary = document.output_text(part.document).strip()
        if not summary:
            raise UpstreamError("The upstream's model was asked for a summary, and wrote none.")
        sealed = self._sealer.seal(compaction.envelope(summary, waiting), purpose=_PURPOSE, owner=run.ground.owner)
        return Compacted({"type": "compaction", "encrypted_content": sealed}, part.document["usage"])

    def _part(self, run: Run, items: list[Item]) -> Run:
        """The run that makes the summary."""
        request = compaction.asking(run.request, self._settings.compaction_max_tokens)
        ids = RunIds()
        ground = Ground(Chain.new(), ids, items, run.ground.owner, run.ground.token)
        created = document.create(
            request, response_id=ids.response, model=run.document["model"], created_at=run.document["created_at"]
        )
        assembler = Assembler(created, ids, Options(think_tag=self._settings.think_tag))
        return Run(request, run.caller, run.model, ground, assembler)

    def _open(self, owner: str, envelope: str) -> bytes | None:
        try:
            return self._sealer.open(envelope, purpose=_PURPOSE, owner=owner)
        except Unsealable:
            return None
