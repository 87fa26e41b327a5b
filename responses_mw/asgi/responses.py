"""The Responses API (OpenAI reference, "Responses"), including compaction and the counting of input tokens."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ..cache import Cache
from ..cache.policy import HEADER as CACHE_HEADER
from ..cache.policy import policy_of
from ..engine.run import Outlet, RunMode
from ..engine.runner import Runner
from ..errors import BadRequest, MethodNotAllowed, NotFound, NotSupported, UpgradeRequired
from ..jobs import JobService
from ..protocol.request import checks
from ..protocol.request.create import CreateResponse
from ..protocol.response.compaction import create_body
from ..protocol.response.document import whole
from ..protocol.response.events import Event
from ..protocol.types import Document
from ..settings import CacheSettings, ServerSettings
from ..state import State, StateUnavailable
from ..telemetry.context import annotate, current_request
from ..upstream import Caller, Upstream
from .access import RateLimits
from .http_responses import BODY_WRITER, EventStreamResponse, JSONResponse, LogStreamResponse, RunJSONResponse
from .idempotency import OnceOnly, once
from .requests import Reader, flag, included, listed, number, paging, shown
from .telemetry import add_headers

_MAX_SEQUENCE_NUMBER = 2**53
_FORWARDED, _NOT_OFFERED = "x-responses-forwarded", "x-responses-not-offered"
_MAX_NAMES, _MAX_NAME = 16, 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_.-]")


@dataclass(eq=False)
class ResponseRoutes:
    """The endpoints that `routes.py` lists. `state` and `jobs` are None if the server has no stored state."""

    runner: Runner
    upstream: Upstream
    state: State | None
    jobs: JobService | None
    reader: Reader
    limits: RateLimits
    settings: ServerSettings
    caching: CacheSettings
    cache: Cache | None

    async def create(self, request: Request) -> ASGIApp:
        body, parsed = await self.reader.read(request, self.reader.resolve_and_parse)
        caller = self.reader.caller(request)
        await self.limits.request(request.scope, caller)
        if parsed.stream:
            await self.limits.stream(request.scope, caller)
        for header, names in ((_FORWARDED, parsed.extra), (_NOT_OFFERED, self.runner.not_offered(parsed))):
            if names:
                add_headers(request.scope, {header: _listed_names(names)})
        asked = "; ".join(request.headers.getlist(CACHE_HEADER))
        policy = policy_of(parsed.cache, asked, self.caching, stored=parsed.store)
        guard = await once(request.headers, self.state, parsed, body, caller, partial(self.upstream.verify, caller))
        if parsed.background:
            return await self._create_in_background(parsed, body, caller, guard)
        mode = RunMode.STREAMED if parsed.stream else RunMode.WHOLE
        outlet = Outlet() if parsed.stream and BODY_WRITER in request.scope else None
        batches = self.runner.run(parsed, caller, mode, policy=policy, outlet=outlet)
        is_open = self.settings.reasoning_events == "open_responses"
        if guard is not None:
            batches = guard.run(batches, parsed, open_reasoning=is_open)
        add_headers(request.scope, _cache_status)
        if parsed.stream:
            return EventStreamResponse(batches, self.settings, outlet)
        return RunJSONResponse(batches, self.settings)

    async def _create_in_background(
        self, parsed: CreateResponse, body: dict[str, Any], caller: Caller, guard: OnceOnly | None
    ) -> ASGIApp:
        if self.jobs is None:
            message = "'background' needs stored state, but this server has none: configure Redis."
            raise NotSupported(message, param="background")
        await self.upstream.verify(caller)
        await self.jobs.check_secrets()
        earlier = await guard.earlier(wait=True) if guard is not None else None
        if earlier is not None:
            document = earlier.document
            annotate(outcome="repeated", response=document)
        else:
            async with guard.making() if guard is not None else nullcontext():
                document = await self._queued(self.jobs, parsed, body, caller, guard)
        if parsed.stream:
            return LogStreamResponse(self.jobs.follow(document), self.settings)
        return JSONResponse(whole(document, parsed.include))

    async def _queued(
        self, jobs: JobService, parsed: CreateResponse, body: dict[str, Any], caller: Caller, guard: OnceOnly | None
    ) -> Document:
        run = await self.runner.prepare(parsed, caller)
        await self.runner.check(run)
        response_id = run.document["id"]
        async with self.limits.background(response_id, caller):
            if guard is not None:
                await guard.name(response_id)
            document = await jobs.create(run, body, partial(self.upstream.verify, caller))
        if guard is not None:
            await guard.complete(response_id)
        return document

    async def connect(self, request: Request) -> ASGIApp:
        """Refuse a `GET /v1/responses` over HTTP, or an upgrade that the ASGI server does not support."""
        if request.headers.get("upgrade", "").lower() == "websocket":
            raise UpgradeRequired("This server does not accept WebSockets; use HTTP.", headers={"upgrade": "HTTP/1.1"})
        raise MethodNotAllowed("Method GET is not allowed for /v1/responses.", headers={"allow": "POST"})

    async def retrieve(self, request: Request) -> ASGIApp:
        include = included(request)
        streamed, after = flag(request, "stream"), _starting_after(request)
        flag(request, "include_obfuscation")  # accepted, but no padding is added
        state, jobs, caller, response_id = await self._stored(request)
        stored = await state.responses.get(response_id, caller.owner)
        annotate(response=stored.document)
        if stored.lost:
            with suppress(StateUnavailable):  # return the response as it is stored
                await jobs.settle(response_id)
                stored = await state.responses.get(response_id, caller.owner)
        if not streamed:
            return JSONResponse(whole(stored.document, include))
        if not stored.document["background"]:
            message = f"Response with id '{response_id}' cannot be streamed again: it was not created with background=true."
            raise BadRequest(message, param="stream", code="not_a_background_response")
        await self.limits.stream(request.scope, caller)
        return LogStreamResponse(jobs.follow(stored.document, after=after), self.settings)

    async def delete(self, request: Request) -> ASGIApp:
        _, jobs, caller, response_id = await self._stored(request)
        if self.cache is not None:  # before the response is deleted, so that the client can retry a failed request
            await self.cache.entries.forget(caller.owner, response_id)
        await jobs.delete(response_id, caller.owner)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> ASGIApp:
        _, jobs, caller, response_id = await self._stored(request)
        return JSONResponse(whole(await jobs.cancel(response_id, caller.owner)))

    async def input_items(self, request: Request) -> ASGIApp:
        include, page, before = included(request), paging(request), request.query_params.get("before")
        state, _, caller, response_id = await self._stored(request)
        items = await state.responses.input_items(response_id, caller.owner, before=before, **page)
        return JSONResponse(listed(items, include))

    async def compact(self, request: Request) -> ASGIApp:
        """Compact a history. Nothing is stored."""
        parsed = await self.reader.read(request, lambda body, size: self.reader.parse(create_body(body), size))
        caller = self.reader.caller(request)
        await self.limits.request(request.scope, caller)

        async def events() -> AsyncGenerator[list[Event], None]:
            compacted = await self.runner.compact(parsed, caller)
            output = [shown(item, frozenset()) for item in compacted["output"]]
            yield [Event("response.completed", {"response": {**compacted, "output": output}})]

        return RunJSONResponse(events(), self.settings)

    async def count_tokens(self, request: Request) -> ASGIApp:
        """Return the number of input tokens that `create` would send to the model."""
        parsed = await self.reader.read(request, self._parse_counted)
        caller = self.reader.caller(request)
        await self.upstream.verify(caller)  # some upstreams tokenize without a credential
        count = await self.runner.count_tokens(parsed, caller)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    def _parse_counted(self, body: Any, size: int) -> CreateResponse:
        if isinstance(body, dict) and body.pop("personality", None) is not None:
            checks.unsupported("personality", "only OpenAI's models have it.")
        return replace(self.reader.parse(body, size), stream=False, store=False, background=False)

    async def _stored(self, request: Request) -> tuple[State, JobService, Caller, str]:
        """Verify the caller. Return the state, the jobs, the caller and the id of the response in the path."""
        caller, response_id = self.reader.caller(request), request.path_params["response_id"]
        await self.upstream.verify(caller)
        if self.state is None or self.jobs is None:
            raise NotFound(f"Response with id '{response_id}' not found.")
        return self.state, self.jobs, caller, response_id


def _cache_status() -> dict[str, str]:
    facts = current_request()
    return {CACHE_HEADER: facts.cache_status} if facts is not None and facts.cache_status else {}


def _listed_names(names: Iterable[str]) -> str:
    """Return at most 16 of the `names` as a header value, and `...` if there are more."""
    listed = sorted(_NOT_IN_NAMES.sub("_", name[:_MAX_NAME]) for name in names)
    return ", ".join(listed[:_MAX_NAMES] + ["..."] * (len(listed) > _MAX_NAMES))


def _starting_after(request: Request) -> int:
    if "starting_after" not in request.query_params:
        return -1  # the stream begins with the first event
    return checks.integer(number(request, "starting_after", 0), "starting_after", minimum=0, maximum=_MAX_SEQUENCE_NUMBER)
