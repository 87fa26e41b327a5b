"""Check runs and count their tokens, without creating responses."""

from __future__ import annotations

from contextlib import suppress

from ..errors import UpstreamError
from ..protocol.request.create import CreateResponse
from ..protocol.response import compaction
from ..telemetry.context import begin_run
from ..upstream import Caller
from .compaction import Compaction
from .drain import ActiveRun, Drain
from .run import Run
from .run_factory import RunFactory
from .turns import TurnLoop


class RunChecks:
    """Checks runs and counts their tokens before they begin."""

    def __init__(
        self,
        factory: RunFactory,
        compaction: Compaction,
        turns: TurnLoop,
        drain: Drain,
    ) -> None:
        self._factory = factory
        self._compaction = compaction
        self._turns = turns
        self._drain = drain

    async def count_tokens(self, request: CreateResponse, caller: Caller) -> int:
        """Return the number of input tokens of the first model call for `request`. Raises `APIError` if counting fails."""
        with ActiveRun(self._drain) as active, active.interruptible:
            run = await self._factory.prepare(request, caller)
            begin_run(run.document, streams=None)
            if compaction.is_asked(run.context.input):
                inner, _ = self._compaction.summary_run(run, await self._compaction.items(run))
                return await inner.route.backend.count(inner)
            try:
                await self._turns.offer_tools(run)
                return await run.route.backend.count(run)
            finally:
                if run.toolbox is not None:
                    await self._factory.close(run.toolbox)

    async def check(self, run: Run) -> None:
        """Check a background `run` before it is queued.

        Raises `BadRequest` if the run has too many tools, if its calls and outputs do not match, or if the upstream's API
        cannot express the request. Errors of the upstream are ignored. Not checked are runs with server-side tools or
        compaction, which would have to contact the tool servers or the model, and runs whose files have not been read.
        """
        if run.toolbox is not None or run.reads_files_later or self._compaction.is_wanted(run):
            return
        with suppress(UpstreamError):  # the upstream may be available again when the run begins
            await self._turns.offer_tools(run)
            await run.route.backend.check(run)
