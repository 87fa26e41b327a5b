"""Prepare runs: read the history, check the tools, and build the objects that make the response."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..errors import NotSupported, UpstreamError
from ..ids import RunIds
from ..protocol.request.create import CreateResponse, configured
from ..protocol.response import document
from ..protocol.response.builder import ResponseBuilder
from ..protocol.response.replay import Takeover
from ..protocol.search_results import sources_of
from ..protocol.types import Document, Item
from ..redaction import credentials_in, protect, secrets_in_tools
from ..state import Job
from ..telemetry.context import annotate, begin_run
from ..telemetry.endpoints import count_fail_over
from ..telemetry.tracing import with_trace_context
from ..tools.toolbox import Toolbox, Tools
from ..upstream import Caller
from ..upstream.routing import Route, Upstreams
from .history import History, RunContext
from .input_files import InputFiles
from .run import Run
from .session import session_of

logger = logging.getLogger(__name__)


class RunFactory:
    """Prepares runs. `history` is the default history.

    `tools` are for upstreams with Chat Completions, and `forwarded_tools` for upstreams with a Responses API.
    """

    def __init__(self, upstreams: Upstreams, history: History, tools: Tools, forwarded_tools: Tools, files: InputFiles) -> None:
        self.upstreams = upstreams
        self._files = files
        self._history = history
        self._tools = {"chat": tools, "responses": forwarded_tools}

    def not_offered(self, request: CreateResponse, caller: Caller) -> list[str]:
        """Return the types of the request's tools that are not offered to the model because they are not supported."""
        return self._tools[self.upstreams.of(caller).settings.api].unserved.types(request.tools)

    async def route(self, request: CreateResponse, caller: Caller) -> Route:
        """Return the route of the request's model. Raises the errors of `Upstreams.route`."""
        return await self.upstreams.route(request.model, caller)

    async def prepare(self, request: CreateResponse, caller: Caller, history: History | None = None) -> Run:
        """Prepare a run without calling the model. If `history` is None, the factory's history is used.

        Raises `APIError` if the request cannot be served.
        """
        history = history or self._history
        route = await self.route(request, caller)
        asked, request = request, self._checked(request, route)
        context = await history.begin(request, caller.owner)
        request = configured(request, context.items)
        names = {"response_id": context.ids.response, "model": request.model or route.model}
        created = document.create(request, **names, created_at=int(time.time()))
        created["tools"] = self._tools["chat"].echo(created["tools"])
        created["store"] = await history.will_store(request, context)
        if request.enable_response_messages:
            created |= {"input_messages": None, "output_messages": None}  # set at the end of the run
        run = await self._new_run(request, caller, route, asked=asked, context=context, created=created, history=history)
        try:
            await self._read_files(run)
        except UpstreamError as error:
            if request.background:
                run.reads_files_later = True  # the worker that runs the job detects the dialect
            elif not (error.may_succeed_elsewhere and await self.fall_back(run)):
                raise
        if run.toolbox is not None:
            await run.toolbox.check_access()
        await self._refuse_own_objects(run, route)
        return run

    async def _refuse_own_objects(self, run: Run, route: Route) -> None:
        """Raise `NotSupported` if the upstream of `route` would get the id of a vector store or file of this server."""
        gate = partial(route.upstream.verify, run.caller)
        await self._tools[route.api].refuse_own_objects(run.asked.tools, run.caller.owner, gate)

    def _checked(self, request: CreateResponse, route: Route) -> CreateResponse:
        if not request.tools:
            return request
        return replace(request, tools=self._tools[route.api].check(request.tools, request.tool_choice))

    async def resume(self, request: CreateResponse, caller: Caller, job: Job, takeover: Takeover | None, route: Route) -> Run:
        """Return the run for the background response of `job`. The items of `request` must have ids.

        `takeover` is the output of another worker, or None if there is none yet. Raises `APIError` if the run cannot begin.
        """
        asked, request = request, self._checked(request, route)
        used, output = len(request.items), list[Item]()
        if takeover is not None:
            used, output = max(used, takeover.ids_used(job.response_id.removeprefix("resp_"))), takeover.items
        ids = RunIds(response=job.response_id, used=used)
        context = await self._history.rejoin(request, caller.owner, ids, job.token)
        request = configured(request, context.items)
        run = await self._new_run(
            request,
            caller,
            route,
            asked=asked,
            context=context,
            created=dict(job.document),
            history=self._history,
            output=output,
        )
        await self._read_files(run)
        run.earlier_continuations = job.continuations
        if takeover is None:
            run.first_events = run.assembler.resume(job.next_number)
        else:
            if run.toolbox is not None:
                await run.toolbox.restore(takeover.items)
            run.takeover, run.turns, run.phase = takeover, takeover.calls, takeover.phase
            run.first_events = run.assembler.take_over(takeover, job.next_number)
        return run

    async def _new_run(
        self,
        request: CreateResponse,
        caller: Caller,
        route: Route,
        *,
        asked: CreateResponse,
        context: RunContext,
        created: Document,
        history: History,
        output: Sequence[Item] = (),
    ) -> Run:
        """Return a new run. `asked` is the request before its tools were checked, and `output` that of another worker."""
        begin_run(created, streams=request.stream)
        annotate(upstream=route.upstream.name)
        if caller.headers or request.tools:
            protect(partial(credentials_in, caller.headers), partial(secrets_in_tools, request.tools))
        if route.upstream.uses_sessions:
            caller = replace(caller, session=session_of(request, context, is_stored=created["store"]), model=route.model)
        builder = self._builder(request, route, context, created, caller.owner)
        return Run(
            request=request,
            asked=asked,
            caller=caller,
            model=route.model,
            route=route,
            fallbacks=[*self.upstreams.fallbacks(route)],
            earlier=context.chain.items,
            input=context.input,
            document=created,
            size=context.size,
            context=context,
            history=history,
            assembler=builder,
            messages=route.backend.messages(request),
            toolbox=self._toolbox(builder, request, route, caller, context, output),
        )

    async def _read_files(self, run: Run) -> None:
        """Replace the files in the items of the history and of the request with parts that the upstream accepts."""
        upstream, caller, items = run.route.upstream, run.caller, (run.context.chain.items, run.context.input)
        gate, dialect = partial(upstream.verify, caller), partial(upstream.dialect, caller)
        only_stored = run.route.api == "responses"
        run.earlier, run.input = await self._files.replace(*items, caller.owner, gate, dialect, only_stored=only_stored)

    def _builder(
        self, request: CreateResponse, route: Route, context: RunContext, created: Document, owner: str
    ) -> ResponseBuilder:
        return route.backend.builder(request, created, context.ids, owner, context.chain.call_ids)

    def _toolbox(
        self,
        builder: ResponseBuilder,
        request: CreateResponse,
        route: Route,
        caller: Caller,
        context: RunContext,
        output: Sequence[Item] = (),
    ) -> Toolbox | None:
        """Return the toolbox of a run, and set the sources that its answer may cite."""
        tools = self._tools[route.api]
        headers = with_trace_context(caller.headers) if request.tools else {}
        gate, items = partial(route.upstream.verify, caller), [*context.items, *output]
        sources = sources_of(items)
        builder.sources = sources if tools.cites(request.tools, sources) else None
        return tools.toolbox(request.tools, items, context.input, headers, caller.owner, gate, sources, caller)

    async def close(self, toolbox: Toolbox) -> None:
        """Close the toolbox of a run, in the background if possible."""
        await self._tools["chat"].close(toolbox)

    # -- fallbacks ---------------------------------------------------------------------------------------------------------

    async def fall_back(self, run: Run) -> bool:
        """Move `run` to the next upstream that can replace its own. Return false if there is none."""
        while run.fallbacks:
            route = run.fallbacks.pop(0)
            if route.api == run.route.api or not (run.document["output"] or run.takeover or run.turns > 1):
                try:
                    await self._refuse_own_objects(run, route)
                except NotSupported as error:
                    logger.warning("response %s cannot fall back to %s: %s", run.document["id"], route.upstream.name, error)
                    continue
                await self._move(run, route)
                return True
        return False

    async def _move(self, run: Run, route: Route) -> None:
        """Move `run` to the upstream of `route`. If that has another API, the run starts again, and keeps the events so far."""
        logger.warning("response %s falls back to the upstream %s", run.document["id"], route.upstream.name)
        annotate(upstream=route.upstream.name)
        count_fail_over(run.route.upstream.name, "fallback")
        is_other_api = route.api != run.route.api
        run.route, run.model, run.document["model"] = route, route.model, route.public_model
        run.caller = replace(run.caller.at_another_upstream(), model=route.model)
        await self._read_files(run)
        if not is_other_api:
            return
        if run.toolbox is not None:
            await self.close(run.toolbox)
        run.request = configured(self._checked(run.asked, route), run.context.items)
        earlier, run.offered = run.assembler, []
        run.assembler = self._builder(run.request, route, run.context, run.document, run.caller.owner)
        run.assembler.follow(earlier)
        run.messages = route.backend.messages(run.request)
        run.toolbox = self._toolbox(run.assembler, run.request, route, run.caller, run.context)
